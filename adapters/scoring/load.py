"""Models of Hugging Face directories, ready to be scored and trained: dropout off, rows packed where that is exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import nn

from transferqueue.adapters.builtin import is_builtin
from transferqueue.adapters.engines.images import VisionProcessor, give_processor
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.scoring.plan import plan_for
from transferqueue.errors import NotFound, UsageError, listing

CAUSAL_LM: Final = "AutoModelForCausalLM"
"""Class of transformers for language models."""
VISION_LM: Final = "AutoModelForImageTextToText"
"""Class of transformers for language models that read images."""
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEADS: Final = ("score.", "classifier.", "v_head.", "value_head.")
"""Names of the output layers that a value model may lack."""


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `load_causal_lm`, which explains them."""

    dtype: str
    device: str
    revision: str
    trust_remote_code: bool


def load_causal_lm(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    revision: str = "",
    trust_remote_code: bool = False,
    images: bool = False,
) -> Any:
    """Load a causal language model of transformers, or the built-in one, in evaluation mode, for `response_logprobs`.

    Args:
        path: a directory, or an id that transformers downloads.
        dtype: of all weights: ``"bfloat16"`` (default), ``"float16"`` or ``"float32"``.
        device: torch's name; default ``"auto"``: a GPU if there is one, else the CPU.
        revision: of an id that is downloaded; default "": ``main``.
        trust_remote_code: run code that the model brings; default False.
        images: load a model that reads images, with its processor; default False.

    Returns:
        The model, with dropout off.

    Raises:
        NotFound: there is no model, or with `images` no processor, at `path`.
        UsageError: its files lack weights, or an unknown dtype.
        Unsupported: with `images` a model that reads more than tokens and pixels.
    """
    processor = VisionProcessor(path, revision=revision, trust_remote_code=trust_remote_code) if images else None
    if is_builtin(path):
        from transferqueue.adapters.builtin.model import BuiltinModel

        return BuiltinModel.from_pretrained(path).to(torch_device(device), torch_dtype(dtype)).eval()
    model, missing = _loaded(
        VISION_LM if images else CAUSAL_LM,
        path,
        dtype=dtype,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    check_complete(path, missing)
    if processor is not None:
        give_processor(model, processor)
    return _prepared(model)


def load_value_model(path: str | Path, **options: Unpack[LoadOptions]) -> Any:
    """Load a critic for `response_values`: a token classifier with one label, or any model that can start as one.

    A reward model (a sequence classifier with one label) brings its score layer. A language model has none: the values
    start at 0.

    Args:
        path: a directory, or an id that transformers downloads.
        **options: `dtype`, `device`, `revision` and `trust_remote_code`, as of `load_causal_lm`.

    Returns:
        The model, with dropout off.

    Raises:
        NotFound: there is no model at `path`.
        UsageError: its files lack other weights than those of the score layer, or an unknown dtype.
    """
    model, missing = _loaded("AutoModelForTokenClassification", path, {"num_labels": 1}, **options)
    check_complete(path, [name for name in missing if not name.startswith(_HEADS)])
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return _prepared(model)


def load_classifier(path: str | Path, **options: Unpack[LoadOptions]) -> Any:
    """Load a reward model for `rewards_of`: a sequence classifier with one label.

    Args:
        path: a directory, or an id that transformers downloads.
        **options: `dtype`, `device`, `revision` and `trust_remote_code`, as of `load_causal_lm`.

    Returns:
        The model, with dropout off.

    Raises:
        NotFound: there is no model at `path`.
        UsageError: its files lack weights, so that rewards would be random; several labels; or an unknown dtype.
    """
    model, missing = _loaded("AutoModelForSequenceClassification", path, **options)
    check_complete(path, missing)
    if model.config.num_labels != 1:
        raise UsageError(f'model "{path}" gives {model.config.num_labels} scores a row; a reward model gives one')
    return _prepared(model)


def checkpoint_gradients(model: Any) -> None:
    """Let a model keep only the inputs of its layers for the backward pass, and compute the rest again.

    It takes less memory and a third more time. The model is in training mode afterwards; its dropout stays off.

    Args:
        model: a model of transformers.

    Raises:
        Unsupported: a model without transformers' switch.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise Unsupported(f"{type(model).__name__} cannot checkpoint gradients; set gradient_checkpointing=false")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name. Raises `UsageError` for one that models are not loaded in.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    if name not in _DTYPES:
        raise UsageError(f'dtype "{name}" is unknown; give one of {listing(_DTYPES)}')
    return _DTYPES[name]


def torch_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is a GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)


def _loaded(
    architecture: str,
    path: str | Path,
    configured: Mapping[str, Any] | None = None,
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    revision: str = "",
    trust_remote_code: bool = False,
) -> tuple[Any, list[str]]:
    """Load a model; return it and the names of weights that its files lack. configured: changes of its
    configuration."""
    import transformers

    weights_dtype, place = torch_dtype(dtype), torch_device(device)
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    with loading(path, architecture):
        config = transformers.AutoConfig.from_pretrained(str(path), **source, **(configured or {}))
        model, report = getattr(transformers, architecture).from_pretrained(
            str(path), config=config, dtype=weights_dtype, output_loading_info=True, **source
        )
    return model.to(place), sorted(report["missing_keys"])


@contextmanager
def loading(path: str | Path, architecture: str) -> Iterator[None]:
    """Raise what a library says of a model that it cannot load as `NotFound` or `UsageError`.

    Args:
        path: of the model.
        architecture: class of transformers that it is loaded as.
    """
    try:
        yield
    except OSError as error:
        raise NotFound(
            f'model "{path}" cannot be loaded: {error}; give a directory that save_pretrained wrote'
        ) from error
    except (RuntimeError, ValueError) as error:  # weights of another shape; an unknown kind of model
        raise UsageError(f'model "{path}" cannot be loaded as {architecture}: {error}') from error


def check_complete(path: str | Path, missing: list[str]) -> None:
    """Raise `UsageError` if the files of a model lack weights.

    Args:
        path: of the model.
        missing: names of the weights.
    """
    if missing:
        raise UsageError(
            f'model "{path}" lacks the weights {listing(missing)}: they would be random; give a model that was saved '
            "with them"
        )


def _prepared(model: Any) -> Any:
    """Turn dropout off, and find out how rows are run."""
    without_dropout(model)
    plan_for(model)
    return model


def without_dropout(model: Any) -> None:
    """Turn dropout off, so that log-probs in training are those of generation.

    Args:
        model: which is changed, and is in evaluation mode then.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.eval()
