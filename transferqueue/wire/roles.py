"""Roles of keys, and the sets of roles that requests declare (see `transferqueue.wire.requests`).

In a job: rollout workers are producers; reward and reference workers and the trainer are consumers, which bring results
back with their acks and, as trainers, publish weights and move the clock; a dashboard is an observer; a process that
brings memory is a shard, and sees nothing but its commands; whoever makes tables is admin.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Role = Literal["admin", "producer", "consumer", "observer", "shard"]
"""What a key may do."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)

EVERYONE: Final = frozenset(ROLES)
CLIENTS: Final = frozenset[Role](EVERYONE - {"shard"})
WORKERS: Final = frozenset[Role]({"admin", "producer", "consumer"})
PRODUCERS: Final = frozenset[Role]({"admin", "producer"})
CONSUMERS: Final = frozenset[Role]({"admin", "consumer"})
ADMINS: Final = frozenset[Role]({"admin"})
SHARDS: Final = frozenset[Role]({"admin", "shard"})
