"""Weights as a reader has them, published on another channel with the checksums that came with them."""

from __future__ import annotations

import transferqueue as tq
from tests.weights.relays import GENEROUS_S
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations import publish
from transferqueue.client.operations.range_updates import KeptVersions
from transferqueue.client.operations.weight_parts import copy_of
from transferqueue.client.session.operation_runner import Operation


def republish(channel: tq.WeightChannel, weights: tq.Weights) -> None:
    """What was changed in a view since it was pulled no longer matches its checksum, as after damage on the way."""
    copies = [copy_of(tensor, weights._slices.get(name)) for name, tensor in weights._tensors.items()]

    def operation() -> Operation[None]:
        deadline = yield from checks.within(GENEROUS_S)
        kept = KeptVersions(2, 0)
        yield from publish._publish(
            channel._client, channel.name, kept, weights.version, copies, None, deadline, publish.WHOLE
        )

    channel._run(operation())
