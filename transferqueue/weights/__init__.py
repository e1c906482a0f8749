"""The weight channel: versioned publication of model weights to generators.

On one machine a version is blocks in the arena of the node, which every process maps: what `publish` writes once is what
each `pull` views. Only tensors that changed are written, and only those are fetched by who holds an earlier version. The channel's
handles are made by `Queue.weights`. Other hosts have a `WeightRelay` each, into which a version crosses once.
"""

from transferqueue.client.aio.weight_channel import AsyncWeightChannel
from transferqueue.client.handles.weights import Subscription
from transferqueue.client.operations.weights import Weights
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.lazy import renamed_names
from transferqueue.weights.relay import RelayProcess, WeightRelay

__all__ = ["AsyncWeightChannel", "RelayProcess", "Subscription", "WeightChannel", "WeightRelay", "Weights"]

__getattr__ = renamed_names(__name__, {"Carrier": "RelayProcess", "Relay": "WeightRelay"})
