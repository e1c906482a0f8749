"""Policy and critic go back to the same step: which checkpoints count, and which go."""

from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.errors import Corruption
from transferqueue.workflows.job import names
from transferqueue.workflows.job.training.pair import (
    TrainerPair,
    begin_pair,
    checkpoint_path,
    checkpoint_steps,
    newest_pair,
)


def pair_of(folder: Path, policy: list[int], critic: list[int], last: int = 9) -> TrainerPair:
    pair = TrainerPair(folder, last)
    for task, steps in ((names.TRAIN, policy), (names.TRAIN_CRITIC, critic)):
        for step in steps:
            path = checkpoint_path(pair.directory(task), step)
            path.mkdir(parents=True)
            (path / "state.json").write_text("{}")
    return pair


def steps_of(pair: TrainerPair) -> tuple[list[int], list[int]]:
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
    import numpy as np

    with tq.connect() as queue:
        begin_pair(queue, tmp_path, 9)
        first = TrainerPair(tmp_path, 9).start()
        for channel, versions in ((names.POLICY, (0, 1, 2)), (names.CRITIC, (0, 3))):
            for version in versions:
                queue.weights(channel).publish(version, {"w": np.zeros(1, np.float32)})
        begin_pair(queue, tmp_path, 9)
    again = TrainerPair(tmp_path, 9).start()
    assert first is not None
    assert again is not None
    assert (first.version, again.version) == (0, 4)
