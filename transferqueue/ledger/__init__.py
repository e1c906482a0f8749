"""The control plane as a pure state machine: requests in, replies and effects out."""

from transferqueue.ledger.effects import Effect, FreeExtent, LeaseEnded, MustWait, WakeKey, WakeWaiters
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.tasks.selectors import PluginFactory, SelectorPlugin, UnitFacts

__all__ = [
    "Effect",
    "FreeExtent",
    "LeaseEnded",
    "Ledger",
    "MustWait",
    "PluginFactory",
    "SelectorPlugin",
    "UnitFacts",
    "WakeKey",
    "WakeWaiters",
]
