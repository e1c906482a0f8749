# ruff: noqa: E402  (imports after a check that they are there)
"""The sampler by a budget of tokens: whole groups, equal ranks, nothing twice and nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

from transferqueue.adapters import transfer_queue as shim
from transferqueue.adapters.transfer_queue import StreamingTokenBudgetSampler

LENGTHS = dict(enumerate([10, 10, 70, 70, 30, 30, 50, 50]))


class Lengths:
    """A partition's tags."""

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {index: {"total_lengths": LENGTHS[index]} for index in indexes}


def ask(sampler: StreamingTokenBudgetSampler, ready: list[int], rank: int, budget: int, **config: Any) -> list[int]:
    asked = {"dp_rank": rank, "dp_size": 2, "token_budget": budget, "task_name": "t", "partition_id": "p", **config}
    chosen, consumed = sampler.sample(ready, 0, partition=Lengths(), **asked)
    assert chosen == consumed
    return chosen


def test_ranks_get_whole_groups_of_about_the_same_tokens() -> None:
    sampler, ready = StreamingTokenBudgetSampler(2, balance_unit_multiplier=2), list(range(8))
    taken = [ask(sampler, ready, rank, 1000) for rank in (0, 1)]
    assert sorted(taken[0] + taken[1]) == ready
    assert [sum(LENGTHS[index] for index in chosen) for chosen in taken] == [160, 160]


def test_a_call_takes_groups_until_the_budget_is_reached_and_leaves_the_rest_to_its_rank() -> None:
    sampler, ready = StreamingTokenBudgetSampler(2, 2), list(range(8))
    first = ask(sampler, ready, 0, 1)
    assert len(first) == 2
    ready = [index for index in ready if index not in first]
    others = ask(sampler, ready, 1, 1000)
    rest = ask(sampler, ready, 0, 1000)
    assert sorted(first + others + rest) == list(range(8))


def test_too_few_are_handed_out_only_where_that_is_allowed() -> None:
    sampler = StreamingTokenBudgetSampler()
    assert ask(sampler, [0], 0, 5) == []  # no unit for both ranks
    assert ask(sampler, [0, 1], 0, 500, allow_underfill=False) == []
    assert len(ask(sampler, [0, 1], 0, 500)) == 1


def test_a_rank_that_asks_again_gets_the_same() -> None:
    sampler = StreamingTokenBudgetSampler()
    first = ask(sampler, [0, 1, 2, 3], 0, 5, batch_index=0)
    assert ask(sampler, [2, 3], 0, 5, batch_index=0) == first
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 0})


def test_cleared_samples_are_not_handed_out_and_another_number_of_ranks_is_refused() -> None:
    sampler = StreamingTokenBudgetSampler()
    assert ask(sampler, [0, 1], 1, 5) in ([0], [1])
    assert ask(sampler, [], 0, 5) == []
    with pytest.raises(ValueError, match="are dealt to 2 ranks; keep it"):
        ask(sampler, [0, 1], 0, 5, dp_size=3)
    with pytest.raises(ValueError, match="give a rank below dp_size, and a positive budget"):
        ask(sampler, [0, 1], 2, 5)
    sampler.clear_cache("p")
    assert ask(sampler, [0, 1, 2], 0, 5, dp_size=3) != []


def test_it_serves_a_partition_and_its_state_is_checkpointed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")

    def take(rank: int) -> list[int]:
        config = {"dp_rank": rank, "dp_size": 2, "token_budget": 60}
        return list(shim.get_client().get_meta(["x"], 1, "p", task_name="t", sampling_config=config).global_indexes)

    settings = {"controller": {"sampler": "StreamingTokenBudgetSampler", "polling_mode": True}}
    shim.init(settings)
    try:
        keys = [str(index) for index in LENGTHS]
        tags = [{"total_lengths": length} for length in LENGTHS.values()]
        fields = tensordict.TensorDict({"x": torch.arange(8.0)}, batch_size=[8])
        shim.kv_batch_put(keys, "p", fields, tags)
        first = take(0)
        assert sum(LENGTHS[index] for index in first) >= 60
        shim.save_checkpoint(tmp_path / "ck")
        rest = [take(1), take(0), take(1)]
        shim.close()
        shim.init(settings)
        shim.load_checkpoint(tmp_path / "ck")
        assert [take(1), take(0), take(1)] == rest
    finally:
        shim.close()
