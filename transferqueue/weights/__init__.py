"""The weight channel: versioned publication of model weights to generators.

On one machine a version is one block in the arena of the node, which every process maps: what `publish` writes once is
what each `pull` views. The channel's handles are made by `Queue.weights`.
"""

from transferqueue.client.aio import AsyncWeightChannel
from transferqueue.client.weighing import WeightChannel, Weights

__all__ = ["AsyncWeightChannel", "WeightChannel", "Weights"]
