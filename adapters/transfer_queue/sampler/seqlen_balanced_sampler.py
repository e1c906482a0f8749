"""One batch for all data-parallel ranks together, split by length so that the ranks have equal work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from transferqueue.adapters.transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler

LENGTH = "total_lengths"
"""Tag that holds the length of a sample."""


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Takes ``batch_size * dp_size`` samples at once and gives each rank the same number with about the same total
    length.

    Lengths are the tag ``total_lengths``; without them the split is by number alone. Groups stay whole.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size
        self._balanced_cache: dict[tuple[str, str, int], list[list[int]]] = {}

    def sample(  # noqa: PLR0913, PLR0917, RUF100  (documented so)
        self,
        ready_indexes: Sequence[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        dp_rank: int = 0,
        batch_index: int = 0,
        *args: Any,
        partition: Any = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """Return the rank's share of batch `batch_index`; the first rank that asks fixes the shares of all."""
        if not 0 <= dp_rank < self.dp_size:
            return [], []
        batches = self.remembered(partition_id, task_name, dp_rank)
        if batch_index not in batches:
            shares = self._shares(ready_indexes, batch_size, partition)
            if not shares:
                return [], []
            self._balanced_cache[partition_id, task_name, batch_index] = shares
            for rank, share in enumerate(shares):
                self.remembered(partition_id, task_name, rank)[batch_index] = share, list(share)
        share, consumed = batches[batch_index]
        return share, consumed

    def clear_cache(self, partition_id: str) -> None:
        """Forget a partition."""
        super().clear_cache(partition_id)
        self._balanced_cache = {key: shares for key, shares in self._balanced_cache.items() if key[0] != partition_id}

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the state, including shares that some ranks have not requested yet."""
        return {**super().save_checkpoint(), "_balanced_cache": self._balanced_cache}

    def _shares(self, ready_indexes: Sequence[int], batch_size: int, partition: Any) -> list[list[int]]:
        groups = self.groups(ready_indexes, batch_size * self.dp_size)
        if not groups:
            return []
        lengths = group_lengths(groups, partition)
        equal = len(groups) % self.dp_size == 0
        split = get_seqlen_balanced_partitions(lengths, k_partitions=self.dp_size, equal_size=equal)
        return [[index for group in share for index in groups[group]] for share in split]


def group_lengths(groups: Sequence[Sequence[int]], partition: Any) -> list[int]:
    """The tokens of each group: the tags ``total_lengths`` of its samples, 1 for a sample without."""
    if partition is None:
        return [len(group) for group in groups]
    tags = partition.get_custom_meta([index for group in groups for index in group])
    return [sum(int(tags.get(index, {}).get(LENGTH, 1)) for index in group) for group in groups]


def karmarkar_karp(seqlens: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Split items into `k_partitions` sets of about equal sums, by the largest differencing method.

    Karmarkar and Karp, "The differencing method of set partitioning", 1982: repeatedly join the two partial splits that
    differ most, largest sets with smallest. With equal_size every split has the same number of items in each set, so
    joined ones do too.
    """
    order = sorted(range(len(seqlens)), key=lambda item: seqlens[item])
    splits: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    step = k_partitions if equal_size else 1
    for start in range(0, len(order), step):
        items = order[start : start + step]
        sets = sorted([(seqlens[item], [item]) for item in items] + [(0, [])] * (k_partitions - len(items)))
        heapq.heappush(splits, (sets[0][0] - sets[-1][0], len(splits), sets))
    number = len(splits)
    while len(splits) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(splits), heapq.heappop(splits)
        sets = sorted((a + b, [*x, *y]) for (a, x), (b, y) in zip(first, reversed(second), strict=True))
        heapq.heappush(splits, (sets[0][0] - sets[-1][0], number, sets))
        number += 1
    return [items for _, items in splits[0][2]]


def get_seqlen_balanced_partitions(seqlens: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Return item numbers in `k_partitions` sets of about equal sums, each ascending. With `equal_size`, each has the
    same number of items.

    Raises ``AssertionError`` (as documented) when there are fewer items than sets, or the number does not divide.
    """
    if len(seqlens) < k_partitions:
        raise AssertionError(f"{len(seqlens)} items cannot fill {k_partitions} sets")
    if equal_size and len(seqlens) % k_partitions:
        raise AssertionError(f"{len(seqlens)} items do not divide into {k_partitions} sets of equal size")
    return [sorted(items) for items in karmarkar_karp(seqlens, k_partitions, equal_size)]
