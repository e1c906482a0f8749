"""The entry point ``vllm.general_plugins``, which vLLM calls in each of its processes: registers our weight transfer
back end.

It imports nothing until an engine uses the back end.
"""

from __future__ import annotations

from typing import Final

BACKEND: Final = "transferqueue"


def register() -> None:
    """Register the back end ``transferqueue`` in this process. A second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "transferqueue.adapters.vllm.weight_transfer", "ChannelEngine"
        )
