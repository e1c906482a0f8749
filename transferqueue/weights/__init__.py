"""The weight channel: versioned publication of model weights to generators. `Queue.weights` makes its handles.

On one machine a version is blocks in the arena, which every process maps: `publish` writes each tensor once, or its
difference to the version before, and a `pull` views what lies there whole, and makes what has differences. A replica
that holds an earlier version fetches only what changed.

Other hosts have a `WeightRelay` each. A version crosses into such a host once, however many replicas the host has, and
they pull it from shared memory there.

1. A host has a server of its own, and one relay that publishes into it. The relay pulls each version from a *source*,
   which is the trainer's deployment or the server of another relay, and publishes it on its host under the same number.
   Replicas pull on their host at any time: early, late, or in place of one that died. So relays form a chain or a tree
   by addresses alone.
2. The relay compares a new version with the version on its host, so only what changed crosses, even after the relay or
   its source restarted: differences as they are, and tensors that have none.
3. Replicas get a version whole or not at all. A relay that dies during a transfer leaves nothing, and the next relay
   starts that version again. A relay that falls behind takes the newest version next; it skips those between.
4. A relay forwards: it publishes each part of a version as soon as it has arrived and its checksums match, and the next
   relay fetches the part from there while the rest is on its way. So the last host of a chain has a version one part
   per hop after the first host, and each link carries it once. If the source gives a version up, the relay gives it up
   too, or continues from another source with the parts that have arrived.
5. Bytes are received once, copied once into the arena, and released. The host's memory holds the versions that the
   channel keeps, one more while the next is written, and a few parts.
6. A checksum travels with each tensor from the origin. It is compared after each hop, and again when a replica pulls.
7. `publish` never waits for a relay. `applied`, at the source, tells which version its relays have, and how late they
   are.
8. Versions never decrease. If the newest version of the source is below that on the host, the relay waits. A trainer
   that restarts at lower numbers needs relays that restart too.

A part is one tensor or slice at least. A relay forwards a tensor that is large against the rest only when all of it has
arrived; publish it as slices (`WeightSlice`) to forward it earlier.
"""

from __future__ import annotations

from transferqueue.client.aio.weight_channel import AsyncWeightChannel
from transferqueue.client.handles.weight_channel import Subscription
from transferqueue.client.operations.pull import Weights
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.lazy import renamed_names
from transferqueue.weights.relay import RelayProcess, WeightRelay

__all__ = ["AsyncWeightChannel", "RelayProcess", "Subscription", "WeightChannel", "WeightRelay", "Weights"]

__getattr__ = renamed_names(__name__, {"Carrier": "RelayProcess", "Relay": "WeightRelay"})
