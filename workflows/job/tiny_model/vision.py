"""A tiny vision-language model and its task, made offline: which colour an image has.

The model is a LLaVA of a two-layer CLIP tower and the tiny Qwen3. Its warm-up teaches it to answer with a colour, drawn
at random whatever the image shows: so its reward begins at chance, and rises only if training makes it look.
"""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from transferqueue.adapters.engines.images import VisionProcessor, give_processor
from transferqueue.adapters.scoring.logprobs import response_scores
from transferqueue.workflows.job.data.prompts import prompt_text, with_images
from transferqueue.workflows.job.tiny_model.make import config
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer

COLOURS: Final = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 70, 220), "y": (230, 210, 50)}
"""RGB of each answer."""
QUESTION: Final = "Which colour?"
_SIDE: Final = 32
_PATCH: Final = 16
_ROWS: Final = 64
_LEARNING_RATE: Final = 2e-3
_IMAGE: Final = "<image>"
_PART: Final = "message.content"
_PARTS: Final = (
    "(message.content if message.content is string else message.content"
    " | map(attribute='text', default='" + _IMAGE + "') | join)"
)
"""The template's text of a message: of a part without text, the place of its image."""


def draw_image(answer: str, draws: random.Random) -> bytes:
    """Return a PNG of one colour, of a drawn brightness, with noise: no two are equal."""
    from PIL import Image

    noise = np.random.default_rng(draws.randrange(1 << 62)).normal(0, 12, (_SIDE, _SIDE, 3))
    pixels = np.array(COLOURS[answer]) * draws.uniform(0.6, 1.0) + noise
    written = BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(written, "PNG")
    return written.getvalue()


def write_colours(directory: str | Path, *, train: int = 1024, test: int = 128, seed: int = 0) -> None:
    """Write ``train.parquet`` and ``test.parquet``: columns `images` (as ``datasets`` stores a list of images),
    `question` and `answer`."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for split, rows in (("train", train), ("test", test)):
        draws = random.Random(f"colours {split} {seed}")
        answers = [draws.choice([*COLOURS]) for _ in range(rows)]
        columns = {
            "images": pa.array(
                [[{"bytes": draw_image(answer, draws), "path": None}] for answer in answers], pa.list_(image)
            ),
            "question": pa.array([QUESTION] * rows),
            "answer": pa.array(answers),
        }
        pyarrow.parquet.write_table(pa.table(columns), place / f"{split}.parquet")


def make_vision(directory: str | Path, *, steps: int = 0, seed: int = 0) -> None:
    """Write a model, its processor and its tokenizer into `directory`. steps: of the warm-up, each of 64 rows."""
    torch.manual_seed(seed)
    model = _written(Path(directory))
    if steps:
        _warm_up(model, VisionProcessor(directory), steps, random.Random(seed))
        model.save_pretrained(directory)


def _written(directory: Path) -> Any:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([_IMAGE], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace(_PART, _PARTS)
    shown = {"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}}
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(**shown),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)
    tower = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIDE,
        patch_size=_PATCH,
        projection_dim=64,
    )
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=tower,
            text_config=config(tokenizer),
            image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
            vision_feature_layer=-1,
            image_seq_length=(_SIDE // _PATCH) ** 2,
            tie_word_embeddings=True,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    return model


def _warm_up(model: Any, processor: VisionProcessor, steps: int, draws: random.Random) -> None:
    """Teach the form of the answer: one of the colours and the end token, whatever the image shows."""
    give_processor(model, processor)
    tokenizer = processor.tokenizer
    text = prompt_text(tokenizer, with_images([{"role": "user", "content": QUESTION}], 1, _IMAGE), "", "the question")
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(steps):
        images = [(draw_image(draws.choice([*COLOURS]), draws),) for _ in range(_ROWS)]
        prompts = [processor.ids(text, shown, add_special_tokens=False) for shown in images]
        answers = [[*tokenizer.encode(draws.choice([*COLOURS])), tokenizer.eos_token_id] for _ in images]
        loss = -response_scores(model, prompts, answers, images=images).logprobs_N.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
