"""What vLLM finds by the entry point ``vllm.general_plugins``, in every process that it starts: the name of our weight
transfer, and nothing imported before an engine asks for it."""

from __future__ import annotations

from typing import Final

BACKEND: Final = "transferqueue"


def register() -> None:
    """Make the back end known to vLLM in this process. Again: nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "transferqueue.adapters.vllm.weights", "ChannelEngine")
