"""Batches of about as many tokens for each data-parallel rank, as samples become ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferqueue.adapters.transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transferqueue.adapters.transfer_queue.sampler.seqlen_balanced_sampler import (
    get_seqlen_balanced_partitions,
    group_lengths,
)

Group = list[int]


class StreamingTokenBudgetSampler(GRPOGroupNSampler):
    """Gives a rank whole groups until their tokens reach its budget.

    Groups are dealt to the ranks in units of ``dp_size * balance_unit_multiplier``, so that each rank gets as many
    groups of about the same total length. What a rank has not taken yet stays its own. A length is the tag
    ``total_lengths`` of a sample; a sample without it counts as one token.
    """

    def __init__(self, n_samples_per_prompt: int = 1, balance_unit_multiplier: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if balance_unit_multiplier <= 0:
            raise ValueError(f"balance_unit_multiplier must be positive, got {balance_unit_multiplier}")
        self.balance_unit_multiplier = balance_unit_multiplier
        self._buckets: dict[tuple[str, str], list[list[Group]]] = {}
        """By partition and task: the groups of each rank that it has not taken."""

    def sample(  # noqa: PLR0913, PLR0917, RUF100  (documented so)
        self,
        ready_indexes: Sequence[int],
        batch_size: int = 0,
        task_name: str = "",
        partition_id: str = "",
        dp_rank: int = 0,
        dp_size: int = 1,
        token_budget: int = 0,
        allow_underfill: bool = True,
        batch_index: int | None = None,
        *args: Any,
        partition: Any = None,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """Return the rank's groups up to `token_budget`; `batch_size` is ignored.

        If too few are ready, returns what the rank has, or nothing without `allow_underfill`. A rank that asks again
        for the same `batch_index` gets the same samples.
        """
        if not 0 <= dp_rank < dp_size or token_budget <= 0:
            raise ValueError(
                f"dp_rank {dp_rank}, dp_size {dp_size}, token_budget {token_budget}: give a rank below dp_size, and a "
                "positive budget"
            )
        batches = self.remembered(partition_id, task_name, dp_rank)
        if batch_index is not None and batch_index in batches:
            return batches[batch_index], list(batches[batch_index])
        buckets = self._dealt(ready_indexes, (partition_id, task_name), dp_size)
        while (taken := _up_to(buckets[dp_rank], token_budget, partition)) is None:
            if not self._deal(ready_indexes, buckets, partition):
                taken = len(buckets[dp_rank]) if allow_underfill else 0
                break
        chosen = [index for group in buckets[dp_rank][:taken] for index in group]
        del buckets[dp_rank][:taken]
        if batch_index is not None and chosen:
            batches[batch_index] = chosen
        return chosen, list(chosen)

    def _dealt(self, ready_indexes: Sequence[int], task: tuple[str, str], dp_size: int) -> list[list[Group]]:
        """The groups that each rank has, without those that are cleared or consumed."""
        buckets = self._buckets.setdefault(task, [[] for _ in range(dp_size)])
        if len(buckets) != dp_size:
            raise ValueError(f"dp_size {dp_size}: the groups of {task} are dealt to {len(buckets)} ranks; keep it")
        ready = set(ready_indexes)
        for bucket in buckets:
            bucket[:] = [group for group in bucket if ready.issuperset(group)]
        return buckets

    def _deal(self, ready_indexes: Sequence[int], buckets: list[list[Group]], partition: Any) -> bool:
        """Deal one more unit of groups. Return whether there was one."""
        dealt = {index for bucket in buckets for group in bucket for index in group}
        waiting = [index for index in ready_indexes if index not in dealt]
        groups = self.groups(waiting, len(buckets) * self.balance_unit_multiplier * self.n_samples_per_prompt)
        if groups:
            lengths = group_lengths(groups, partition)
            shares = get_seqlen_balanced_partitions(lengths, k_partitions=len(buckets), equal_size=True)
            for bucket, share in zip(buckets, shares, strict=True):
                bucket += [groups[at] for at in share]
        return bool(groups)

    def clear_cache(self, partition_id: str) -> None:
        """Forget a partition."""
        super().clear_cache(partition_id)
        self._buckets = {task: buckets for task, buckets in self._buckets.items() if task[0] != partition_id}

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the state, including groups that ranks have not taken."""
        return {**super().save_checkpoint(), "_buckets": self._buckets}


def _up_to(bucket: Sequence[Group], budget: int, partition: Any) -> int | None:
    """How many groups reach the budget; None: all together do not."""
    tokens = 0
    for count, length in enumerate(group_lengths(bucket, partition) if bucket else (), start=1):
        tokens += length
        if tokens >= budget:
            return count
    return None
