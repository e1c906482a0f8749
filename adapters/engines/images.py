"""Images of prompts: encoded files, which are checked where they come in and decoded where a model reads them.

A row keeps the files as they came, once a prompt: a JPEG is ten to a hundred times smaller than its pixels. The
processor of the model turns a text with placeholders into tokens (`VisionProcessor.ids`), where the prompt is made, and
files into pixels (`VisionProcessor.pixels`), where a model reads them: both by the same call of the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
IMAGES_MAX: Final = 32
"""Images of a row: at 576 tokens each they are 18,000."""
PIXELS_MAX: Final = 1 << 26
"""Pixels of the images of a row, which decoding holds at 4 bytes each: a small file may say that it has billions."""
ASPECT_MAX: Final = 200
"""Length of an image by its width: processors make the shorter side as long as the model's, so a strip grows."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded in this process; others would start programs."""
_INPUTS: Final = frozenset({"input_ids", "attention_mask", "pixel_values"})
"""What a processor may give a model: further inputs place tokens or patches, which nothing here does yet."""
_ATTRIBUTE: Final = "transferqueue_images"


@contextmanager
def _naming(number: int, image: bytes) -> Iterator[None]:
    """Raise what a reader of Pillow says of a damaged file, which may be any error, as `UsageError`."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except UsageError as error:
        raise UsageError(f"image {number} {error}") from error
    except UnidentifiedImageError as error:
        formats = listing(_FORMATS)
        raise UsageError(f"image {number} cannot be decoded: its {len(image):,} bytes are no {formats} file") from error
    except Exception as error:
        raise UsageError(f"image {number} cannot be decoded: {error}") from error


def _opened(image: bytes) -> Image.Image:
    from PIL import Image

    if len(image) > IMAGE_BYTES_MAX:
        raise UsageError(f"has {len(image):,} bytes, over {IMAGE_BYTES_MAX:,}; make it smaller")
    opened = Image.open(BytesIO(image), formats=_FORMATS)
    if opened.mode.startswith(("I", "F")):
        raise UsageError(f"has more than 8 bits a channel (mode {opened.mode}); write it with 8")
    width, height = opened.size
    if max(width, height) > ASPECT_MAX * min(width, height):
        raise UsageError(f"has {width:,} x {height:,} pixels, one side over {ASPECT_MAX} times the other; cut it")
    return opened


def decoded(images: Sequence[bytes]) -> list[Image.Image]:
    """Decode the images of a row, as RGB and upright. The headers of all are checked before the pixels of one are read.

    Args:
        images: PNG, JPEG, WebP, GIF (its first frame), BMP or TIFF files.

    Raises:
        UsageError: one is none of these, is damaged, has more than 32 MiB or 8 bits a channel, or a side over 200 times
            the other; there are more than 32; or together they have more than 64 Mi pixels.
    """
    with naming_extra("an image"):
        from PIL import ImageOps
    if len(images) > IMAGES_MAX:
        raise UsageError(f"has {len(images)} images, over {IMAGES_MAX}; leave some out")
    opened, shown, pixels = [], [], 0
    for number, image in enumerate(images):
        with _naming(number, image):
            opened.append(_opened(image))
            width, height = opened[-1].size
            pixels += width * height
            if pixels > PIXELS_MAX:
                raise UsageError(
                    f"has {width:,} x {height:,} pixels, and with those before it the row has {pixels:,}, over "
                    f"{PIXELS_MAX:,}; make it smaller"
                )
    for number, file in enumerate(opened):
        with _naming(number, images[number]):
            ImageOps.exif_transpose(file, in_place=True)
            shown.append(file.convert("RGB"))
            file.close()
    return shown


class VisionProcessor:
    """The processor of a vision-language model of transformers.

    Args:
        path: directory or id of the model.
        revision: of an id; default "": ``main``.
        trust_remote_code: run code that the model brings; default False.

    Raises:
        NotFound: there is no processor at `path`.
        Unsupported: one that gives a model more than tokens and pixels, such as Qwen-VL's, or pixels whose number
            depends on the image; or one that this machine lacks a library for.
    """

    def __init__(self, path: str | Path, *, revision: str = "", trust_remote_code: bool = False) -> None:
        from transformers import AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(
                str(path), revision=revision or "main", trust_remote_code=trust_remote_code
            )
        except ImportError as error:
            raise Unsupported(f'the processor of model "{path}" cannot be loaded: {str(error).strip()}') from error
        except (OSError, ValueError) as error:
            raise NotFound(f'model "{path}" has no processor of images: {str(error).partition(chr(10))[0]}') from error
        if not hasattr(self._processor, "image_processor"):
            raise NotFound(f'model "{path}" has a processor without images ({type(self._processor).__name__})')
        others = sorted(set(self._processor.model_input_names) - _INPUTS)
        if others or not hasattr(self._processor, "image_token_id"):
            what = f"reads {listing(others)} beside its images" if others else "has no token for images"
            raise Unsupported(
                f'model "{path}" {what}: jobs take models that read tokens and pixel_values alone, such as LLaVA'
            )
        self.token: str = self._processor.image_token
        """The placeholder of an image in a text."""
        self.token_id: int = self._processor.image_token_id
        """The token whose places the features of images take."""
        self.tokenizer: Any = self._processor.tokenizer
        """Of the processor."""
        self.chat_template: Any = getattr(self._processor, "chat_template", None)
        """Of the processor; None: it has none."""
        shapes = {self._made(self.token, [image], special=False)[1].shape[1:] for image in _probes()}
        if len(shapes) > 1:
            raise Unsupported(
                f'the processor of model "{path}" makes pixels of shapes {listing(map(list, shapes))} of images of '
                "other forms: jobs take those that make one, such as by do_center_crop"
            )

    def ids(self, text: str, images: Sequence[bytes], *, add_special_tokens: bool) -> Ids:
        """Return the tokens of a text with a placeholder for each image: int32 ``[tokens]``. Each becomes as many
        tokens as the model has features of its image.

        Args:
            text: with as many placeholders as there are images.
            images: encoded.
            add_special_tokens: as of a tokenizer.

        Raises:
            UsageError: another number of placeholders, or images that `decoded` or the processor refuses.
        """
        if (places := text.count(self.token)) != len(images):
            raise UsageError(
                f"has {len(images)} images, and the text of the prompt {places} placeholders {self.token!r}; give a "
                'part {"type": "image"} of a message for each image'
            )
        return self._made(text, images, special=add_special_tokens)[0]

    def pixels(
        self, prompts: Sequence[Any], images: Sequence[Sequence[bytes]], lines: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Return what a model reads of the images of rows, one after the other; nothing if there are none.

        Args:
            prompts: token ids of each row.
            images: encoded, of each row. Equal ones are decoded once.
            lines: rows in the order of the batch; default None: as they are.

        Raises:
            UsageError: a row has other image tokens than its images make, or images that cannot be read.
        """
        import torch

        if len(prompts) != len(images):
            raise UsageError(f"{len(prompts)} prompts with images of {len(images)} rows; give those of each row")
        made: dict[bytes, tuple[int, Tensor]] = {}
        for row, (ids, shown) in enumerate(zip(prompts, images, strict=True)):
            try:
                for image in set(shown) - made.keys():
                    alone, pixels = self._made(self.token, [image], special=False)
                    made[image] = self._count(alone), pixels
            except UsageError as error:
                raise UsageError(f"row {row} {error}") from error
            if (has := self._count(ids)) != (needs := sum(made[image][0] for image in shown)):
                raise UsageError(
                    f"row {row} has {has} image tokens in its prompt, and its {len(shown)} images make {needs}; give "
                    "tokens and images of one prompt"
                )
        rows = images if lines is None else [images[row] for row in lines]
        in_order = [made[image][1] for row in rows for image in row]
        return {"pixel_values": torch.cat(in_order)} if in_order else {}

    def _count(self, ids: Any) -> int:
        return int(np.count_nonzero(np.asarray(ids) == self.token_id))

    def _made(self, text: str, images: Sequence[bytes], *, special: bool) -> tuple[Ids, Any]:
        """Return tokens and pixels of a text and its images: always by the same call, so that they fit."""
        shown = decoded(images)
        try:
            made = self._processor(text=[text], images=shown or None, add_special_tokens=special, return_tensors="pt")
        except Exception as error:  # such as of an image with one row of pixels
            raise UsageError(
                f"has images that {type(self._processor).__name__} does not take: {type(error).__name__}: {error}"
            ) from error
        return np.asarray(made["input_ids"][0], np.int32), made.get("pixel_values")

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


