"""Weights for vLLM from a weight channel, through vLLM's weight-transfer interface (back end ``transferqueue``).

Each worker of the engine opens its own session with the queue and reads a version from shared memory; only the version
number travels through vLLM (`adapters.vllm.plugin` registers the back end). Loading uses vLLM's layer-wise reload,
since some devices re-pack linear weights, which may then not be written in place.

``update_weights`` fetches a version, and ``finish_weight_update`` loads it: until then the model keeps its weights. An
error in the first leaves the old ones whole. One in the second leaves the model with some of each: the caller lets it
compute nothing until it has loaded a version whole. vLLM (0.32) mixes up the answers of several workers after an error
of one, so there a worker with an error ends, and vLLM's engine with it.

The worker holds the version that it loaded last, in its own memory: of the next one it fetches differences. It loads
all tensors of every layer of the checkpoint that has a changed tensor, since vLLM reloads a layer whole or not at all:
of one whose weights are joined (queries, keys and values; gates and up projections) no part may be missing. A quantised
model is loaded whole.

With ``enable_lora``, a version that has adapters beside its weights is not merged: the worker loads the weights that
changed, and writes A and B of each version to files, which vLLM's LoRA requests name. While requests run that keep
their weights, that is ``update_weights`` alone, which refuses a version that changes these.

vLLM passes the text of a worker's error on, and not its kind: `refused` reads that in the text.

A worker of several (tensor or pipeline parallel) pulls the part of each tensor that its layers take, from the second
version on (`adapters.tensor_parallel.PartsLoader`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

import transferqueue as tq
from transferqueue.adapters.lora_weights import LORA_A
from transferqueue.adapters.scoring.lora import peft_name, save_published_adapter
from transferqueue.adapters.tensor_parallel import PartsLoader
from transferqueue.adapters.weights import ChannelWeights, in_layers_of
from transferqueue.errors import SchemaError, listing

_log: Final = logging.getLogger("transferqueue.adapters.vllm")
_reload_log: Final = logging.getLogger(initialize_layerwise_reload.__module__)
_UNLOADED: Final = "%s: Failed to load weights"
"""vLLM's warning of each layer that a reload left as it was."""
_REFUSED: Final = "weights refused: "
_REFUSED_END: Final = " (end of refusal)"


def others_run(version: int, changed: str = "") -> str:
    """Return the text of a refusal: a version changes weights that running requests keep. changed: which."""
    return (
        f"version {version} changes the weights{changed} beside the adapters that running requests keep; "
        "pause(Pause.WAIT) first"
    )


def refused(error: BaseException) -> SchemaError | None:
    """Return a worker's refusal of a version, which vLLM raises as an error of another kind where its core is another
    process; None: the error is no refusal."""
    _, found, text = str(error).partition(_REFUSED)
    return SchemaError(text.partition(_REFUSED_END)[0]) if found else None


def _refusal(text: str) -> SchemaError:
    return SchemaError(f"{_REFUSED}{text}{_REFUSED_END}")


@dataclass
class ChannelAt(WeightTransferInitInfo):  # type: ignore[misc]
    """Address of a queue and name of a channel."""

    address: str
    channel: str


