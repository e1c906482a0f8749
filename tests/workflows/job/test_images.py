"""Images in jobs: a bad one is refused with its row, each is stored once a prompt, engine and trainer read the same
images, and a policy learns what only the image says."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
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

from transformers import AutoTokenizer, AyaVisionProcessor  # noqa: E402

import transferqueue as tq  # noqa: E402
from tests.workflows.job import jobs, short_run  # noqa: E402
from transferqueue.adapters.engines.images import IMAGE_BYTES_MAX, VisionProcessor, decoded, processor_of  # noqa: E402
from transferqueue.adapters.engines.running_batch import Row, RunningBatch  # noqa: E402
from transferqueue.adapters.engines.transformers import TransformersGenerator  # noqa: E402
from transferqueue.adapters.protocols import Prompt, Sampling, Unsupported  # noqa: E402
from transferqueue.adapters.scoring import LogProbs, load_causal_lm, response_scores  # noqa: E402
from transferqueue.adapters.scoring.plan import plan_for  # noqa: E402
from transferqueue.errors import Impossible, NotFound, UsageError  # noqa: E402
from transferqueue.limits import MIB  # noqa: E402
from transferqueue.workflows.job.data import prompts  # noqa: E402
from transferqueue.workflows.job.data.prompt_data import open_prompts  # noqa: E402
from transferqueue.workflows.job.data.sequence import PromptSequence  # noqa: E402
from transferqueue.workflows.job.data.source import JobPrompts, groups_per_put  # noqa: E402
from transferqueue.workflows.job.run.preflight import bytes_of, check_memory  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.settings.sizes import rows_kept  # noqa: E402
from transferqueue.workflows.job.tiny_model.__main__ import main as tiny_model  # noqa: E402
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
    "too many pixels": (lambda: stored(png("1", (8200, 8200))), r"image 0 has 8,200 x 8,200 pixels, .* over"),
    "too many pixels together": (lambda: stored(*[png("1", (5000, 5000))] * 3), r"image 2 has .* row has 75,000,000"),
    "too many images": (lambda: stored(*[png()] * 33), r"has 33 images, over 32"),
    "16 bits": (lambda: stored(png("I;16")), r"image 0 has more than 8 bits a channel \(mode I;16\)"),
    "a strip": (lambda: stored(png(size=(1, 2000))), r"image 0 has 1 x 2,000 pixels, one side over 200 times"),
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
    with pytest.raises(UsageError, match=rf'train\.parquet, row 2: column "images" {text}'):
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
    damaged = png()[:40]  # the count is checked first
    path = written(tmp_path / "train.parquet", [stored(damaged, damaged)], messages=messages)
    with pytest.raises(
        UsageError, match=r'row 0: column "images" has 2 images, and the text of the prompt 1 placeholders'
    ):
        sequence(job_of(place, f"data.path={path}", "data.prompt=messages")).take(1)


LLAVA_1_5 = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""The form of LLaVA-1.5's template: of a content that is a text it writes nothing."""


def with_template(place: Path, tmp_path: Path, template: str) -> str:
    (tmp_path / "chat.jinja").write_text(template)
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    messages.append({"role": "user", "content": "Three <image>?"})
    path = written(tmp_path / "train.parquet", [stored(png())], messages=[messages])
    changes = ("data.prompt=messages", 'data.system="Be short."', f"model.chat_template={tmp_path / 'chat.jinja'}")
    return sequence(job_of(place, f"data.path={path}", "data.prompt_tokens_max=256", *changes)).take(1)[0].text


def test_a_template_that_selects_parts_writes_all_texts(place: Path, tmp_path: Path) -> None:
    assert with_template(place, tmp_path, LLAVA_1_5) == (
        "SYSTEM: Be short. USER: One? ASSISTANT: Two. USER: <image>\nThree  ? ASSISTANT:"
    ), "one place, where the text has it"


