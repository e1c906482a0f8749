"""The control plane as a pure state machine: requests in, replies and effects out."""

from transferqueue.ledger.effects import Blocked, Effect, FreeExtent, LeaseEnded, WakeKey, WakeWaiters
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.tasks.selectors import PluginFactory, SelectorPlugin, UnitFacts

__all__ = [
    "Blocked",
    "Effect",
    "FreeExtent",
    "LeaseEnded",
    "Ledger",
    "PluginFactory",
    "SelectorPlugin",
    "UnitFacts",
    "WakeKey",
    "WakeWaiters",
]
