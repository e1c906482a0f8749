"""vLLM with adapters by version: each request draws with the adapters that it began with, several versions beside one
base."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.engines.tiny import model, save
from tests.weights.relays import until

pytest.importorskip("vllm", reason="make test-engines installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from transferqueue.adapters.protocols import Caches, Completion, Pause, Prompt, Sampling
from transferqueue.adapters.scoring.lora import AdapterWeights, add_lora
from transferqueue.adapters.vllm.engine import VllmGenerator, _folder
from transferqueue.adapters.weights import ModuleWeights, WeightUpdater
from transferqueue.errors import SchemaError, UsageError

SLOTS, BLOCK = 2, 32
LONG = Sampling(tokens_max=150)
# Its first block is found in the cache again by a later request with the same adapters.
PROMPT = Prompt(ids=np.random.default_rng(3).integers(5, 60, size=40).astype(np.int32), samples=2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["core in this process", "core in a process of its own"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmGenerator]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int("its own" in request.param)))
        found = VllmGenerator(
            str(save(tmp_path_factory.mktemp("model"))),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=32,
            block_size=BLOCK,
            kv_cache_memory_bytes=64 << 20,
            enable_lora=True,
            max_loras=SLOTS,
            max_lora_rank=8,
        )
    yield found
    found.close()
    with warnings.catch_warnings():  # vLLM leaves a context of ZeroMQ to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        vars(found).clear()  # pytest keeps the fixture itself
        gc.collect()


class Trained:
    """A model whose adapters move, the channel that it publishes them on, and what the engine follows it by."""

    def __init__(self, engine: VllmGenerator, queue: tq.Queue, rank: int = 4, keep: int = 2, seed: int = 0) -> None:
        self.model, self.engine, self.states = model(1), engine, list[dict[str, torch.Tensor]]()
        torch.manual_seed(seed)  # `model` sets one of its own
        add_lora(self.model, rank=rank, targets=["q_proj", "v_proj", "gate_proj", "down_proj"])
        self.queue, self.channel = queue, queue.weights("policy", keep=keep)
        self.updater = WeightUpdater(queue, "policy", engine.update_weights, reads_channel=engine.reads_channel)

    def publish(self) -> int:
        """Publish the next version with other adapters; return the bytes that it wrote."""
        for name, parameter in self.model.named_parameters():
            if "lora" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        self.states.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        return self.channel.publish(len(self.states) - 1, dict(AdapterWeights(self.model)))

    def nothing_is_pinned(self) -> bool:
        """Whether the server has the blocks of all versions back, as soon as the workers' sessions have told it."""
        return self.queue.stats().bytes.blocks_pinned == 0

    def step(self) -> int:
        written = self.publish()
        assert self.updater.follow()
        return written

    @torch.no_grad()
    def truth(self, version: int, ids: Any) -> Any:
        """The log-probs of the drawn tokens of PROMPT under the adapters of a version, by the trainer's model."""
        self.model.load_state_dict(self.states[version])
        tokens = torch.from_numpy(np.concatenate([PROMPT.ids, ids])).long()[None]
        scores = self.model(input_ids=tokens).logits[0, len(PROMPT.ids) - 1 : -1].log_softmax(-1)
        self.model.load_state_dict(self.states[-1])
        return scores.gather(-1, torch.from_numpy(ids).long()[:, None])[:, 0].numpy()

    def check(self, drawn: Completion, version: int) -> None:
        """All tokens are of that version, and of no other."""
        assert drawn.spans == ((version, len(drawn.ids)),)
        differences = [np.abs(drawn.logprobs - self.truth(each, drawn.ids)).max() for each in range(len(self.states))]
        assert [difference < 1e-3 for difference in differences] == [
            each == version for each in range(len(differences))
        ]


class Running:
    """Requests that run while the weights change. The engine is paused, until `end`, when they have drawn some."""

    def __init__(self, engine: VllmGenerator, tokens: int) -> None:
        self.drawn, self._engine = list[Completion](), engine
        before = set(engine._rows._rows)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        with engine._turn:
            assert engine._turn.wait_for(lambda: self._tokens(before) >= tokens, 60)
        engine.pause(Pause.KEEP)

    def _run(self) -> None:
        self.drawn += self._engine.generate([PROMPT], LONG)

    def _tokens(self, before: set[str]) -> int:
        rows = [row.internal for name, row in self._engine._rows._rows.items() if name not in before]
        states = self._engine._engine.output_processor.request_states
        return min((states[row].detokenizer.num_output_tokens() for row in rows if row in states), default=0)

    def end(self) -> list[Completion]:
        self._engine.resume()
        self._thread.join(120)
        assert len(self.drawn) == PROMPT.samples
        return self.drawn