def test_a_template_that_leaves_texts_out_is_refused(place: Path, tmp_path: Path) -> None:
    last = LLAVA_1_5.replace("in messages", "in messages[-1:]")
    with pytest.raises(UsageError, match=r"row 0: the chat template leaves out a text of the system, 'Be short\.'"):
        with_template(place, tmp_path, last)


def test_the_template_of_the_processor_is_used_if_the_tokenizer_has_none(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA_1_5}))
    (prompt,) = sequence(job_of(place, f"model.path={tmp_path / 'model'}")).take(1)
    assert prompt.text == "USER: <image>\nWhich colour? ASSISTANT:"


def test_a_placeholder_in_a_text_is_the_place_of_its_image(place: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "train.parquet", [stored(png())], question=["Is <image> red?"])
    (prompt,) = sequence(job_of(place, f"data.path={path}")).take(1)
    assert prompt.text.count("<image>") == 1
    assert "Is <image> red?" in prompt.text


def test_parts_of_a_job_without_images_are_as_the_data_has_them(tmp_path: Path) -> None:
    value = [{"role": "user", "content": [{"type": "text", "text": "1", "image": None}]}]
    assert prompts._prompt(value, "prompt", "here") == value


def test_the_error_of_a_source_names_a_key_that_exists(place: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "train.parquet", [stored(png())])
    parts = f'data.sources=[{{path="{path}", weight=1.0}}]'
    with pytest.raises(NotFound, match=r'data\.sources\.0: data\.images: "shown" is no column'):
        open_prompts(job_of(place, 'data.path=""', parts, "data.images=shown"))


def test_images_that_do_not_fit_the_queue_are_refused_before_the_start(place: Path, tmp_path: Path) -> None:
    large = b"\x89PNG" + bytes(MIB)
    path = written(tmp_path / "train.parquet", [stored(png()), stored(large, large), stored(png())])
    job = job_of(place, f"data.path={path}", "queue.memory_gib=0.0625")
    data = open_prompts(job)
    kept = rows_kept(job) // GROUP + groups_per_put(job)
    assert "images" not in data.sources[0].columns, "a reward with **kwargs does not store them again"
    assert data.image_bytes("images", 1) == 2 * len(large)
    assert data.image_bytes("images", 3) == 2 * len(large) + 2 * len(png())
    held = bytes_of(job, data)
    assert (held.images, held.rows) == (data.image_bytes("images", kept), bytes_of(job).rows + held.images)
    with pytest.raises(Impossible, match=r"images up to .*; memory_gib=0\.0625: set queue\.memory_gib=1"):
        check_memory(job, data)


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


def test_tokens_and_images_of_other_rows_are_refused(place: Path) -> None:
    model = load_causal_lm(place / "model", dtype="float32", device="cpu", images=True)
    (prompt, _) = sequence(job_of(place, "data.shuffle=false")).take(2)
    token, answer, image = processor_of(model).token_id, [5], prompt.images[0]
    twice = [*prompt.ids, *[token] * 4]
    for given, images in (
        ([prompt.ids], None),
        ([prompt.ids], [()]),
        ([twice, [3, 4]], [(image,), (image,)]),  # as many tokens as images in all
    ):
        with pytest.raises(UsageError, match=r"row 0 has \d image tokens in its prompt, and its \d images make \d"):
            response_scores(model, given, [answer] * len(given), images=images)
    with pytest.raises(UsageError, match="1 prompts with images of 2 rows"):
        response_scores(model, [prompt.ids], [answer], images=[(image,), (image,)])
    engine = TransformersGenerator(model)
    with pytest.raises(UsageError, match="row 0 has 4 image tokens in its prompt, and its 0 images make 0"):
        engine.generate([Prompt(ids=prompt.ids)], Sampling(tokens_max=1))
    with pytest.raises(UsageError, match="row 0 image 0 cannot be decoded"):
        engine.generate([Prompt(ids=prompt.ids, images=(b"no image",))], Sampling(tokens_max=1))
    with pytest.raises(UsageError, match="image tokens in its prompt, and its 0 images"):
        LogProbs(model, images="images").in_order([prompt.ids], [answer])
    engine.close()


