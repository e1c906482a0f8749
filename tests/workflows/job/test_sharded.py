"""A policy that two ranks of FSDP2 load, train, save and resume: each has its half, and both learn what one process
does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from tests.scale import only_long  # noqa: E402
from tests.workflows.job import jobs  # noqa: E402
from tests.workflows.job.sharded_ranks import RANKS, job_at, own, step  # noqa: E402
from tests.workflows.job.test_export import logprobs, moe  # noqa: E402
from transferqueue.adapters.scoring import load_causal_lm  # noqa: E402
from transferqueue.adapters.weight_files import model_weight_files  # noqa: E402
from transferqueue.errors import Corruption  # noqa: E402
from transferqueue.workflows.job.data.tokenizer import load_tokenizer  # noqa: E402
from transferqueue.workflows.job.devices import device_bytes  # noqa: E402
from transferqueue.workflows.job.devices.model_sizes import model_sizes  # noqa: E402
from transferqueue.workflows.job.run_files import checkpoint_path  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make  # noqa: E402
from transferqueue.workflows.job.training.checkpoint import Checkpoints, checkpoint_state, load_checkpoint  # noqa: E402
from transferqueue.workflows.job.training.gather import StreamPosition  # noqa: E402
from transferqueue.workflows.job.training.model_files import export_checkpoint, write_model_files  # noqa: E402
from transferqueue.workflows.job.training.process import policy_learner  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WAIT_S = 500
SIZES = {"hidden_size": 16, "intermediate_size": 36, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
"""36 rows and 15 are halves of whole rows and not."""


def with_adapters(base: Path) -> None:
    """A model, and beside it a checkpoint of adapters that were trained for a step."""
    make(base, **SIZES)
    job = job_at(base.parent, ["trainer.lora_rank=3"])
    learner, tokenizer = policy_learner(job), load_tokenizer(job.model)
    step(learner)
    first = Checkpoints(
        base.parent / "first",
        describe=lambda place: write_model_files(place, learner.model, tokenizer, job.model.path),
    )
    first.save(learner, 1, StreamPosition())


MODELS: dict[str, tuple[Any, list[str]]] = {
    "tied": (lambda place: make(place, **SIZES), []),
    "adapters": (lambda place: make(place, **SIZES), ["trainer.lora_rank=3"]),
    "given adapters": (with_adapters, ["trainer.lora_adapter={place}/first/step-00000001"]),
    "built in": (lambda place: make(place, kind="builtin"), []),
    "experts": (moe, []),
}
RANDOM_BYTES = 6000
"""Of torch's random generator, which each rank has."""
CLOSE = {"rtol": 1e-3, "atol": 2e-5}


class Trained(NamedTuple):
    """One process and two ranks took a step with the same rows. job, alone: of the one process. found: by the ranks."""

    place: Path
    job: Any
    alone: Any
    found: list[dict[str, Any]]

    @property
    def step(self) -> Path:
        """The checkpoint of the ranks."""
        return checkpoint_path(self.place / "ranks", 1)


