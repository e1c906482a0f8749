"""The control plane as a pure state machine: requests in, replies and effects out."""

from transferqueue.ledger.effects import Effect, FreeExtent, LeaseEnded, Wait, Wake, WakeKey
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.tasks.selectors import PluginFactory, SelectorPlugin, Units

__all__ = [
    "Effect",
    "FreeExtent",
    "LeaseEnded",
    "Ledger",
    "PluginFactory",
    "SelectorPlugin",
    "Units",
    "Wait",
    "Wake",
    "WakeKey",
]