def drawn(engine: VllmGenerator) -> list[Completion]:
    found = list(engine.generate([PROMPT], Sampling(tokens_max=12)))
    assert len(found) == PROMPT.samples
    return found


def files(engine: VllmGenerator) -> list[str]:
    assert engine._folder is not None
    return sorted(path.name for path in Path(engine._folder.name).iterdir())


def test_requests_end_with_the_adapters_that_they_began_with_and_new_ones_get_the_newest(engine: VllmGenerator) -> None:
    """Two versions at a time, of a prompt whose cache is shared within a version and not beyond it."""
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        written = [trained.step()]
        before = engine.prefilled_again
        old = Running(engine, 20)
        written.append(trained.step())
        engine.resume()
        for completion in drawn(engine):
            trained.check(completion, 1)
        for completion in old.end():
            trained.check(completion, 0)
        for version in (2, 3, 4):
            written.append(trained.step())
            for completion in drawn(engine):
                trained.check(completion, version)
        assert len(files(engine)) == 1
    assert engine.prefilled_again == before
    assert max(written[1:]) < 0.2 * written[0]


def test_requests_of_more_versions_than_max_loras_wait_for_those_of_one_to_end(engine: VllmGenerator) -> None:
    with tq.connect() as queue:
        trained, running = Trained(engine, queue), []
        for tokens in (20, 10):
            trained.step()
            engine.resume()
            running.append(Running(engine, tokens))
        trained.step()
        assert len(files(engine)) == SLOTS + 1
        engine.resume()
        for completion in drawn(engine):
            trained.check(completion, 2)
        assert any(each.drawn for each in running), "the third version began when requests of another had ended"
        for version, each in enumerate(running):
            for completion in each.end():
                trained.check(completion, version)


@pytest.mark.parametrize("kv", Caches)
def test_no_caches_of_other_adapters_are_read_whose_channel_and_version_have_the_same_names(
    engine: VllmGenerator, kv: Caches
) -> None:
    """A trainer begins again on another queue, with the same numbers of versions, and other adapters."""
    assert len(PROMPT.ids) > BLOCK
    engine.kv = kv
    try:
        for seed in range(2):
            with tq.connect() as queue:
                trained = Trained(engine, queue, seed=seed)
                trained.step()
                for completion in drawn(engine):
                    trained.check(completion, 0)
    finally:
        engine.kv = Caches.RECOMPUTE


