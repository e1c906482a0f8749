"""Roles of keys, and the sets of roles that requests declare (see `transferqueue.wire.requests`).

In a job, rollout workers are producers. Reward and reference workers and the trainer are consumers: they bring results
back with their acks and, as trainers, publish weights and move the clock. A dashboard is an observer. A process that
joins with memory is a shard, and gets only its commands. A process that makes tables is admin.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Role = Literal["admin", "producer", "consumer", "observer", "shard"]
"""The rights of a key."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)

EVERYONE: Final = frozenset(ROLES)
CLIENTS: Final = frozenset[Role](EVERYONE - {"shard"})
WORKERS: Final = frozenset[Role]({"admin", "producer", "consumer"})
PRODUCERS: Final = frozenset[Role]({"admin", "producer"})
CONSUMERS: Final = frozenset[Role]({"admin", "consumer"})
ADMINS: Final = frozenset[Role]({"admin"})
SHARDS: Final = frozenset[Role]({"admin", "shard"})
