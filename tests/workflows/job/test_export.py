"""A model out of a run: checkpoints are model directories, exports are what transformers and a job's `model.path` load,
with the same log-probs, and a path that names a run is that of its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from safetensors.torch import load_file  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from tests.workflows.job import jobs  # noqa: E402
from tests.workflows.job.jobs import job as job_of  # noqa: E402
from transferqueue.adapters.scoring import load_causal_lm, response_logprobs  # noqa: E402
from transferqueue.cli.app import app  # noqa: E402
from transferqueue.errors import Corruption, NotFound, UsageError  # noqa: E402
from transferqueue.observe.units import size  # noqa: E402
from transferqueue.workflows.job.data.tokenizer import load_tokenizer  # noqa: E402
from transferqueue.workflows.job.run.export import export_run  # noqa: E402
from transferqueue.workflows.job.run.folder import RunFolder  # noqa: E402
from transferqueue.workflows.job.run_files import MODEL, checkpoint_path, model_directory  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make  # noqa: E402
from transferqueue.workflows.job.training.best_checkpoint import best_step, has_stalled, judged_steps  # noqa: E402
from transferqueue.workflows.job.training.checkpoint import Checkpoints  # noqa: E402
from transferqueue.workflows.job.training.gather import StreamPosition  # noqa: E402
from transferqueue.workflows.job.training.model_files import export_checkpoint, write_model_files  # noqa: E402
from transferqueue.workflows.job.training.process import policy_learner  # noqa: E402

PROMPTS, RESPONSES = [[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 4]]
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
RUN = Path("checkpoints/train")


def logprobs(model: Any) -> Any:
    with torch.no_grad():
        return response_logprobs(model, PROMPTS, RESPONSES)


def run_of(place: Path, *changes: str, steps: tuple[int, ...] = (1, 2)) -> tuple[Path, Any]:
    """The folder of a run whose policy took these steps, and its learner."""
    job = job_of("sft", f"model.path={place / 'base'}", "model.dtype=float32", "trainer.devices=cpu", *changes)
    learner, folder = policy_learner(job), place / "run"
    RunFolder(folder).begin(job, None)
    checkpoints = Checkpoints(
        folder / RUN,
        keep=9,
        describe=lambda to: write_model_files(to, learner.model, load_tokenizer(job.model), job.model.path),
    )
    for step in range(1, max(steps) + 1):
        for number, weight in enumerate(learner.trained):
            weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(step + number))
        learner.steps_taken = step
        if step in steps:
            checkpoints.save(learner, step, StreamPosition(4 * step))
    return folder, learner


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("whole")
    make(place / "base", **SMALL)
    return run_of(place)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("lora")
    make(place / "base", **SMALL)
    return run_of(place, "trainer.lora_rank=2", steps=(1,))


def moe(place: Path, *, layers: int = 1, inner: int = 8) -> None:
    """A mixture of experts, whose publisher names weights otherwise than the module does."""
    make(place, **SMALL)
    config = transformers.Qwen3MoeConfig(
        **SMALL,
        vocab_size=512,
        num_hidden_layers=layers,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=inner,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(place)


# ---------------------------------------------------------------- the same model


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_an_export_is_the_model_of_the_checkpoint(whole, tmp_path, dtype):
    folder, learner = whole
    written = export_run(folder, tmp_path / "out", dtype=dtype)
    assert written.step == 2
    assert not list(tmp_path.glob(".*"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert str(theirs.dtype) == f"torch.{dtype or 'float32'}"
    assert written.nbytes == sum(weight.nbytes for weight in theirs.parameters())
    tolerance = {"rtol": 0, "atol": 0.2 if dtype else 1e-5}
    torch.testing.assert_close(logprobs(theirs).float(), logprobs(learner.model), **tolerance)
    torch.testing.assert_close(logprobs(load_causal_lm(tmp_path / "out", dtype="float32")), logprobs(theirs.float()))
    base, mine = (transformers.AutoTokenizer.from_pretrained(at) for at in (folder.parent / "base", tmp_path / "out"))
    messages = [{"role": "user", "content": "sort 3 1 2"}]
    assert mine.apply_chat_template(messages, tokenize=False) == base.apply_chat_template(messages, tokenize=False)
    assert mine("3 1 2")["input_ids"] == base("3 1 2")["input_ids"]
    assert theirs.generation_config.eos_token_id == base.eos_token_id


def test_a_checkpoint_is_a_model_directory_itself(whole):
    folder, learner = whole
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_path(folder / RUN, 2)).eval()
    torch.testing.assert_close(logprobs(theirs), logprobs(learner.model), rtol=0, atol=1e-5)
    assert [file.name for file in checkpoint_path(folder / RUN, 2).glob("*.safetensors")] == ["model.safetensors"]


def test_large_weights_are_in_several_files_with_an_index(whole, tmp_path):
    folder, learner = whole
    job = RunFolder(folder).job()
    export_checkpoint(checkpoint_path(folder / RUN, 2), job, tmp_path / "out", shard_bytes=8000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert files == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    torch.testing.assert_close(
        logprobs(load_causal_lm(tmp_path / "out", dtype="float32")), logprobs(learner.model), rtol=0, atol=1e-5
    )


def test_weights_have_the_names_of_their_publisher(tmp_path):
    moe(tmp_path / "base")
    folder, learner = run_of(tmp_path, steps=(1,))
    export_run(folder, tmp_path / "out")
    names = [set(load_file(at / "model.safetensors")) for at in (tmp_path / "base", tmp_path / "out")]
    assert names[0] == names[1]
    for place in (tmp_path / "out", checkpoint_path(folder / RUN, 1)):
        model = load_causal_lm(place, dtype="float32")
        torch.testing.assert_close(logprobs(model), logprobs(learner.model), rtol=0, atol=1e-5)


class HeldBytes(TorchDispatchMode):
    """The most bytes that tensors in host memory held at a time. before: tensors that are there already."""

    def __init__(self, before: Any = ()) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[Any, int]] = {}
        self._hold(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._held = {at: kept for at, kept in self._held.items() if not kept[0].expired()}
        self._hold(tree_leaves(made))
        return made

    def _hold(self, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._held.values()))


@pytest.mark.parametrize("kind", ["whole", "merged", "experts"])
def test_an_export_never_holds_the_model(kind, tmp_path):
    if kind == "experts":
        moe(tmp_path / "base", layers=6, inner=128)
    else:
        make(tmp_path / "base", **SMALL | {"intermediate_size": 256, "num_hidden_layers": 6})
    folder, learner = run_of(tmp_path, *(["trainer.lora_rank=2"] if kind == "merged" else []), steps=(1,))
    with HeldBytes() as held:
        written = export_run(folder, tmp_path / "out", merge=kind == "merged")
    largest = max(weight.nbytes for weight in learner.model.parameters())
    assert largest <= held.peak <= 3 * largest < written.nbytes / 3
    model = load_causal_lm(tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logprobs(model), logprobs(learner.model), rtol=0, atol=2e-5)


def test_a_built_in_model_comes_out_too(tmp_path):
    make(tmp_path / "base", kind="builtin")
    folder, learner = run_of(tmp_path, steps=(1,))
    export_run(folder, tmp_path / "out", dtype="bfloat16")
    for place, atol in ((tmp_path / "out", 0.2), (checkpoint_path(folder / RUN, 1), 1e-5)):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype="auto").float().eval()
        for model in (load_causal_lm(place, dtype="float32"), theirs):
            torch.testing.assert_close(logprobs(model), logprobs(learner.model), rtol=0, atol=atol)


def test_adapters_come_out_as_peft_reads_them_or_merged(adapted, tmp_path):
    folder, learner = adapted
    export_run(folder, tmp_path / "adapter", dtype="bfloat16")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, str(folder.parent / "base"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 14
    query = learner.model.model.layers[0].self_attn.q_proj
    stored = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(stored, query.lora_b.to(torch.bfloat16))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template
    files = [file.stat().st_mode for file in (tmp_path / "adapter").iterdir()]
    assert len(set(files)) == 1, "those who may read the description may read the weights"

    export_run(folder, tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged" / "adapter_config.json").exists(), "peft would look for adapters beside it"
    for model in (
        load_causal_lm(tmp_path / "merged", dtype="float32"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(),
    ):
        torch.testing.assert_close(logprobs(model), logprobs(learner.model), rtol=0, atol=2e-5)
    plain = load_causal_lm(folder.parent / "base", dtype="float32")
    assert (logprobs(plain) - logprobs(learner.model)).abs().max() > 1e-3


def test_the_base_of_adapters_is_found_from_another_folder(adapted, tmp_path, monkeypatch):
    folder, _ = adapted
    text = (folder / "job.toml").read_text()
    (tmp_path / "run").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    try:
        (folder / "job.toml").write_text(text.replace(str(folder.parent / "base"), "base"))
        starts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps([starts[0] | {"place": str(folder.parent)}]))
        assert export_run(Path("run"), Path("out"), merge=True).step == 1
    finally:
        (folder / "job.toml").write_text(text)


# ---------------------------------------------------------------- refusals


def test_a_refused_export_says_what_to_do_and_leaves_nothing(whole, adapted, tmp_path):
    folder, out = whole[0], tmp_path / "out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "new").begin(RunFolder(folder).job(), None)
    before = sorted(path.name for path in tmp_path.iterdir())
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: export_run(folder, tmp_path / "full"), UsageError, "exists already, .*; give a directory that is new"),
        (lambda: export_run(tmp_path / "full", out), NotFound, r"is no folder of a run: it has no job\.toml"),
        (lambda: export_run(tmp_path / "new", out), NotFound, "has no checkpoint, .*; go on with the run"),
        (lambda: export_run(folder, out, step=7), NotFound, "no checkpoint of step 7; it has those of steps 1, 2"),
        (lambda: export_run(folder, out, step=1, best=True), UsageError, "both choose the checkpoint"),
        (lambda: export_run(folder, out, best=True), NotFound, r'set checkpoint\.best="evaluation"'),
        (lambda: export_run(folder, out, dtype="int4"), UsageError, 'dtype "int4" is unknown; give one of'),
        (lambda: export_run(folder, out, merge=True), UsageError, "trains all weights and has no adapters"),
    ]
    for call, kind, words in refused:
        with pytest.raises(kind, match=words):
            call()
    checkpoint, job = checkpoint_path(folder / RUN, 2), RunFolder(folder).job()
    with pytest.raises(UsageError, match=r"needs 64 MiB, and its disk has 1 MiB free; make room"):
        export_checkpoint(checkpoint, job, out, free_bytes=lambda place: 1 << 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert export_run(folder, tmp_path / "empty").step == 2


def test_the_command_says_what_it_wrote_or_why_not(whole, tmp_path):
    words = ["export", str(whole[0]), str(tmp_path / "out"), "--step", "1", "--dtype", "bfloat16"]
    ran = CliRunner().invoke(app, words)
    weights = size(sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values()))
    assert (ran.exit_code, ran.stdout) == (0, f"wrote {tmp_path / 'out'}: step 1, {weights} of weights\n"), ran.stderr
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2
    assert ran.stderr.startswith(f"error: {tmp_path / 'out'} exists already")


def test_a_damaged_checkpoint_is_not_exported(whole, tmp_path):
    folder = whole[0]
    weights = checkpoint_path(folder / RUN, 1) / "model.safetensors"
    written = weights.read_bytes()
    weights.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    try:
        with pytest.raises(Corruption, match="is damaged: its checksum"):
            export_run(folder, tmp_path / "out", step=1)
    finally:
        weights.write_bytes(written)


# ---------------------------------------------------------------- a run as a model's path


def test_a_run_stands_for_its_model(whole, adapted, tmp_path):
    folder = whole[0]
    assert model_directory("models/none") == "models/none"
    assert model_directory(str(folder)) == str(checkpoint_path(folder / RUN, 2))
    job = job_of("distill", f"model.path={folder}", f"teacher.path={checkpoint_path(folder / RUN, 1)}")
    assert job.model.path == job.model.tokenizer == str(checkpoint_path(folder / RUN, 2))
    assert job.teacher.path.endswith("step-00000001")
    assert load_tokenizer(job.model).chat_template
    with pytest.raises(UsageError, match="has adapters alone: write the whole model by `transferqueue export RUN --m"):
        model_directory(str(adapted[0]))
    begun = job_of("sft", f"model.path={adapted[0].parent / 'base'}", f"trainer.lora_adapter={adapted[0]}")
    assert (begun.trainer.lora_adapter, begun.trainer.lora_rank) == (str(checkpoint_path(adapted[0] / RUN, 1)), 2)
    RunFolder(tmp_path).begin(job, None)
    with pytest.raises(NotFound, match="has no checkpoint"):
        model_directory(str(tmp_path))
    (tmp_path / MODEL).mkdir()
    assert model_directory(str(tmp_path)) == str(tmp_path / MODEL)


# ---------------------------------------------------------------- the best one

BEST = ("checkpoint.best=evaluation", "checkpoint.every=1", "evaluation.every=1", "evaluation.path=x")


def judged(folder: Path, *lines: tuple[int, int, float], measure: str = "loss") -> None:
    text = "".join(
        json.dumps({"step": step, "version": version, measure: value}) + "\n" for step, version, value in lines
    )
    (folder / "evaluations.jsonl").write_text(text + '{"step": ')


def test_the_best_step_is_that_of_the_best_evaluation_of_the_same_weights(whole):
    folder = whole[0]
    judged(folder, (0, 0, 0.1), (1, 1, 0.5), (2, 2, 0.7))
    assert best_step(folder, [1, 2]) == 1
    judged(folder, (1, 1, 0.5), (2, 2, 0.7), measure="reward")
    assert best_step(folder, [1, 2]) == 2
    judged(folder, (1, 3, 0.5), (2, 2, 0.7))  # of newer weights: those of step 1 had been freed
    assert best_step(folder, [1, 2]) == 2
    judged(folder, (1, 1, 0.9), (1, 1, 0.5), (2, 2, 0.5))  # again after a resume; of equals the first
    assert best_step(folder, [1, 2]) == 1
    (folder / "evaluations.jsonl").unlink()
    assert best_step(folder, [1, 2]) is None


def test_the_best_and_those_that_wait_for_their_evaluation_stay(tmp_path):
    make(tmp_path / "base", **SMALL)
    folder, learner = run_of(tmp_path, *BEST, steps=(1, 2, 3, 4, 5, 6, 7))
    job = RunFolder(folder).job()
    judged(folder, (1, 1, 0.5), (2, 2, 0.3), (3, 3, 0.4))
    assert judged_steps(folder, range(1, 8), job) == [4, 5, 2]
    checkpoints = Checkpoints(folder / RUN, keep=1, keeps=lambda steps: judged_steps(folder, steps, job))
    checkpoints.save(learner, 7, StreamPosition(28))
    assert checkpoints.steps() == [2, 4, 5, 7]
    assert export_run(folder, tmp_path / "out", best=True).step == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('evaluation.path=""', "without evaluation.path"),
        ("checkpoint.every=0", "without checkpoint.every"),
        ("checkpoint.every=2", "evaluation.every=1, checkpoint.every=2 and weights.every=1: .* a multiple of 2"),
    ],
)
def test_a_best_checkpoint_without_evaluations_of_checkpoints_is_refused(change, words):
    assert isinstance(job_of("sft", *BEST), Job)
    with pytest.raises(UsageError, match=words):
        job_of("sft", *BEST, change)


def test_a_figure_is_compared_and_a_run_has_stalled_after_its_patience(whole, tmp_path):
    folder = whole[0]
    lines = [(1, 1, 0.2, 0.9), (2, 2, 0.6, 0.7), (3, 3, 0.5, 0.8)]
    text = [
        json.dumps({"step": step, "version": version, "reward": reward, "hard/loss": loss})
        for step, version, reward, loss in lines
    ]
    (folder / "evaluations.jsonl").write_text("\n".join(text))
    assert best_step(folder, [1, 2]) == best_step(folder, [1, 2], "hard/loss") == 2
    assert best_step(folder, [1, 2], "hard/reward") is None
    job = jobs.job("grpo", "evaluation.path=x", "evaluation.patience=1")
    assert has_stalled(folder, job)
    assert not has_stalled(folder, jobs.job("grpo", "evaluation.path=x", "evaluation.patience=2"))
    assert not has_stalled(folder, jobs.job("grpo", "evaluation.path=x"))
    assert not has_stalled(tmp_path, job), "nothing was evaluated yet"
    judged(tmp_path, (0, 0, 0.1), (1, 5, 0.3), (2, 5, 0.3), (3, 5, 0.3), measure="reward")
    assert not has_stalled(tmp_path, job), "three late evaluations of one version"
