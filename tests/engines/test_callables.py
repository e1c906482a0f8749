"""Plain functions, agents and environments as stages: they pass the kit, and what they give wrong is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.engines.conform import conform
from transferqueue.adapters.protocols import (
    ABORT,
    LENGTH,
    Completion,
    Completions,
    Ids,
    Prompt,
    Sampling,
    StageFunction,
)
from transferqueue.adapters.stages.callables import Agents, Rewards
from transferqueue.adapters.stages.environments import Episodes
from transferqueue.errors import UsageError
from transferqueue.testing.conformance.stages import STAGE_CHECKS, StageSubject
from transferqueue.workflows.flow.events import Event, Failure
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_stage
from transferqueue.workflows.flow.stage import Stage as Served


def rewarded(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(answer in completion) for completion, answer in zip(completions, answer, strict=True)]


async def brevity(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if not completion else 1 / len(completion) for completion in completions]


class Shouter:
    async def run(self, data: Mapping[str, Any], base_url: str, times: int = 1) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        return {"rewards": float(len(data["prompt"])), "said": f"{data['prompt'].upper() * times} at {base_url}"}


class Counting:
    """Observations count up from the seed; an action that names the next number is rewarded. Over after three."""

    opened = 0

    def __init__(self) -> None:
        Counting.opened += 1
        self.number = self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.number = int(seed or 0)
        return self.number, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.steps, self.number = self.steps + 1, self.number + 1
        return self.number, float(action == self.number), self.steps == 3, False, {}

    def close(self) -> None:
        Counting.opened -= 1


class Adder:
    """A generator of one sure token: one more than the last. Every other completion is cut short once."""

    version = 4

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = 1.0) -> Completions:
        for at, prompt in enumerate(prompts):
            cut = at % 2 == 1 and prompt.begun is None
            ids = np.array([] if cut else [prompt.ids[-1] + 1], np.int32)
            yield Completion(
                prompt=at,
                sample=0,
                ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason=ABORT if cut else LENGTH,
                spans=() if cut else ((self.version, 1),),
            )


def episodes(**more: Any) -> Episodes:
    given: dict[str, Any] = {
        "encode": lambda observation, turn: [100 + turn, observation],
        "decode": lambda ids: int(ids[0]),
        "turns_max": 8,
        "seed": "seed",
    }
    return Episodes(Counting, Adder(), Sampling(tokens_max=1), **(given | more))  # type: ignore[arg-type]


class Subject:
    repeats = True

    def __init__(self, make: Callable[[], StageFunction], columns: Mapping[str, Any]) -> None:
        self.open, self._columns = make, columns

    def columns(self) -> Mapping[str, Any]:
        return self._columns


TEXTS = {
    "prompt": ["a", "bb", "ccc", "d", "ee", "fff"],
    "completion": ["1 2", "3", "4 5", "6 6", "7", "8"],
    "answer": ["1", "2", "5", "6", "7", "9"],
}
STAGES: dict[str, Callable[[], Subject]] = {
    "callables.Rewards": lambda: Subject(lambda: Rewards(rewarded, brevity, weights=[1.0, 0.1]), TEXTS),
    "callables.Agents": lambda: Subject(
        lambda: Agents(Shouter(), needs=["prompt"], gives=["rewards", "said"], base_url="http://model", times=2),
        {"prompt": TEXTS["prompt"]},
    ),
    "environments.Episodes": lambda: Subject(episodes, {"seed": np.arange(6)}),
}


@pytest.mark.parametrize("check", STAGE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", STAGES)
def test_stages(name: str, check: Callable[[StageSubject], None]) -> None:
    conform("stage", name, "plain Python", check, STAGES[name]())


def served(
    stage: StageFunction,
    columns: Mapping[str, Any],
    emit: Callable[[Event], None] = lambda _: None,
    retry: tq.Retry = tq.Retry(),  # noqa: B008  (a value)
) -> tq.Rows:
    """The rows as the stage left them."""
    task = tq.Task("stage", needs=tuple(stage.needs), gives=tuple(stage.gives), retry=retry)
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[task], retention=tq.Manual())
        table.put(**columns)
        table.seal()
        run_stage(table, Served(task=task, rows=16, at_least=1, stall_s=30, failures_max=1), stage, emit=emit)
        found = table.read()
        for name in found.fields:
            found[name].list()
        return found


def test_rewards_are_weighted_and_none_counts_as_nothing() -> None:
    stage = Rewards(rewarded, brevity, weights=[2.0, 1.0])
    assert stage.needs == ("prompt", "completion", "answer")
    columns = {"prompt": ["p", "q"], "completion": ["42", ""], "answer": ["42", "7"]}
    assert served(stage, columns)["rewards"].numpy().tolist() == [2.5, 0.0]


def test_a_function_gets_only_what_it_names_and_ids_by_their_name_here() -> None:
    seen: dict[str, Any] = {}

    def function(
        completions: list[str], completion_ids: list[Any], prompts: list[str], scale: float = 2.0
    ) -> list[float]:
        seen.update(completions=completions, ids=completion_ids)
        return [scale] * len(prompts)

    stage = Rewards(
        function, prompts="prompt_ids", completions="response_ids", decode=lambda ids: "".join(map(chr, ids))
    )
    assert stage.needs == ("prompt_ids", "response_ids")
    rows = served(stage, {"prompt_ids": [[97]], "response_ids": [np.array([98, 99], np.int32)]})
    assert rows["rewards"].list() == [2.0]
    assert seen == {"completions": ["bc"], "ids": [[98, 99]]}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda prompts, completions: [1.0], "gave 1 value for 2 rows"),
        (
            lambda prompts, completions: [1.0, float("inf")],
            "gave inf; give a finite number, or None; row 1, prompt 'b', completion 'd'",
        ),
        (lambda prompts, completions: [1.0, None], "row 1 got None from every"),
    ],
)
def test_what_is_no_reward_for_each_row_is_refused(function: Any, said: str) -> None:
    with pytest.raises(StageFailedInProcess, match=said):
        served(Rewards(function), {"prompt": ["a", "b"], "completion": ["c", "d"]})


def test_rewards_need_functions_and_a_weight_for_each() -> None:
    for functions, weights in ((), None), ((rewarded,), [1.0, 2.0]):
        with pytest.raises(UsageError, match="reward functions with"):
            Rewards(*functions, weights=weights)


def test_agents_run_side_by_side_and_a_plain_number_is_the_reward() -> None:
    running = 0
    most = 0

    async def agent(data: Mapping[str, Any], base_url: str) -> float:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        running -= 1
        return float(data["x"])

    stage = Agents(agent, needs=["x"], base_url="http://model", concurrency_max=3)
    assert served(stage, {"x": np.arange(8)})["rewards"].list() == list(range(8))
    assert most == 3


def test_an_agent_that_raises_leaves_its_row_and_ends_the_others() -> None:
    ended: list[int] = []

    async def agent(data: Mapping[str, Any], base_url: str) -> float:
        if data["x"] == 1:
            raise ValueError("no")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(data["x"])
        return 0.0

    with pytest.raises(StageFailedInProcess, match="ValueError: no"):
        served(Agents(agent, needs=["x"], base_url=""), {"x": np.arange(3)})
    assert sorted(ended) == [0, 2]


def test_an_agent_has_a_deadline() -> None:
    async def agent(data: Mapping[str, Any], base_url: str) -> float:
        await asyncio.Event().wait()
        return 0.0

    events: list[Event] = []
    served(Agents(agent, needs=["x"], base_url="", timeout_s=0.01), {"x": [0]}, events.append, tq.Retry(attempts=1))
    failures = [event.text for event in events if isinstance(event, Failure)]
    assert "DeadlineExceeded: the agent of row 0 of the batch was not finished after 0.01 s" in failures[0]


def test_agents_say_what_they_lack() -> None:
    with pytest.raises(UsageError, match="give base_url or recorder"):
        Agents(Shouter(), needs=["x"])
    with pytest.raises(UsageError, match="at least 1 agent"):
        Agents(Shouter(), needs=["x"], base_url="", concurrency_max=0)
    with pytest.raises(StageFailedInProcess, match=r"returned \['rewards'\]; it gives \['rewards', 'said'\]"):
        served(Agents(_number, needs=["x"], gives=["rewards", "said"], base_url=""), {"x": [1]})


async def _number(data: Mapping[str, Any], base_url: str) -> float:
    return 1.0


def test_an_episode_is_one_sequence_in_the_order_of_its_turns() -> None:
    rows = served(episodes(), {"seed": [10, 20]})
    assert rows["input_ids"].list() == [[100, n, n + 1, 101, n + 1, n + 2, 102, n + 2, n + 3] for n in (10, 20)]
    assert rows["loss_mask"].list() == [[False, False, True] * 3] * 2
    assert rows["rewards"].list() == [3.0, 3.0]
    assert rows["turns"].list() == [3, 3]
    assert Counting.opened == 0


def test_an_episode_is_cut_short_and_what_makes_none_is_refused() -> None:
    assert served(episodes(turns_max=2), {"seed": [10]})["turns"].list() == [2]
    with pytest.raises(UsageError, match="turns_max=0"):
        episodes(turns_max=0)
    with pytest.raises(UsageError, match="a field or a seed"):
        episodes(seed=None)


def test_an_environment_that_raises_is_closed() -> None:
    def encode(observation: int, turn: int) -> Ids:
        raise ValueError("no text")

    with pytest.raises(StageFailedInProcess, match="no text"):
        served(episodes(encode=encode), {"seed": [1]})
    assert Counting.opened == 0
