"""Weights for vLLM from a weight channel, through vLLM's weight-transfer interface (back end ``transferqueue``).

Each worker of the engine opens its own session with the queue and reads a version from shared memory; only the version
number travels through vLLM (`adapters.vllm.plugin` registers the back end). Loading uses vLLM's layer-wise reload,
since some devices re-pack linear weights, which may then not be written in place.

A worker of several (tensor or pipeline parallel) pulls the part of each tensor that its layers take, from the second
version on (`adapters.tensor_parallel.PartsLoader`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import transferqueue as tq
from transferqueue.adapters.tensor_parallel import PartsLoader


@dataclass
class ChannelAt(WeightTransferInitInfo):  # type: ignore[misc]
    """Address of a queue and name of a channel."""

    address: str
    channel: str


@dataclass
class VersionOf(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Version to load, and how long to wait for it."""

    version: int
    timeout_s: float


class ChannelEngine(WeightTransferEngine[ChannelAt, VersionOf]):  # type: ignore[misc]
    """One worker's connection with the channel."""

    init_info_cls = ChannelAt
    update_info_cls = VersionOf

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._queue: tq.Queue | None = None
        self._channel: tq.WeightChannel | None = None
        self._parts: PartsLoader | None = None

    def init_transfer_engine(self, init_info: ChannelAt) -> None:
        """Connect; a further call connects to another queue."""
        self.shutdown()
        self._queue = tq.connect(init_info.address, label="vllm weights")
        self._channel = self._queue.weights(init_info.channel)
        if self.parallel_config.world_size > 1:
            self._parts = PartsLoader(self._channel)

    def start_weight_update(self) -> None:
        """Start a reload."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version. When this returns, the version is on the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionOf) -> None:
        """Load each tensor, or this worker's part of it, from the channel into the model."""
        if self._channel is None:
            raise RuntimeError("weights arrived before init_weight_transfer_engine named their channel")
        if self._parts is not None:
            self._parts.load(self.model.load_weights, version=update_info.version, timeout_s=update_info.timeout_s)
            return
        with self._channel.pull(version=update_info.version, timeout_s=update_info.timeout_s) as weights:
            self.model.load_weights(weights.items())  # one tensor at a time is put together of its slices

    def finish_weight_update(self) -> None:
        """End the reload: computation from here on uses the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                # An output layer tied to the embedding gets no weights of its own, so the reload passes it over; where
                # it keeps a packed copy of them (on CPU), that would stay the old one.
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Close the session."""
        if self._queue is not None:
            self._queue.close()
            self._queue = self._channel = self._parts = None
