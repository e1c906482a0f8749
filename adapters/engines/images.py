"""Images of prompts: encoded files, which are checked where they come in and decoded where a model reads them.

A row keeps the files as they came, once a prompt: a JPEG is ten to a hundred times smaller than its pixels. The
processor of the model turns a text with placeholders into tokens (`VisionProcessor.ids`), where the prompt is made, and
files into pixels (`VisionProcessor.pixels`), where a model reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids, Unsupported
from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.lazy import naming_extra
from transferqueue.limits import MIB

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

IMAGE_BYTES_MAX: Final = 32 * MIB
"""Bytes of an encoded image: cameras write up to 20 MB."""
PIXELS_MAX: Final = 1 << 26
"""Pixels of an image, which decoding holds at 3 bytes each: a small file may say that it has billions."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded in this process; others would start programs."""
_INPUTS: Final = frozenset({"input_ids", "attention_mask", "pixel_values"})
"""What a processor may give a model: further inputs place tokens or patches, which nothing here does yet."""
_ATTRIBUTE: Final = "transferqueue_images"


def decoded(image: bytes) -> Image.Image:
    """Decode an image, as RGB.

    Args:
        image: a PNG, JPEG, WebP, GIF (its first frame), BMP or TIFF file.

    Raises:
        UsageError: it is none of these, is damaged, or has more than 32 MiB or 64 Mi pixels.
    """
    with naming_extra("an image"):
        from PIL import Image, UnidentifiedImageError
    if len(image) > IMAGE_BYTES_MAX:
        raise UsageError(f"has {len(image):,} bytes, over {IMAGE_BYTES_MAX:,}; make it smaller")
    try:
        opened = Image.open(BytesIO(image), formats=_FORMATS)
        if opened.width * opened.height > PIXELS_MAX:
            raise UsageError(f"has {opened.width:,} x {opened.height:,} pixels, over {PIXELS_MAX:,}; make it smaller")
        return opened.convert("RGB")
    except UsageError:
        raise
    except UnidentifiedImageError as error:
        raise UsageError(f"cannot be decoded: its {len(image):,} bytes are no {listing(_FORMATS)} file") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"cannot be decoded: {error}") from error


class VisionProcessor:
    """The processor of a vision-language model of transformers.

    Args:
        path: directory or id of the model.
        revision: of an id; default "": ``main``.
        trust_remote_code: run code that the model brings; default False.

    Raises:
        NotFound: there is no processor at `path`.
        Unsupported: one that gives a model more than tokens and pixels, such as Qwen-VL's.
    """

    def __init__(self, path: str | Path, *, revision: str = "", trust_remote_code: bool = False) -> None:
        from transformers import AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(
                str(path), revision=revision or "main", trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise NotFound(f'model "{path}" has no processor of images: {str(error).partition(chr(10))[0]}') from error
        if not hasattr(self._processor, "image_processor"):
            raise NotFound(f'model "{path}" has a processor without images ({type(self._processor).__name__})')
        if others := sorted(set(self._processor.model_input_names) - _INPUTS):
            raise Unsupported(
                f'model "{path}" reads {listing(others)} beside its images: jobs take models that read tokens and '
                "pixel_values alone, such as LLaVA"
            )
        self.token: str = self._processor.image_token
        """The placeholder of an image in a text."""
        self.token_id: int = self._processor.image_token_id
        """The token whose places the features of images take."""
        self.tokenizer: Any = self._processor.tokenizer
        """Of the processor."""

    def ids(self, text: str, images: Sequence[Image.Image], *, add_special_tokens: bool) -> Ids:
        """Return the tokens of a text with a placeholder for each image: int32 ``[tokens]``. Each becomes as many
        tokens as the model has features of its image.

        Args:
            text: with as many placeholders as there are images.
            images: decoded.
            add_special_tokens: as of a tokenizer.

        Raises:
            UsageError: another number of placeholders.
        """
        if (places := text.count(self.token)) != len(images):
            raise UsageError(
                f"has {len(images)} images, and its text {places} placeholders {self.token!r}; give a part "
                '{"type": "image"} of a message for each image'
            )
        made = self._processor(text=[text], images=list(images) or None, add_special_tokens=add_special_tokens)
        return np.asarray(made["input_ids"][0], np.int32)

    def pixels(self, rows: Iterable[Sequence[bytes]], device: Any, dtype: Any) -> dict[str, Tensor]:
        """Return what a model reads of the images of its rows, one after the other; nothing if there are none.

        Args:
            rows: encoded images of each row. Equal ones are decoded once.
            device: of torch.
            dtype: of the pixels.
        """
        import torch

        images = [image for row in rows for image in row]
        made = {image: self._processor.image_processor(decoded(image), return_tensors="pt") for image in set(images)}
        if not images:
            return {}
        pixels = torch.cat([made[image]["pixel_values"] for image in images])
        return {"pixel_values": pixels.to(device, dtype)}

    def unread(self, ids: Any) -> npt.NDArray[np.int64]:
        """Return tokens that a model drew, without the image token, which no features follow: 0 stands for it.

        Args:
            ids: integers.
        """
        ids_N = np.asarray(ids, np.int64)
        return np.where(ids_N == self.token_id, 0, ids_N)

    def save(self, directory: str | Path) -> None:
        """Write its files, the tokenizer's among them.

        Args:
            directory: of a model.
        """
        self._processor.save_pretrained(directory)


def give_processor(model: Any, processor: VisionProcessor) -> None:
    """Let `processor_of` return the processor of a model.

    Args:
        model: whose class reads ``pixel_values``.
        processor: of its directory.
    """
    setattr(model, _ATTRIBUTE, processor)


def processor_of(model: Any) -> VisionProcessor | None:
    """Return the processor that a model was loaded with; None: it reads text alone.

    Args:
        model: of transformers.
    """
    found: VisionProcessor | None = getattr(model, _ATTRIBUTE, None)
    return found


def pixels_of(model: Any, images: Sequence[Sequence[bytes]]) -> Mapping[str, Tensor]:
    """Return what a model reads of the images of rows.

    Args:
        model: loaded with its processor, unless no row has an image.
        images: encoded, of each row in the order of the lines of its batch.

    Raises:
        Unsupported: images for a model that was loaded without its processor.
    """
    processor = processor_of(model)
    if processor is None:
        if any(images):
            raise Unsupported(f"{type(model).__name__} was loaded for text alone; load it with images=True")
        return {}
    parameter = next(model.parameters())
    return processor.pixels(images, parameter.device, parameter.dtype)
