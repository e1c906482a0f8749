"""The policy's trainer and the critic's as a pair: they go back to the same step. No torch here: the supervisor of a
run uses it too.

1. A checkpoint of a step counts once both trainers have one. The writer of the second sends ``checkpointed`` for both
   tasks, so rows are final in both or in neither. The policy's last checkpoint counts for any later one of the critic,
   which trains until the table ends.
2. The processes of a pair die together and start together (`StageJob.together`). Before they start, `begin_again`
   removes checkpoints that one of them lacks, and writes the version that both publish first, which no channel has yet.
3. The critic publishes that version first; then the policy; then the critic leases rows. So no row is generated, scored
   or learned from before both are back, and versions of both channels stay equal: the values of rows of version v are
   given by the critic's version v. Where versions are the numbers of steps (`step_versions`), the first version may be
   published already; then each row has its version, whichever trainer is back first.
4. In sync mode the critic with weights of version v learns only from rows of version v. When a step was taken back,
   rows of the steps after it may be in the table, and they are generated again together with its own. The critic may
   have finished its step before the policy has; the rows of the next step are then still of the version before. They
   become stale with the policy's next version, and come again. Without this rule the critic would learn from both.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import transferqueue as tq
from transferqueue.errors import Corruption, DeadlineExceeded
from transferqueue.transport.system.private_files import write_durably
from transferqueue.workflows.job import names
from transferqueue.workflows.job.run_files import CHECKPOINTS, checkpoint_path, checkpoint_steps

_START: Final = "start.json"


class PairStart(msgspec.Struct, frozen=True, kw_only=True):
    """What both trainers of a life begin with. version: that they publish first."""

    version: int


def latest_version(channel: tq.WeightChannel) -> int:
    """Return the newest version of the channel; -1 if it has none."""
    try:
        with channel.pull(timeout_s=0) as weights:
            return weights.version
    except DeadlineExceeded:
        return -1


def begin_pair(queue: tq.Queue, folder: Path, last: int, *, by_step: bool = False) -> None:
    """Let both trainers of the run in `folder` go back to the same step. last: the policy's. by_step: versions are the
    numbers of steps, which are not published twice. Neither process may run. Raises as `PolicyCriticPair.begin_again`.
    """
    pair = PolicyCriticPair(folder, last)
    newest = max(latest_version(queue.weights(channel)) for channel in (names.POLICY, names.CRITIC))
    pair.begin_again(pair.newest().get(names.TRAIN, 0) if by_step else newest + 1)


def newest_pair(policy: Sequence[int], critic: Sequence[int], last: int) -> tuple[int, int] | None:
    """Return the newest checkpoints of policy and critic that belong together; None if no two do. last: step of the
    policy's last one.

    >>> newest_pair([2, 4], [2], last=9), newest_pair([8, 9], [9, 10], last=9), newest_pair([2], [], last=9)
    ((2, 2), (9, 10), None)
    """
    both = [(min(step, last), step) for step in critic if min(step, last) in policy]
    return max(both, default=None)


@dataclass(frozen=True)
class PolicyCriticPair:
    """The checkpoints of both trainers of the run in `folder`. last: step of the policy's last checkpoint."""

    folder: Path
    last: int

    def directory(self, task: str) -> Path:
        """Where the checkpoints of a trainer are."""
        return self.folder / CHECKPOINTS / task

    def newest(self) -> dict[str, int]:
        """Return the step of the newest checkpoints that belong together, by task; empty if no two do."""
        policy, critic = (checkpoint_steps(self.directory(task)) for task in names.TRAINERS)
        pair = newest_pair(policy, critic, self.last)
        return {} if pair is None else dict(zip(names.TRAINERS, pair, strict=True))

    def needed_from(self, task: str) -> int:
        """Return the step of a trainer from which on checkpoints must stay: that of the newest pair, or any."""
        return self.newest().get(task, -1)

    def start(self) -> PairStart | None:
        """Return what this life begins with; None if the pair was not started by a supervisor."""
        path = self.folder / CHECKPOINTS / _START
        return msgspec.json.decode(path.read_bytes(), type=PairStart) if path.exists() else None

    def begin_again(self, version: int) -> None:
        """Remove checkpoints newer than the newest pair, and note the version that both trainers publish first. Neither
        process may run.

        Raises `Corruption`, and removes nothing, if one trainer has several checkpoints and the other none that belongs
        to one of them: files are missing.
        """
        newest = self.newest()
        late = {
            task: [step for step in checkpoint_steps(self.directory(task)) if step > newest.get(task, -1)]
            for task in names.TRAINERS
        }
        if not newest and any(len(steps) > 1 for steps in late.values()):
            found = ", ".join(f"{task} of steps {steps or 'none'}" for task, steps in late.items())
            raise Corruption(
                f"{self.folder / CHECKPOINTS} has no checkpoints of policy and critic that belong together: {found}; "
                "put the missing ones back, or start a new run"
            )
        for task, steps in late.items():
            for step in steps:
                shutil.rmtree(checkpoint_path(self.directory(task), step))
        self._write(PairStart(version=version))

    def _write(self, start: PairStart) -> None:
        path = self.folder / CHECKPOINTS / _START
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, msgspec.json.encode(start) + b"\n")
