"""A language model of which each rank of a process group loads its own part.

1. The model is made with parameters on the meta device, which have a shape and no memory. Its buffers (rotary
   frequencies) are computed as always. Then it is sharded (`fully_shard`).
2. Each rank reads its rows of each weight from the safetensors files. So it never has more of the model than its part,
   and one tensor of a file.
3. A model whose files have other names or parts than its module (mixtures of experts) is read by transformers, which
   converts them; it reads a rank's part too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from transferqueue.adapters.builtin import is_builtin
from transferqueue.adapters.lora_weights import is_adapter
from transferqueue.adapters.scoring.load import (
    CAUSAL_LM,
    VISION_LM,
    LoadOptions,
    check_complete,
    loading,
    torch_device,
    torch_dtype,
    without_dropout,
)
from transferqueue.adapters.scoring.lora import new_adapter
from transferqueue.adapters.scoring.plan import plan_on_ranks
from transferqueue.adapters.weight_files import TensorFiles, model_weight_files
from transferqueue.adapters.weight_shards import like, shard_of
from transferqueue.errors import UsageError


def load_sharded_causal_lm(path: str | Path, shard: Callable[[Any], Any], **options: Unpack[LoadOptions]) -> Any:
    """Load this rank's part of a causal language model. Every rank of the process group calls it.

    Args:
        path: as of `load_causal_lm`, with safetensors files.
        shard: gets the model without weights; may add adapters, shards it with ``fully_shard``, and returns it.
        **options: `dtype`, `device`, `revision` and `trust_remote_code`, as of `load_causal_lm`, which also says what
            is returned and raised.

    Raises:
        UsageError: its files are no safetensors.
        Unsupported: the model is not causal, or `shard` split a weight otherwise than FSDP2 does.
    """
    place, directory = torch_device(options.get("device", "auto")), local_directory(path, options.get("revision", ""))
    files = model_weight_files(directory)
    if not files:
        raise UsageError(
            f'model "{path}" has no safetensors files, of which ranks read their parts; load it once and write it by '
            "save_pretrained"
        )
    model = model_without_weights(
        directory, options.get("dtype", "bfloat16"), trust_remote_code=options.get("trust_remote_code", False)
    )
    without_dropout(model)
    model = shard(model)
    _fill(model, TensorFiles(files), place, path)
    plan_on_ranks(model)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules register parameters without memory until the end of the block. Memory that was not written to takes
    none until then."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # torch says None
    try:
        yield
    finally:
        handle.remove()


def model_without_weights(directory: Path, dtype: str, *, trust_remote_code: bool = False, images: bool = False) -> Any:
    """Return the causal language model in a directory without memory for its weights.

    Args:
        directory: of the model; its files of weights are not read.
        dtype: as of `load_causal_lm`.
        trust_remote_code: as of `load_causal_lm`; default False.
        images: of a model that reads images; default False.

    Raises:
        NotFound: there is no model.
        UsageError: an unknown dtype, or kind of model.
    """
    own = torch_dtype(dtype)
    with _parameters_on_meta():
        if is_builtin(directory):
            from transferqueue.adapters.builtin.model import BuiltinModel

            return BuiltinModel.of_config(directory).to(own)
        return _of_transformers(directory, own, VISION_LM if images else CAUSAL_LM, trust_remote_code=trust_remote_code)


def _of_transformers(directory: Path, dtype: torch.dtype, kind: str, *, trust_remote_code: bool) -> Any:
    import transformers

    with loading(directory, kind):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        model = getattr(transformers, kind).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if (directory / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model


def local_directory(path: str | Path, revision: str = "") -> Path:
    """Return where the files of a model are, once those of an id of the hub are here.

    Args:
        path: a directory, or an id.
        revision: of an id; default "": the hub's default branch.

    Raises:
        NotFound: there is no such model.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.py", "*.model", "*.txt", "*.jinja"]
    with loading(path, CAUSAL_LM):
        return Path(snapshot_download(str(path), revision=revision or None, allow_patterns=patterns))


# ---------------------------------------------------------------- weights


def _fill(model: Any, files: TensorFiles, place: torch.device, path: str | Path) -> None:
    """Give the tensors of the model this rank's values: of the files, of new adapters."""
    own = _tensors(model)
    missing = [
        names[0] for names, _ in own if not is_adapter(names[0]) and not any(map(files.names.__contains__, names))
    ]
    if missing and hasattr(model, "tie_weights"):
        _convert(model, files, place)
        own = [(names, tensor) for names, tensor in _tensors(model) if tensor.is_meta]
        missing = [names[0] for names, _ in own if not is_adapter(names[0])]
    check_complete(path, missing)
    values: dict[str, Tensor] = {}
    for names, tensor in own:
        found = next(filter(files.names.__contains__, names), "")
        value = _value(names[0], tensor, files, found, place, path)
        values.update(dict.fromkeys(names, value))
    model.load_state_dict(values, strict=False, assign=True)


def _tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The tensors of a model's state dict, each with its names: a tied one has several."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(names.values())


def _value(name: str, tensor: Tensor, files: TensorFiles, found: str, place: torch.device, path: str | Path) -> Tensor:
    """Return this rank's values of a tensor: of the file's tensor `found`, or "": of a new adapter."""
    shard = shard_of(name, tensor)
    local = torch.empty_like(shard.values, device=place)
    if not found:
        whole = new_adapter(name, torch.empty(tensor.shape, dtype=tensor.dtype, device=place))
        local.copy_(whole[shard.first : shard.first + len(local)])
    elif files.shape(found) != tuple(tensor.shape):
        raise UsageError(
            f'model "{path}" has {found} of shape {files.shape(found)}, and its config.json says {tuple(tensor.shape)}'
        )
    else:
        files.read(found, local, shard.first)
    value = like(tensor, local)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _convert(model: Any, files: TensorFiles, place: torch.device) -> None:
    """Let transformers read this rank's part of a model whose files name weights otherwise than its module."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    convert_and_load_state_dict_in_model(
        model=model,
        state_dict=files.slices(),
        load_config=LoadStateDictConfig(
            dtype=next(model.parameters()).dtype,
            device_map={"": place},
            weight_mapping=get_model_conversion_mapping(model),
        ),
    )
    model.tie_weights()
