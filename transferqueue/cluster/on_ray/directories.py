"""The state directory that a deployment makes on its node, and the removal of those that dead deployments left.

1. A deployment without a given state directory makes one in the user's runtime directory, and removes it when it is
   closed.
2. A deployment that was not closed (its driver was killed, its node was lost) leaves its directory and the memory that
   the directory names. The next deployment on that machine removes both, once no actor can return to them: the raylet
   that would restart the actor is gone, or a new deployment has its name. Both are observed; neither is guessed from a
   time.
3. A directory that a user named is never removed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.cluster.on_ray.messages import DeploySpec
from transferqueue.transport import FileLock, runtime_directory, this_host
from transferqueue.transport.system.private_files import private_directory, write_private

PREFIX: Final = "ray-"
_OWNER: Final = "owner.json"


class DirectoryOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The actor that may return to a directory. `raylet` and `began` are the process number and start time of the
    raylet that would restart it."""

    host: str
    cluster: str
    deployment: str
    raylet: int
    began: str

    @classmethod
    def here(cls, cluster: str, deployment: str) -> DirectoryOwner:
        """The owner for an actor in this process: Ray's workers are children of their node's raylet."""
        parent = os.getppid()
        return cls(this_host(), cluster, deployment, parent, _began(parent))

    def is_gone(self, newer: DirectoryOwner) -> bool:
        """Whether this owner's actor can no longer return, now that `newer` is being made."""
        if (
            self.host != newer.host
        ):  # another boot of this machine, or another container, whose processes are invisible here
            return self.host.partition("/")[0] != newer.host.partition("/")[0]
        replaced = (self.cluster, self.deployment) == (newer.cluster, newer.deployment)
        return replaced or _began(self.raylet) != self.began


def own_directory(deploy: DeploySpec) -> Path:
    """The directory of a deployment without a given one."""
    return runtime_directory() / f"{PREFIX}{deploy.named.digest(deploy.id)}"


def claim_directory(directory: Path, owner: DirectoryOwner) -> None:
    """Make the directory, and write its owner into it."""
    private_directory(directory.parent)
    private_directory(directory, "state directory")
    write_private(directory / _OWNER, msgspec.json.encode(owner))


def remove_stale(newer: DirectoryOwner, root: Path) -> list[Path]:
    """Remove the directories in `root` that dead deployments left (rule 2), and return their paths. Their memory then
    has no owner; the next server that makes an arena removes it."""
    stale = [path for path in root.glob(f"{PREFIX}*/") if _is_stale(path, newer)]
    for path in stale:
        shutil.rmtree(path)
    return stale


def _is_stale(path: Path, newer: DirectoryOwner) -> bool:
    try:
        owner = msgspec.json.decode((path / _OWNER).read_bytes(), type=DirectoryOwner)
    except (OSError, msgspec.MsgspecError):
        return False  # not written yet, or not of this library
    return owner.is_gone(newer) and not _is_held(path / "lock")


def _is_held(path: Path) -> bool:
    lock = FileLock(path, inherited=False)
    with suppress(OSError):
        if lock.take():
            lock.release()
            return False
    return True


def _began(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if it does not exist. Number and start time together
    identify a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
