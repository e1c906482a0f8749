"""What verl 0.9.1 needs to train on a CPU, as a plug-in: ``VERL_USE_EXTERNAL_MODULES`` names this module.

verl's trainer, workers, FSDP engine, agent loop, replay buffer and losses run as they are installed. The plug-in uses
the hooks that verl has for other hardware and other inference engines:

- A *platform* named ``cpu``: device names, an empty allocator, gloo. Its workers ask Ray for ``GPU``, which Ray may be
  told to have.
- A *rollout* named ``transformers`` (`rollout`).

Two places of verl take an accelerator for granted without a hook. The plug-in replaces the two functions:

- `initialize_global_process_group_ray` asks for one back end for CPU tensors and one for the device's; torch refuses
  the same device twice.
- FSDP2 keeps a reference model in pinned memory, which exists only beside an accelerator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed, fsdp_utils

MODULE: Final = __name__
ROLLOUT: Final = "transformers"
_ROLLOUT_MODULE: Final = f"{__package__}.rollout"


def _cpu_device() -> ModuleType:
    """``torch.cpu`` with the functions that verl calls on ``torch.cuda``; of an allocator that holds nothing back they
    return 0."""
    device = ModuleType("cpu_device", "torch.cpu, and an allocator that holds nothing back.")
    vars(device).update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    vars(device).update(
        is_available=lambda: False,  # verl asks this before it empties caches and sets limits
        empty_cache=lambda: None,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        reset_peak_memory_stats=lambda *_: None,
        mem_get_info=lambda *_: (_pages("SC_AVPHYS_PAGES"), _pages("SC_PHYS_PAGES")),
        get_device_name=lambda *_: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )
    return device


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """The processor as verl's device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _cpu_device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors to it

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray sets it for what it counts as GPU

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl's resource pools count GPU and NPU only

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _use_one_process_group() -> None:
    """Let verl initialise torch.distributed with gloo alone."""
    distributed.initialize_global_process_group_ray = functools.partial(
        distributed.initialize_global_process_group_ray, backend="cpu:gloo"
    )


def _pin_no_memory() -> None:
    """Let FSDP2 keep a reference model in ordinary memory."""
    policy = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


def _register_rollout() -> None:
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = f"{_ROLLOUT_MODULE}.TransformersAdapter"
    replica.RolloutReplicaRegistry.register(ROLLOUT, _replica)


def _replica() -> Any:
    from transferqueue.workflows.adopt.trial.of_verl.rollout import TransformersReplica

    return TransformersReplica


_use_one_process_group()
_pin_no_memory()
_register_rollout()