def test_the_first_adapters_need_their_version_of_the_channel_once(
    engine: VllmGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer goes on while they are loaded, and its channel keeps one version: nothing reads the old one again."""
    with tq.connect() as queue:
        trained = Trained(engine, queue, keep=1)
        engine.update_weights(ModuleWeights(model(0)), 7)
        core, called = engine._core, list[str]()

        def goes_on(call: str, *arguments: Any) -> Any:
            if not called:
                trained.publish()
            called.append(call)
            return core(call, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(engine, "_core", goes_on)  # after the workers have fetched, and before they load
            trained.step()
        assert called[0] == "pause_scheduler"
        assert queue.stats().channels["policy"].kept == [1]
        for completion in drawn(engine):
            trained.check(completion, 0)
        assert trained.updater.follow()
        for completion in drawn(engine):
            trained.check(completion, 1)


def test_what_does_not_fit_is_refused_and_released_and_the_adapters_stay(engine: VllmGenerator) -> None:
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        trained.step()
        with tq.connect() as another:
            larger = Trained(engine, another, rank=16)
            larger.publish()
            with pytest.raises(
                SchemaError, match="adapters of rank 16, and the engine takes those up to max_lora_rank=8"
            ):
                larger.updater.follow()
        tensors = dict(AdapterWeights(trained.model))
        embedding = {"model.embed_tokens.lora_a": torch.ones(4, 64), "model.embed_tokens.lora_b": torch.ones(64, 4)}
        trained.channel.publish(1, tensors | embedding)
        with pytest.raises(
            SchemaError, match=r"^version 1 has adapters of model\.embed_tokens, for which vLLM has none"
        ):
            trained.updater.follow()
        until(trained.nothing_is_pinned)
        old = Running(engine, 5)
        with pytest.raises(SchemaError, match="requests run with adapters, and version 9 has none"):
            engine.update_weights(ModuleWeights(model(0)), 9)
        with tq.connect() as another:
            other = Trained(engine, another, seed=1)
            other.publish()
            with pytest.raises(SchemaError, match="changes the weights beside the adapters that running requests keep"):
                other.updater.follow()
        changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}
        trained.channel.publish(2, changed)
        words = r'^version 2 changes the weights \(tensor "model\.norm\.weight"\) .* pause\(Pause\.WAIT\) first$'
        with pytest.raises(SchemaError, match=words):
            trained.updater.follow()
        until(trained.nothing_is_pinned)
        assert len(files(engine)) == 1
        for completion in old.end():
            trained.check(completion, 0)
        trained.states += [trained.states[0], {**trained.states[0], "model.norm.weight": changed["model.norm.weight"]}]
        assert trained.updater.follow(), "nothing runs now"
        for completion in drawn(engine):
            np.testing.assert_allclose(completion.logprobs, trained.truth(2, completion.ids), atol=1e-3)


def test_adapters_that_vllm_does_not_take_leave_the_older_ones(
    engine: VllmGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are damaged between worker and vLLM."""
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        trained.step()
        add = engine._engine.add_lora

        def damaged(request: Any) -> bool:
            (Path(request.lora_path) / "adapter_model.safetensors").write_bytes(b"none")
            return add(request)

        for runs in (True, False):
            old = Running(engine, 5) if runs else None
            trained.publish()
            with monkeypatch.context() as patched:
                patched.setattr(engine._engine, "add_lora", damaged)
                with pytest.raises(SchemaError, match="vLLM does not take the adapters of version"):
                    trained.updater.follow()
            until(trained.nothing_is_pinned)
            assert len(files(engine)) == 1
            for completion in old.end() if old else drawn(engine):
                trained.check(completion, 0)


def test_a_version_without_adapters_is_drawn_with_alone(engine: VllmGenerator) -> None:
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        trained.step()
        engine.update_weights(ModuleWeights(model(0)), 7)
        (first, _) = drawn(engine)
        assert first.spans == ((7, 12),)
        tokens = torch.from_numpy(np.concatenate([PROMPT.ids, first.ids])).long()[None]
        with torch.no_grad():
            scores = model(0)(input_ids=tokens).logits[0, len(PROMPT.ids) - 1 : -1].log_softmax(-1)
        truth = scores.gather(-1, torch.from_numpy(first.ids).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(first.logprobs, truth, atol=1e-3)
        trained.step()
        for completion in drawn(engine):
            np.testing.assert_allclose(completion.logprobs, trained.truth(1, completion.ids), atol=1e-3)


def test_requests_with_adapters_and_without_run_apart(engine: VllmGenerator) -> None:
    """In one batch vLLM on a CPU draws those without with the adapters of the others."""
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        tensors = {name: tensor for name, tensor in AdapterWeights(trained.model) if "lora" not in name}
        trained.states.append({name: tensor.clone() for name, tensor in trained.model.state_dict().items()})  # B is 0
        trained.channel.publish(0, tensors)
        assert trained.updater.follow()
        plain = Running(engine, 20)
        trained.publish()
        with pytest.raises(SchemaError, match=r"^requests run without adapters, and version 1 has some"):
            trained.updater.follow()
        for completion in plain.end():
            trained.check(completion, 0)
        assert trained.updater.follow()
        old = Running(engine, 20)
        trained.channel.publish(2, tensors)
        with pytest.raises(SchemaError, match=r"^requests run with adapters, and version 2 has none"):
            trained.updater.follow()
        for completion in old.end():
            trained.check(completion, 1)
        assert trained.updater.follow()
        for completion in drawn(engine):
            assert completion.spans == ((2, len(completion.ids)),)
            np.testing.assert_allclose(completion.logprobs, trained.truth(0, completion.ids), atol=1e-3)


def test_several_workers_take_merged_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="enable_lora with several workers"):
        VllmGenerator(str(save(tmp_path)), dtype="float32", enable_lora=True, tensor_parallel_size=2)


def test_files_that_a_killed_process_left_are_removed_and_those_of_a_living_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, lock = _folder()
    (tmp_path / "transferqueue-lora-dead" / "3").mkdir(parents=True)
    (tmp_path / "transferqueue-lora-dead.lock").touch()
    (tmp_path / "transferqueue-lora-other").mkdir()
    folder, own = _folder()
    kept = {living.name, f"{living.name}.lock", folder.name, f"{folder.name}.lock"}
    assert {str(path) for path in tmp_path.iterdir()} == kept | {str(tmp_path / "transferqueue-lora-other")}
    for each, held in ((living, lock), (folder, own)):
        each.cleanup()
        held.release()
