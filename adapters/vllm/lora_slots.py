"""Adapters (LoRA) of several versions beside one base, in vLLM's slots: requests end with the adapters that they began
with, and new ones get the newest.

A version takes a slot that no running request uses. Where all ``max_loras`` are in use, it takes that of the oldest
version, whose requests go on under it from their next token, on the caches that they have. So an update waits for
nothing. vLLM keys its prefix cache by the name of the adapters, which is that of the version.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from transferqueue.adapters.weights import ChannelWeights
from transferqueue.errors import SchemaError


class LoraSlots:
    """The slots of an engine, in its own process. count: how many (``max_loras``)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._versions = dict[int, int]()
        """By slot, in the order in which they were filled."""

    def choose(self, used: Collection[int]) -> int:
        """Return the slot for another version. used: those of running requests."""
        free = (slot for slot in range(1, self._count + 1) if slot not in used)
        return next(free, next(iter(self._versions), 1))

    def fill(self, slot: int, version: int) -> None:
        """The workers have the adapters of this version in the slot."""
        self._versions.pop(slot, None)
        self._versions[slot] = version

    def request(self) -> LoRARequest:
        """Return the adapters of a new request: the newest ones."""
        slot, version = next(reversed(self._versions.items()))
        return LoRARequest(lora_name=f"version {version}", lora_int_id=slot, lora_path="a weight channel")


def adapter_of(model: Any, source: ChannelWeights, slot: int) -> LoRAModel:
    """Return the adapters of a version as vLLM's, in memory of the worker.

    Raises `SchemaError` for a layer that vLLM has no adapter for.
    """
    manager, (scale, pairs) = model.lora_manager, source.adapters()
    targets = sorted({layer.rpartition(".")[2] for layer in pairs})
    config = PEFTHelper(r=source.rank, lora_alpha=scale * source.rank, target_modules=targets)
    tensors = {
        f"base_model.model.{layer}.lora_{part}.weight": tensor
        for layer, pair in pairs.items()
        for part, tensor in zip("AB", pair, strict=True)
    }
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    dtype = manager.lora_config.lora_dtype
    adapter = LoRAModel.from_lora_tensors(slot, tensors, config, device="cpu", dtype=dtype, weights_mapper=mapper)
    linear = {name for name, layer in manager.modules.items() if not isinstance(layer, VocabParallelEmbeddingWithLoRA)}
    known = linear.union(chain.from_iterable(manager.packed_modules.values()))
    if missing := sorted(adapter.loras.keys() - known):
        raise SchemaError(
            f'vLLM has no LoRA for layer "{missing[0]}", and {len(missing)} layers like it have an adapter: leave them '
            "out (trainer.lora_targets), or merge (no enable_lora)"
        )
    return adapter


def fill_slot(model: Any, adapter: LoRAModel) -> None:
    """Put adapters into their slot, in the place of those that it has."""
    manager = model.lora_manager
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)