def _probes() -> list[bytes]:
    from PIL import Image

    files = [BytesIO(), BytesIO()]
    for file, size in zip(files, ((96, 32), (32, 96)), strict=True):
        Image.new("RGB", size).save(file, "PNG")
    return [file.getvalue() for file in files]


def give_processor(model: Any, processor: VisionProcessor) -> None:
    """Let `processor_of` return the processor of a model, which reads an image once to show that it takes it.

    Args:
        model: whose class reads ``pixel_values``.
        processor: of its directory.

    Raises:
        Unsupported: the processor makes other tokens or pixels of an image than the model takes.
    """
    import torch

    setattr(model, _ATTRIBUTE, processor)
    image = _probes()[0]
    ids = processor.ids(processor.token, [image], add_special_tokens=False)
    try:
        with torch.no_grad():
            pixels = pixels_of(model, [ids], [[image]])
            model(input_ids=torch.from_numpy(ids)[None].long().to(model.device), use_cache=False, **pixels)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(
            f"{type(model).__name__} does not take what its processor makes of an image: {error}"
        ) from error


def processor_of(model: Any) -> VisionProcessor | None:
    """Return the processor that a model was loaded with; None: it reads text alone.

    Args:
        model: of transformers.
    """
    found: VisionProcessor | None = getattr(model, _ATTRIBUTE, None)
    return found


def pixels_of(
    model: Any,
    prompts: Sequence[Any],
    images: Sequence[Sequence[bytes]] | None,
    lines: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return what a model reads of the images of rows, on its device.

    Args:
        model: loaded with its processor, unless no row has an image.
        prompts: token ids of each row.
        images: encoded, of each row; None: no row has any.
        lines: rows in the order of the batch; default None: as they are.

    Raises:
        Unsupported: images for a model that was loaded without its processor.
        UsageError: as of `VisionProcessor.pixels`.
    """
    processor = processor_of(model)
    if processor is None:
        if any(images or ()):
            raise Unsupported(f"{type(model).__name__} was loaded for text alone; load it with images=True")
        return {}
    parameter = next(model.parameters())
    pixels = processor.pixels(prompts, [()] * len(prompts) if images is None else images, lines)
    return {name: each.to(parameter.device, parameter.dtype) for name, each in pixels.items()}