@pytest.fixture(scope="module", params=["tied", *only_long("adapters", "given adapters", "built in", "experts")])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    make_model, changes = MODELS[request.param]
    place = tmp_path_factory.mktemp("ranks")
    make_model(place / "base")
    changes = [change.format(place=place) for change in changes]
    job = job_at(place, changes)
    alone = policy_learner(job)
    taken = step(alone)
    Checkpoints(place / "alone").save(alone, 1, StreamPosition())
    shutil.copytree(checkpoint_path(place / "alone", 1), place / "damaged")
    flip(place / "damaged" / "trainer" / "optimizer.safetensors")
    command = [sys.executable, "-m", "tests.workflows.job.sharded_ranks"]
    ranks = [subprocess.Popen([*command, str(rank), str(place), *changes]) for rank in range(RANKS)]
    assert [rank.wait(WAIT_S) for rank in ranks] == [0] * RANKS
    found = [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    for name in ("loss", "gradient_norm", "tokens"):
        assert [each["step"][name] for each in found] == pytest.approx([taken[name]] * RANKS, rel=1e-4)
    return Trained(place, job, alone, found)


def flip(file: Path) -> None:
    written = bytearray(file.read_bytes())
    written[-3] ^= 1
    file.write_bytes(written)


def nbytes(*files: Path) -> int:
    return sum(file.stat().st_size for file in files)


def test_a_rank_reads_its_half_of_the_model_and_of_a_checkpoint(trained: Trained) -> None:
    whole = {
        "base": nbytes(*model_weight_files(trained.place / "base")),
        "resumed": nbytes(*trained.step.rglob("*.safetensors")),
        "of one process": nbytes(*(trained.place / "alone").rglob("*.safetensors")),
    }
    for what, size in whole.items():
        for each in trained.found:
            assert each[what] <= 0.55 * size + RANDOM_BYTES, (what, each[what], size)


def test_a_rank_has_the_bytes_of_its_share(trained: Trained) -> None:
    ranks = (f"trainer.ranks={RANKS}", "trainer.parallel=fsdp2")
    lora = f"trainer.lora_rank={trained.job.trainer.lora_rank}"
    job = jobs.job("grpo", "model.dtype=float32", *ranks, lora)
    sizes = model_sizes(str(trained.place / "base"))
    assert sizes is not None
    expected = device_bytes.trained(job, sizes).parts
    # The mean of the ranks: three rows of an adapter are two on one and one on the other.
    for name in (
        "weights",
        "gradients",
        "moments",
    ):
        assert mean(each["held"][name] for each in trained.found) == pytest.approx(expected[name], rel=0.1)


def test_ranks_go_on_bit_for_bit_and_one_process_goes_on_from_them(trained: Trained) -> None:
    assert [each["goes on bit for bit"] for each in trained.found] == [True] * RANKS
    again = policy_learner(trained.job)
    load_checkpoint(trained.step, again)
    for mine, theirs in zip(own(trained.alone), own(again), strict=True):
        torch.testing.assert_close(theirs, mine, **CLOSE)
    assert step(again)["loss"] < trained.found[0]["step"]["loss"]


def test_each_rank_writes_a_half_and_the_directory_is_a_model(trained: Trained, tmp_path: Path) -> None:
    sizes = [nbytes(file) for file in (trained.step / "trainer").iterdir()]
    assert len(sizes) == RANKS
    assert max(sizes) <= 0.55 * sum(sizes) + RANDOM_BYTES
    if trained.job.trainer.lora_rank:
        export_checkpoint(trained.step, trained.job, tmp_path / "whole", merge=True)
    else:
        assert len(model_weight_files(trained.step)) == RANKS
        export_checkpoint(trained.step, trained.job, tmp_path / "whole")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(trained.step).eval()
        torch.testing.assert_close(logprobs(theirs), logprobs(trained.alone.model), **CLOSE)
    exported = load_causal_lm(tmp_path / "whole", dtype="float32")
    torch.testing.assert_close(logprobs(exported), logprobs(trained.alone.model), **CLOSE)


def test_a_damaged_or_missing_file_is_refused_by_its_name_on_every_rank(trained: Trained, tmp_path: Path) -> None:
    for each in trained.found:
        assert each["unchanged"]
        assert 'trainer/optimizer.safetensors" is damaged: its checksum is ' in each["damaged"]
    again = policy_learner(trained.job)
    before = own(again)
    for name in sorted(checkpoint_state(trained.step).checksums):
        for damage, words in ((flip, f'{name}" is damaged'), (Path.unlink, f"cannot be read: .*{name}")):
            copy = tmp_path / "copy"
            shutil.copytree(trained.step, copy)
            damage(copy / name)
            with pytest.raises(Corruption, match=words):
                load_checkpoint(copy, again)
            shutil.rmtree(copy)
    assert all(map(torch.equal, own(again), before))


def test_a_rank_without_room_leaves_the_checkpoint_before(trained: Trained) -> None:
    for each in trained.found:
        assert "the checkpoint of step 2, " in each["disk"]
        assert "rank 1: [Errno 27] File too large" in each["disk"]
    assert [entry.name for entry in (trained.place / "ranks").iterdir()] == [trained.step.name]