@dataclass
class VersionOf(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Version to load, and how long to wait for it. merged: merge its adapters. adapters: write them to this directory,
    in peft's format; empty: it has none, or they are merged. stays: refuse it if it changes the weights beside them."""

    version: int
    timeout_s: float
    merged: bool = True
    adapters: str = ""
    stays: bool = False


class ChannelEngine(WeightTransferEngine[ChannelAt, VersionOf]):  # type: ignore[misc]
    """One worker's connection with the channel."""

    init_info_cls = ChannelAt
    update_info_cls = VersionOf

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._address = ""
        self._queue: tq.Queue | None = None
        self._channel: tq.WeightChannel | None = None
        self._parts: PartsLoader | None = None
        self._held: tq.Weights | None = None
        self._fetched: tuple[tq.Weights, ChannelWeights] | None = None
        self._is_whole = self.model_config.quantization is not None
        if self._is_whole:
            _log.info("vLLM's weights are quantised (%s): each version is loaded whole", self.model_config.quantization)

    def init_transfer_engine(self, init_info: ChannelAt) -> None:
        """Connect; a further call connects to another queue."""
        self.shutdown()
        self._address = init_info.address
        self._queue = tq.connect(init_info.address, label="vllm weights")
        self._channel = self._queue.weights(init_info.channel)
        if self.parallel_config.world_size > 1:
            self._parts = PartsLoader(self._channel, layers=not self._is_whole)

    def start_weight_update(self) -> None:
        """Do nothing: a reload begins when the version is here."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch a version. The model keeps its weights until `finish_weight_update`."""
        with self._answers():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: VersionOf) -> None:
        """Fetch a version, or this worker's part of it, from the channel."""
        if self._channel is None:
            raise RuntimeError("weights arrived before init_weight_transfer_engine named their channel")
        if self._parts is not None:
            self._parts.pull(version=update_info.version, timeout_s=update_info.timeout_s)
            return
        if self._fetched is not None:
            self._fetched[0].release()
            self._fetched = None
        weights = self._channel.pull(version=update_info.version, since=self._held, timeout_s=update_info.timeout_s)
        with _released_by_errors(weights):
            source = ChannelWeights(self._address, weights, merged=update_info.merged)
            if update_info.stays and (changed := source.changed()):
                raise _refusal(others_run(source.version, f' (tensor "{changed[0]}")'))
            if update_info.adapters:
                self._write_adapters(source, update_info.adapters)
        if update_info.stays:
            self._hold(weights)
        else:
            self._fetched = weights, source

    def _write_adapters(self, source: ChannelWeights, directory: str) -> None:
        if others := self._without_lora(source.adapters()[1]):
            raise _refusal(
                f"version {source.version} has adapters of {listing(others)}, for which vLLM has none: leave "
                "them out (trainer.lora_targets), or merge (no enable_lora)"
            )
        save_published_adapter(source, directory)

    def _without_lora(self, layers: Iterable[str]) -> list[str]:
        """Return the layers that vLLM would draw without their adapters, or whose adapters have another shape there."""
        manager, mapper = self.model.lora_manager, getattr(self.model, "hf_to_vllm_mapper", None)
        renamed = mapper.get_rename_mapper() if mapper is not None else None
        linear = {at for at, layer in manager.modules.items() if not isinstance(layer, VocabParallelEmbeddingWithLoRA)}
        known = linear.union(*manager.packed_modules.values())
        names = {layer: parse_fine_tuned_lora_name(peft_name(f"{layer}.{LORA_A}"), renamed)[0] for layer in layers}
        return [layer for layer, name in names.items() if name not in known]

    def finish_weight_update(self) -> None:
        """Load the changed layers of the version that was fetched. When this returns, it is on the device, and
        computation uses it."""
        with self._answers():
            if self._parts is not None:
                self._parts.load_pulled(self._load)
                self._parts.unpin()
            elif self._fetched is not None:
                self._load_fetched(*self._fetched)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

    def _load_fetched(self, weights: tq.Weights, source: ChannelWeights) -> None:
        before, self._held, self._fetched = self._held, None, None  # after a load that fails, the next one is whole
        with _released_by_errors(weights):
            names = in_layers_of(source.metadata() if self._is_whole else source.changed(), source.metadata())
            if names:
                # One tensor at a time is put together of its slices, or merged with its adapter.
                self._load((name, source.tensor(name)) for name in names)
        self._held = before
        self._hold(weights)

    def _hold(self, weights: tq.Weights) -> None:
        """Hold the version in place of the one before, without memory of the server."""
        before, self._held = self._held, weights
        weights.unpin()
        if before is not None:
            before.release()

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reload the layers of these tensors. An error ends vLLM's reload, so that a later one begins anew."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)
        except BaseException:
            for layer in self.model.modules():  # so that the tensors that they compute with are put back
                layer_info = get_layerwise_info(layer)
                layer_info.load_numel = 0
                layer_info.loaded_weights.clear()
            self._end_reload()
            raise
        self._end_reload()
        self._repack_tied()

    def _end_reload(self) -> None:
        with _layers_may_stay():
            finalize_layerwise_reload(self.model, self.model_config)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Raise an error in the block to vLLM, if this worker is the only one; of several, end the process."""
        try:
            yield
        except Exception as error:
            if self.parallel_config.world_size == 1:
                raise
            _log.exception("this worker of several did not take new weights, and ends")
            raise SystemExit(f"new weights were not taken: {error}") from error

    def _repack_tied(self) -> None:
        """Repack output layers that are tied to the embedding: they get no weights of their own, so the reload passes
        them over; where they keep a packed copy of them (on CPU), that would stay the old one."""
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Close the session."""
        if self._queue is not None:
            self._queue.close()
            self._queue = self._channel = self._parts = self._held = self._fetched = None


@contextmanager
def _released_by_errors(weights: tq.Weights) -> Iterator[None]:
    """Release a version that an error in the block refuses, since a pinned version stays in the queue's memory."""
    try:
        yield
    except BaseException:
        weights.release()
        raise


@contextmanager
def _layers_may_stay() -> Iterator[None]:
    """Leave out vLLM's warnings of layers without new weights."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != _UNLOADED

    _reload_log.addFilter(is_other)
    try:
        yield
    finally:
        _reload_log.removeFilter(is_other)
