"""Policy and critic go back to the same step: which checkpoints count, and which go."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.jobs import job
from transferqueue.errors import Corruption
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.run_files import checkpoint_path, checkpoint_steps
from transferqueue.workflows.job.training.policy_critic_pair import (
    PolicyCriticPair,
    begin_pair,
    newest_pair,
)


def pair_of(folder: Path, policy: list[int], critic: list[int], last: int = 9) -> PolicyCriticPair:
    pair = PolicyCriticPair(folder, last)
    for task, steps in ((names.TRAIN, policy), (names.TRAIN_CRITIC, critic)):
        for step in steps:
            path = checkpoint_path(pair.directory(task), step)
            path.mkdir(parents=True)
            (path / "state.json").write_text("{}")
    return pair


def steps_of(pair: PolicyCriticPair) -> tuple[list[int], list[int]]:
    policy, critic = (checkpoint_steps(pair.directory(task)) for task in (names.TRAIN, names.TRAIN_CRITIC))
    return policy, critic


@pytest.mark.parametrize(
    ("policy", "critic", "wanted"),
    [
        ([], [], None),
        ([2], [], None),
        ([2, 4], [2], (2, 2)),
        ([2, 4], [2, 4, 6], (4, 4)),
        ([8, 9], [8], (8, 8)),
        ([8, 9], [9, 10], (9, 10)),  # the critic trains on after the policy's last step
    ],
)
def test_a_checkpoint_counts_once_both_have_it(policy: list[int], critic: list[int], wanted: object) -> None:
    assert newest_pair(policy, critic, 9) == wanted


@pytest.mark.parametrize(
    ("policy", "critic", "left"),
    [
        ([2, 4], [2], ([2], [2])),
        ([2], [2, 4], ([2], [2])),
        ([2], [], ([], [])),
        ([8, 9], [8, 9, 10], ([8, 9], [8, 9, 10])),
    ],
)
def test_before_a_pair_starts_what_one_of_them_lacks_is_removed(
    policy: list[int], critic: list[int], left: object, tmp_path: Path
) -> None:
    pair = pair_of(tmp_path, policy, critic)
    pair.begin_again(7)
    assert steps_of(pair) == left
    start = pair.start()
    assert start is not None
    assert start.version == 7


def test_checkpoints_without_any_of_the_other_are_kept_and_refused(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, [48, 50], [])
    with pytest.raises(Corruption, match=r"train of steps \[48, 50\], train_critic of steps none; put the missing"):
        pair.begin_again(7)
    assert steps_of(pair) == ([48, 50], [])
    assert pair.start() is None


def test_a_pair_begins_with_a_version_that_no_channel_has(tmp_path: Path) -> None:
    with tq.connect() as queue:
        begin_pair(queue, tmp_path, 9)
        first = PolicyCriticPair(tmp_path, 9).start()
        for channel, versions in ((names.POLICY, (0, 1, 2)), (names.CRITIC, (0, 3))):
            for version in versions:
                queue.weights(channel).publish(version, {"w": np.zeros(1, np.float32)})
        begin_pair(queue, tmp_path, 9)
    again = PolicyCriticPair(tmp_path, 9).start()
    assert first is not None
    assert again is not None
    assert (first.version, again.version) == (0, 4)


# ---------------------------------------------------------------- the critic takes one step after the other

TURN_ROWS, TURN_STEPS, TURN_S = 2, 2, 60.0


@pytest.mark.slow
def test_the_critic_leaves_rows_of_the_next_step_until_the_policy_has_finished_its_own(tmp_path: Path) -> None:
    """After a step was taken back, rows of the steps after it are generated again together with its own, by the same
    version."""
    pytest.importorskip("torch")
    from transferqueue.workflows.job.tiny_model.make import make

    make(tmp_path / "critic", kind="value", **SMALL)
    wanted = job(
        "ppo",
        f"critic.path='{tmp_path}/critic'",
        f"model.path='{tmp_path}/critic'",
        f"trainer.prompts_per_step={TURN_ROWS}",
        "reproducible=true",
        "algorithm.whiten=false",
        "algorithm.kl=0",
        "pacing.mode=sync",
        f"steps={TURN_STEPS}",
        "model.dtype=float32",
    )
    PolicyCriticPair(tmp_path, TURN_STEPS).begin_again(0)
    with tq.connect() as queue:
        table = graph.create_table(queue, wanted)
        for ordinal in (2, 0, 3, 1):
            put_and_score(table, ordinal, version=0)
        with critic_of(queue, wanted, tmp_path) as steps:
            publish(queue, names.POLICY, 0)
            queue.weights(names.CRITIC).pull(above=0, timeout_s=TURN_S).release()
            wait_at_the_server(queue, names.TRAIN_CRITIC)
            critic = table.stats().tasks[names.TRAIN_CRITIC]
            assert (critic.ready, critic.leased) == (2, 0)
            with table.lease(names.TRAIN, rows=2, where=tq.Compare("ordinal", "<", 2), timeout_s=TURN_S) as batch:
                publish(queue, names.POLICY, 1)  # rows 2 and 3 become stale
                batch.ack(step=1)
            with table.lease(names.ROLLOUT, rows=2, timeout_s=TURN_S) as batch:
                batch.ack(**RESPONSES, policy_version=1)
            score(table)
            queue.weights(names.CRITIC).pull(above=1, timeout_s=TURN_S).release()
            with table.lease(names.TRAIN, rows=2, timeout_s=TURN_S) as batch:
                publish(queue, names.POLICY, 2)
                batch.ack(step=2)
            table.seal()
    assert [step["rows"] for step in steps()] == [TURN_ROWS, TURN_ROWS]


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
TOKENS = np.array([0.5, -0.5], np.float32)
RESPONSES = {
    "response_ids": [np.array([5, 6], np.int32)] * 2,
    "rollout_logprobs": [TOKENS] * 2,
    "token_versions": [np.zeros(2, np.int32)] * 2,
    "finish_reason": ["stop"] * 2,
}


def put_and_score(table: tq.Table, ordinal: int, *, version: int) -> None:
    table.put(
        prompt_ids=[np.array([5, 7], np.int32)],
        data=[{"prompt": "?"}],
        group_id=ordinal,
        group_size=1,
        ordinal=[ordinal],
    )
    with table.lease(names.ROLLOUT, rows=1, timeout_s=TURN_S) as batch:
        batch.ack(**{name: column[:1] for name, column in RESPONSES.items()}, policy_version=version)
    score(table, rows=1)


def score(table: tq.Table, rows: int = TURN_ROWS) -> None:
    given: dict[str, dict[str, Any]] = {
        names.REWARD: {"rewards": [1.0] * rows, "reward_terms": [np.ones(1, np.float32)] * rows},
        names.VALUE: {"values": [TOKENS] * rows},
        names.ADVANTAGE: {"token_advantages": [TOKENS] * rows, "returns": [TOKENS] * rows},
    }
    for task, columns in given.items():
        with table.lease(task, rows=rows, timeout_s=TURN_S) as batch:
            batch.ack(**columns)


def publish(queue: tq.Queue, channel: str, version: int) -> None:
    queue.weights(channel).publish(version, {"w": np.zeros(1, np.float32)})


@contextmanager
def critic_of(queue: tq.Queue, wanted: Any, folder: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The critic's trainer in a thread, until the table ends; gives the figures of its steps."""
    from transferqueue.workflows.job.training.process import train_critic

    told: list[Event] = []

    def run() -> None:
        with tq.connect(queue.address, label=names.TRAIN_CRITIC) as own:
            context = Context(
                queue=own,
                table=own.table(names.TABLE),
                emit=told.append,
                settings=msgspec.to_builtins(wanted),
                directory=folder,
            )
            with train_critic(context) as loop:
                loop()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run)
        try:
            yield lambda: [event.values for event in told if isinstance(event, Figures) and event.kind == "critic_step"]
            ended.result(TURN_S)
        except BaseException:
            queue.drop_table(names.TABLE)  # ends the critic's wait
            raise


def wait_at_the_server(queue: tq.Queue, label: str) -> None:
    """Wait until a process waits for rows: the server shows it, and tells nobody."""
    deadline = time.monotonic() + TURN_S
    while not any(wait.label == label for wait in queue.stats().waiting):
        assert time.monotonic() < deadline, f"{label} does not wait"
