"""Images in jobs: a bad one is refused with its row, each is stored once a prompt, engine and trainer read the same
images, and a policy learns what only the image says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

import transferqueue as tq  # noqa: E402
from tests.workflows.job import jobs, short_run  # noqa: E402
from transferqueue.adapters.engines.images import IMAGE_BYTES_MAX, decoded, processor_of  # noqa: E402
from transferqueue.adapters.engines.transformers import TransformersGenerator  # noqa: E402
from transferqueue.adapters.protocols import Prompt, Sampling, Unsupported  # noqa: E402
from transferqueue.adapters.scoring import load_causal_lm, response_scores  # noqa: E402
from transferqueue.adapters.scoring.plan import plan_for  # noqa: E402
from transferqueue.errors import NotFound, UsageError  # noqa: E402
from transferqueue.workflows.job.data.prompt_data import open_prompts  # noqa: E402
from transferqueue.workflows.job.data.sequence import PromptSequence  # noqa: E402
from transferqueue.workflows.job.data.source import JobPrompts  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.tiny_model.vision import COLOURS, make_vision, write_colours  # noqa: E402

GROUP = 8
STEPS = ("--set", "steps=60", "--set", "evaluation.every=60")
REWARD = "transferqueue.workflows.job.tiny_model.tasks:exact"
JOB = """
name = "colours"
steps = 30
reproducible = true
model = { path = "model", dtype = "float32" }
data = { path = "data", prompt = "question", images = "images", prompt_tokens_max = 64 }
sampling = { group_size = 8, tokens_max = 2 }
algorithm = { kind = "grpo" }
trainer = { prompts_per_step = 8, lr = 1e-3 }
engine = [{ kind = "transformers", slots = 64 }]
reward = [{ function = "transferqueue.workflows.job.tiny_model.tasks:exact" }]
pacing = { mode = "sync" }
checkpoint = { every = 2 }
weights = { dtype = "float32" }
evaluation = { path = "data", split = "test", rows = 64, every = 30 }
queue = { memory_gib = 0.125, record = "on" }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with any colour, its data, and a job."""
    place = tmp_path_factory.mktemp("colours")
    make_vision(place / "model", steps=25)
    write_colours(place / "data", train=256, test=64)
    (place / "job.toml").write_text(JOB)
    return place


def job_of(place: Path, *changes: str) -> Job:
    own = (f"model.path={place / 'model'}", f"data.path={place / 'data'}", "data.prompt=question", "data.images=images")
    own += (f"reward.0.function={REWARD}",)
    return jobs.job("grpo", *own, "data.prompt_tokens_max=64", f"sampling.group_size={GROUP}", *changes)


def written(path: Path, images: Any, **columns: Any) -> Path:
    """A Parquet file with these values of `images`, as datasets stores them."""
    stored = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    count = len(images)
    made = {"question": ["Which?"] * count, "answer": ["r"] * count, **columns}
    pyarrow.parquet.write_table(pa.table(made | {"images": pa.array(images, pa.list_(stored))}), path)
    return path


def png(mode: str = "RGB", size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    file = BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def stored(*images: bytes | None, path: str | None = None) -> list[dict[str, Any]]:
    return [{"bytes": image, "path": path} for image in images]


def sequence(job: Job) -> PromptSequence:
    return PromptSequence(open_prompts(job), job.data, seed=job.seed, tokens_max=job.sampling.tokens_max)


# ---------------------------------------------------------------- the source


BAD: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
    "damaged": (lambda: stored(png(size=(64, 64))[:60]), r"image 0 cannot be decoded"),
    "no image": (lambda: stored(png(), b"<svg/>"), r"image 1 cannot be decoded: its 6 bytes are no .*PNG"),
    "a format that would start a program": (lambda: stored(png(kind="EPS")), r"image 0 cannot be decoded"),
    "too many pixels": (lambda: stored(png("1", (8200, 8200))), r"image 0 has 8,200 x 8,200 pixels, over"),
    "too many bytes": (lambda: stored(b"\x89PNG" + bytes(IMAGE_BYTES_MAX)), r"image 0 has .* bytes, over"),
    "a path alone": (lambda: stored(None, path="a.png"), r"image 0 has the path 'a.png' alone; give the bytes"),
    "no bytes": (lambda: stored(None), r"image 0 has no value; give the bytes"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_image_is_refused_with_its_file_and_row(place: Path, tmp_path: Path, bad: str) -> None:
    make, text = BAD[bad]
    path = written(tmp_path / "train.parquet", [stored(png()), stored(png()), make()])
    prompts = sequence(job_of(place, f"data.path={path}", "data.shuffle=false"))
    assert len(prompts.take(2)) == 2, "rows before it are prompts"
    with pytest.raises(UsageError, match=rf'train\.parquet, row 2: column "images", {text}'):
        prompts.take(1)


def test_a_row_without_images_and_a_column_that_is_missing_are_refused(place: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "train.parquet", [stored(png()), None])
    with pytest.raises(UsageError, match=r'row 1: column "images" has no value'):
        open_prompts(job_of(place, f"data.path={path}"))
    with pytest.raises(NotFound, match=r'data\.images: "image" is no column of .*; did you mean images\?'):
        open_prompts(job_of(place, f"data.path={path}", "data.images=image"))


def test_images_stand_where_the_messages_say_or_before_the_text(place: Path, tmp_path: Path) -> None:
    text, image = {"type": "text", "text": "or"}, {"type": "image", "text": None}
    messages = [[{"role": "user", "content": [image, text, image]}]] * 2
    pair, one = stored(png(), png(size=(9, 9))), stored(png())
    path = written(tmp_path / "train.parquet", [pair, one], messages=messages)
    parts = job_of(place, f"data.path={path}", "data.prompt=messages", "data.shuffle=false")
    prompts = sequence(job_of(place, f"data.path={path}", "data.shuffle=false")).take(2)
    (shown,) = sequence(parts).take(1)
    assert "<image>or<image>" in shown.text
    assert [len(prompt.images) for prompt in (shown, *prompts)] == [2, 2, 1]
    assert ["<image><image>Which?" in prompts[0].text, "user\n<image>Which?" in prompts[1].text] == [True, True]
    token = sequence(parts)._sources[0]._source.renderer._vision.token_id
    assert [int((prompt.ids == token).sum()) for prompt in (shown, *prompts)] == [8, 8, 4], "as many as features"


def test_another_number_of_images_than_the_prompt_has_places_for_is_refused(place: Path, tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": [{"type": "image", "text": None}]}]]
    path = written(tmp_path / "train.parquet", [stored(png(), png())], messages=messages)
    with pytest.raises(UsageError, match=r"row 0: the prompt has 2 images, and its text 1 placeholders"):
        sequence(job_of(place, f"data.path={path}", "data.prompt=messages")).take(1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["engine.0.kind=vllm"], r'engine.0.kind="vllm"'),
        (["engine.0.kind=openai", "engine.0.url=http://127.0.0.1:1", "engine.0.model=m"], r'engine.0.kind="openai"'),
        (["trainer.lora_rank=4"], "trainer.lora_rank=4"),
        (["trainer.parallel=fsdp2", "trainer.ranks=2"], 'trainer.parallel="fsdp2"'),
        (['reward=[{model="m"}]'], "reward.model"),
    ],
)
def test_what_reads_text_alone_is_refused_by_name(place: Path, changes: list[str], key: str) -> None:
    with pytest.raises(UsageError, match=rf"data.images='images' with {key}, which takes no images in a job"):
        job_of(place, *changes)


def test_a_group_stores_its_images_once(place: Path) -> None:
    job = job_of(place, "data.shuffle=false")
    produce = JobPrompts(job, sequence(job), rows_put=0)
    images = produce(produce.wants())["images"]
    prompts, once = list(images.values), sum(len(image) for value in images.values for image in value)
    with tq.connect("embedded") as queue:
        stored_bytes = []
        for name, column in (("once", images), ("copies", [value for value in prompts for _ in range(GROUP)])):
            table = queue.create_table(name, fields=[tq.Field("images", "value")], tasks=[tq.Task("read", ["images"])])
            table.put(images=column)
            stored_bytes.append(table.stats().bytes)
            batch = table.lease("read", rows=len(prompts) * GROUP, timeout_s=10)
            assert [list(value) for value in batch["images"]] == [value for value in prompts for _ in range(GROUP)]
            batch.ack()
    assert once <= stored_bytes[0] <= 1.1 * once + 4096
    assert stored_bytes[1] >= 0.9 * GROUP * once


# ---------------------------------------------------------------- engine and trainer


def test_engine_and_trainer_read_the_same_images(place: Path) -> None:
    model = load_causal_lm(place / "model", dtype="float32", device="cpu", images=True)
    assert plan_for(model).reason == "it reads images"
    prompts = sequence(job_of(place, "data.shuffle=false")).take(6)
    assert len({prompt.text for prompt in prompts}) == 1, "only the images differ"
    requested = [Prompt(ids=prompt.ids, samples=2, seed=at, images=prompt.images) for at, prompt in enumerate(prompts)]
    engine = TransformersGenerator(model)
    drawn = list(engine.generate(requested, Sampling(tokens_max=3)))
    rows = [requested[each.prompt] for each in drawn]
    args: Any = [row.ids for row in rows], [each.ids for each in drawn]
    with torch.no_grad():
        scored = response_scores(model, *args, images=[row.images for row in rows]).logprobs_N
        others = response_scores(model, *args, images=[rows[0].images] * len(rows)).logprobs_N
        token = processor_of(model).token_id
        response_scores(model, [rows[0].ids], [[token, 5]], images=[rows[0].images])  # drawn: it has no features
    by_engine = np.concatenate([each.logprobs for each in drawn])
    assert np.abs(by_engine - scored.numpy()).max() < 1e-5
    assert np.abs(by_engine - others.numpy()).max() > 1e-4, "each row has its own"
    engine.close()


def test_images_of_a_model_that_was_loaded_for_text_are_refused(tmp_path: Path) -> None:
    from transferqueue.workflows.job.tiny_model.make import make

    make(tmp_path / "text")
    model = load_causal_lm(tmp_path / "text", dtype="float32", device="cpu")
    with pytest.raises(Unsupported, match="loaded for text alone; load it with images=True"):
        response_scores(model, [[3, 4]], [[5]], images=[(png(),)])
    with pytest.raises(Unsupported, match="this engine reads text alone"):
        TransformersGenerator(model).generate(
            [Prompt(ids=np.array([3], np.int32), images=(png(),))], Sampling(tokens_max=1)
        )
    with pytest.raises(NotFound, match="has a processor without images"):
        load_causal_lm(tmp_path / "text", images=True)


def test_an_image_of_any_mode_is_rgb() -> None:
    assert {decoded(png(mode)).mode for mode in ("1", "L", "P", "RGBA", "LA")} == {"RGB"}


# ---------------------------------------------------------------- jobs


def reward_after(place: Path, *words: str) -> float:
    summary = short_run.finished(short_run.train(place, "job.toml", "--json", *words))
    assert summary["rows_done"] == summary["rows_put"]
    return [line for line in short_run.lines(place / words[1] / "evaluations.jsonl") if line["when"] == "after"][-1][
        "reward"
    ]


@pytest.mark.slow
def test_a_job_runs_and_its_model_reads_images(place: Path) -> None:
    reward_after(place, "--out", "few", "--set", "steps=2", "--set", "algorithm.kl=0.01")
    (newest,) = (place / "few" / "checkpoints" / "train").glob("step-00000002")
    assert processor_of(load_causal_lm(newest, device="cpu", images=True)) is not None


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_learns_what_the_image_says_and_nothing_if_all_are_the_same(place: Path, tmp_path: Path) -> None:
    assert reward_after(place, "--out", "learned", *STEPS) > 0.8
    for name in ("train", "test"):
        table = pyarrow.parquet.read_table(place / "data" / f"{name}.parquet")
        same = [table["images"][0].as_py()] * len(table)
        others = {column: table[column].to_pylist() for column in ("question", "answer")}
        written(tmp_path / f"{name}.parquet", same, **others)
    same = reward_after(
        place, "--out", "same", *STEPS, "--set", f"data.path={tmp_path}", "--set", f"evaluation.path={tmp_path}"
    )
    assert same < 0.45, f"chance is {1 / len(COLOURS)}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_with_images_that_is_killed_goes_on_to_the_same_weights(place: Path) -> None:
    words = ("job.toml", "--json", "--set", f"steps={short_run.STEPS}", "--set", 'evaluation.path=""')
    short_run.finished(short_run.train(place, *words, "--out", "whole"))
    process = short_run.train(place, *words, "--out", "killed")
    short_run.wait_for(process, place / "killed" / "steps.jsonl", 3)
    for pid in [*short_run.descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    short_run.finished(short_run.train(place, "job.toml", "--resume", "--out", "killed", "--json"))
    assert short_run.final_weights(place / "killed") == short_run.final_weights(place / "whole")