def test_a_processor_that_does_not_fit_the_model_is_refused(place: Path, tmp_path: Path) -> None:
    for key, value in (("patch_size", 8), ("vision_feature_select_strategy", "full")):
        shutil.copytree(place / "model", tmp_path / key)
        config = json.loads((tmp_path / key / "processor_config.json").read_text())
        (tmp_path / key / "processor_config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(Unsupported, match="does not take what its processor makes of an image"):
            load_causal_lm(tmp_path / key, dtype="float32", device="cpu", images=True)
    whole = config | {"image_processor": config["image_processor"] | {"do_center_crop": False}}
    (tmp_path / key / "processor_config.json").write_text(json.dumps(whole))
    with pytest.raises(Unsupported, match=r"makes pixels of shapes .* of images of other forms"):
        VisionProcessor(tmp_path / key)


def test_tokens_and_pixels_come_of_the_same_settings_of_the_processor(place: Path, tmp_path: Path) -> None:
    """Aya's crops an image to patches by default, and its image processor alone does not."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokenizer.add_tokens(["<|IMG_PATCH|>"], special_tokens=True)
    size = {"height": 32, "width": 32}
    own = AyaVisionProcessor(GotOcr2ImageProcessorPil(size=size), tokenizer, patch_size=16, img_size=32)
    processor = VisionProcessor(place / "model")
    processor._processor, processor.token_id = own, own.image_token_id
    image = png(size=(96, 64))
    ids = processor.ids("<image>", [image], add_special_tokens=False)
    patches = len(processor.pixels([ids], [(image,)])["pixel_values"])
    assert patches > 1
    assert int((ids == processor.token_id).sum()) == 4 * patches


def test_completions_go_on_with_their_images_after_new_weights(place: Path) -> None:
    """Also one that drew an image token, which has no features."""
    model = load_causal_lm(place / "model", dtype="float32", device="cpu", images=True)
    token = processor_of(model).token_id
    prompts = sequence(job_of(place, "data.shuffle=false")).take(3)
    requested = [Prompt(ids=prompt.ids, images=prompt.images) for prompt in prompts]
    batch, sampling = RunningBatch(model, 8), Sampling(tokens_max=6, temperature=1.0)
    rows = [Row(None, at, 0, prompt, sampling) for at, prompt in enumerate(requested)]
    batch.add(rows)
    batch.step(0)
    rows[0].ids[-1] = token
    batch.step(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    batch.step(1)  # reads all contexts again
    with torch.no_grad():
        args = [prompt.ids for prompt in prompts], [row.ids for row in rows]
        scored = response_scores(model, *args, images=[prompt.images for prompt in prompts]).logprobs_N
    drawn, at = [row.logprobs[-1] for row in rows], np.cumsum([len(row.ids) for row in rows]) - 1
    assert all(len(row.ids) == 3 for row in rows)
    assert np.abs(np.array(drawn) - scored.numpy()[at]).max() < 1e-5


def test_what_the_tiny_model_ignores_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_model([str(tmp_path / "model"), "--kind", "llava", "--task", "sum"]) == 2
    assert "takes no --task" in capsys.readouterr().err


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
    shown = decoded([png(mode) for mode in ("1", "L", "P", "RGBA", "LA")])
    assert {image.mode for image in shown} == {"RGB"}


def test_an_image_is_turned_as_its_exif_data_says() -> None:
    file, turned = BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (20, 10)).save(file, "JPEG", exif=turned)
    assert decoded([file.getvalue()])[0].size == (10, 20)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_damaged_file_is_refused_whatever_its_reader_raises(kind: str) -> None:
    draws, whole = random.Random(0), png(kind=kind)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[draws.randrange(len(damaged))] = draws.randrange(256)
        with suppress(UsageError):
            decoded([bytes(damaged)])


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
