"""Sizes of a model, read from its ``config.json`` and the headers of its weights; of an id of the hub from what its
cache has, or the hub says. No torch here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from http.client import HTTPException
from pathlib import Path
from socket import gaierror
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from transferqueue.adapters.weights import checkpoint_specs

HUB_S: Final = 5.0
"""Longest wait for the hub."""
_CONFIG: Final = "config.json"
_CONFIG_BYTES_MAX: Final = 1 << 20
_HEAD_NORMS: Final = ("qwen3", "gemma3", "olmo2")
"""Beginnings of ``model_type`` of models with such norms."""
EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a configuration with the number of a layer's experts."""
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLED: Final = "pytorch_model*.bin"
_REFUSED: Final = (401, 403, 404)
"""Answers of the hub for a model, or a revision, that does not exist, or that this user may not read."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder.

    Args:
        parameters: numbers in its weights.
        layers: of the transformer.
        hidden: numbers of a token between layers.
        queries: numbers of a token's queries in a layer, all heads together.
        keys: numbers of a token's keys in a layer, as many as of its values.
        inner: numbers of a token within the feed-forward part.
        vocabulary: logits of a token.
        chosen_experts: that a token gets in a layer of a mixture of experts; default 0: it is none.
        head_norms: whether a layer normalises the queries and keys of each head; default False.
        is_counted: whether the parameters were counted from the configuration alone, as those of a decoder of Llama's
            form; default False.
    """

    parameters: int
    layers: int = 0
    hidden: int = 0
    queries: int = 0
    keys: int = 0
    inner: int = 0
    vocabulary: int = 0
    chosen_experts: int = 0
    head_norms: bool = False
    is_counted: bool = False


def model_sizes(path: str, revision: str = "") -> ModelSizes | None:
    """Return the sizes of a model; None if nothing says them.

    Of a model in a directory, or in the cache of the hub, the parameters are those of its files; of another one of the
    hub as many as the hub says that its safetensors have. Where it says none, they are counted from the configuration,
    as those of a decoder of Llama's form.

    Args:
        path: a directory, or an id of the hub.
        revision: of an id; default "": the hub's default branch.
    """
    folder, config = model_folder(path, revision), model_config(path, revision)
    inner = text_config(config)
    parameters = _parameters(folder, config) if folder else 0
    is_id = bool(config) and is_model_id(path)
    if not parameters and is_id:
        parameters = _said_by_hub(path, revision)
    sizes = replace(_sizes(inner), parameters=parameters)
    if not parameters and is_id:
        sizes = replace(sizes, parameters=_counted(sizes, inner), is_counted=True)
    return sizes if sizes.parameters else None


def positions_of(path: str, revision: str = "") -> int:
    """Return the tokens of the longest row that a model takes, by its ``config.json``; 0: that says none, or is not
    known.

    Rotary positions that are stretched (``rope_scaling``) count with their factor.

    Args:
        path: as of `model_sizes`.
        revision: as of `model_sizes`; default "".
    """
    config = text_config(model_config(path, revision))
    stated = config.get("max_position_embeddings") or config.get("n_positions") or 0
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    stretched = int((original or stated) * factor) if isinstance(factor, int | float) else 0
    return max(int(stated), stretched)


def layer_names(path: str) -> set[str]:
    """Return the last part of the name of each layer with a weight of two dimensions in the files of a model; none if
    they are not on this machine."""
    specs = checkpoint_specs(Path(path).expanduser())
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, spec in specs.items()
        if name.endswith(".weight") and len(spec.shape) == 2
    }


def is_model_id(path: str) -> bool:
    """Whether `path` is an id of the hub, and no path: one name or two, of which the first is no directory here.

    >>> is_model_id("Qwen/Qwen3-0.6B"), is_model_id("./Qwen"), is_model_id("runs/sft/model")
    (True, False, False)
    """
    place = Path(path)
    return bool(_ID.fullmatch(path)) and not place.is_dir() and not (len(place.parts) > 1 and place.parent.is_dir())


def model_folder(path: str, revision: str = "") -> Path | None:
    """Return the directory with a model's files; of an id that in the cache of the hub, or None if it has no
    ``config.json`` there.

    Args:
        path: as of `model_sizes`.
        revision: as of `model_sizes`; default "".
    """
    if not is_model_id(path):
        return Path(path).expanduser()
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, _CONFIG, revision=revision or None)
    except (ImportError, ValueError):  # a name that no id has
        return None
    return Path(found).parent if isinstance(found, str) else None


def model_config(path: str, revision: str = "") -> dict[str, Any]:
    """Return the configuration of a model: from its directory, the cache of the hub, or the hub; empty if none of them
    has it. The hub is asked once, for at most `HUB_S`.

    Args:
        path: as of `model_sizes`.
        revision: as of `model_sizes`; default "".
    """
    if model_folder(path, revision):
        return local_config(path, revision)
    return _object(_from_hub(path, revision).text)


def local_config(path: str, revision: str = "") -> dict[str, Any]:
    """Return the configuration of a model whose files are on this machine; empty if they are not, or are no JSON. The
    hub is not asked.

    Args:
        path: as of `model_sizes`.
        revision: as of `model_sizes`; default "".
    """
    folder = model_folder(path, revision)
    try:
        return _object((folder / _CONFIG).read_bytes()) if folder else {}
    except OSError:
        return {}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the decoder of text; the whole one if it has no such part."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and inner else config


def why_not_in_hub(path: str, revision: str = "") -> str:
    """Return why neither the cache of the hub nor the hub has a model; empty: one of them has it, `path` is no id,
    or the hub did not answer in time, so that only the library can tell.

    Args:
        path: as of `model_sizes`.
        revision: as of `model_sizes`; default "".
    """
    return "" if model_folder(path, revision) else _from_hub(path, revision).refusal


def _said_by_hub(path: str, revision: str) -> int:
    """The numbers in the safetensors of a model, as the hub describes it; 0: it says none."""
    described = _object(_from_hub(path, revision, described=True).text).get("safetensors")
    total = described.get("total") if isinstance(described, dict) else 0
    return total if isinstance(total, int) else 0


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _HubAnswer:
    """text: what the hub gave; empty: nothing. refusal: why it cannot give it, where another try would not either."""

    text: bytes = b""
    refusal: str = ""


@cache
def _from_hub(path: str, revision: str, *, described: bool = False) -> _HubAnswer:
    """The configuration of a model, or what the hub says of its weights. The library would try for half a minute to
    reach a hub that does not answer."""
    try:
        from huggingface_hub import constants, get_token, hf_hub_url

        url = hf_hub_url(path, _CONFIG, revision=revision or None)
    except (ImportError, ValueError):  # a name that no id has
        return _HubAnswer()
    if described:
        wanted = quote(revision or constants.DEFAULT_REVISION, safe="")
        url = f"{constants.ENDPOINT}/api/models/{path}/revision/{wanted}?expand[]=safetensors"
    if constants.HF_HUB_OFFLINE:
        return _HubAnswer(refusal="HF_HUB_OFFLINE is set")
    if not url.startswith(("https://", "http://")):
        return _HubAnswer()
    request = Request(url)  # noqa: S310  (checked above)
    if token := get_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # not for hosts that it redirects to
    try:
        with urlopen(request, timeout=HUB_S) as answer:  # noqa: S310  (checked above)
            return _HubAnswer(text=answer.read(_CONFIG_BYTES_MAX))
    except (OSError, HTTPException) as error:
        return _HubAnswer(refusal=_refusal(constants.ENDPOINT, error))


def _refusal(hub: str, error: Exception) -> str:
    """Empty where a later try, or the library with its own certificates, may succeed."""
    if isinstance(error, HTTPError):
        return f"{hub} answers {error.code} {error.reason}" if error.code in _REFUSED else ""
    reason = error.reason if isinstance(error, URLError) else error
    return f"{hub}: {reason}" if isinstance(reason, gaierror | ConnectionRefusedError) else ""


def _parameters(folder: Path, config: Mapping[str, Any]) -> int:
    if specs := checkpoint_specs(folder):
        return sum(math.prod(spec.shape) for spec in specs.values())
    number_bytes = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    return sum(file.stat().st_size for file in folder.glob(_PICKLED)) // number_bytes


def _counted(sizes: ModelSizes, config: Mapping[str, Any]) -> int:
    """Parameters of a decoder of Llama's form: embeddings, and of each layer attention, norms and feed-forward parts,
    one for each expert. 0 if the configuration says no layers."""
    if not sizes.layers or not sizes.vocabulary:
        return 0
    experts = next((config[name] for name in EXPERT_KEYS if config.get(name)), 1)
    inner = (experts > 1 and config.get("moe_intermediate_size")) or sizes.inner
    attention = 2 * sizes.hidden * (sizes.queries + sizes.keys)
    layer = attention + 2 * sizes.hidden + 3 * sizes.hidden * inner * experts
    ends = sizes.vocabulary * sizes.hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ends + sizes.hidden + sizes.layers * layer


def _sizes(config: Mapping[str, Any]) -> ModelSizes:
    """All but the parameters, by the names of Llama's configuration, which most decoders share, or of GPT-2's."""
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    head = config.get("head_dim") or hidden // heads
    return ModelSizes(
        parameters=0,
        layers=config.get("num_hidden_layers") or config.get("n_layer") or 0,
        hidden=hidden,
        queries=heads * head,
        keys=(config.get("num_key_value_heads") or heads) * head,
        inner=config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        vocabulary=config.get("vocab_size") or 0,
        chosen_experts=config.get("num_experts_per_tok") or config.get("moe_k") or 0,
        head_norms=str(config.get("model_type", "")).startswith(_HEAD_NORMS),
    )
