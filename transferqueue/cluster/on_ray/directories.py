"""The directory of one deployment on its node, and what is left of those that are gone.

The law:

1. A deployment whose state directory nobody named has one of its own in the user's runtime directory. It is removed when
   the deployment is closed.
2. One that was not closed (its driver was killed, its node went away) leaves it, with the memory that it names. The next
   deployment on that machine removes it, once nothing can come back to it: the raylet that would start the actor
   again is gone, or a new deployment has its name. Both are seen, neither is guessed from time.
3. What somebody named is never removed.
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
    """Who may come back to a directory. raylet, began: number and start of the process that starts the actor."""

    host: str
    cluster: str
    deployment: str
    raylet: int
    began: str

    @classmethod
    def here(cls, cluster: str, deployment: str) -> DirectoryOwner:
        """Of an actor in this process: Ray's workers are children of the raylet of their node."""
        parent = os.getppid()
        return cls(this_host(), cluster, deployment, parent, _began(parent))

    def is_gone(self, newer: DirectoryOwner) -> bool:
        """Whether nothing of this owner can come back, now that `newer` is being made."""
        if self.host != newer.host:  # another boot of this machine, or processes that cannot be seen from here
            return self.host.partition("/")[0] != newer.host.partition("/")[0]
        replaced = (self.cluster, self.deployment) == (newer.cluster, newer.deployment)
        return replaced or _began(self.raylet) != self.began


def own_directory(deploy: DeploySpec) -> Path:
    """The directory that is named by nobody."""
    return runtime_directory() / f"{PREFIX}{deploy.named.digest(deploy.id)}"


def claim_directory(directory: Path, owner: DirectoryOwner) -> None:
    """Make it, and write down whose it is."""
    private_directory(directory.parent)
    private_directory(directory, "state directory")
    write_private(directory / _OWNER, msgspec.json.encode(owner))


def remove_stale(newer: DirectoryOwner, root: Path) -> list[Path]:
    """Remove what deployments left in `root` (rule 2); returns what that was. Their memory is nobody's then, and removed by
    the next server that makes an arena."""
    left = [path for path in root.glob(f"{PREFIX}*/") if _is_left(path, newer)]
    for path in left:
        shutil.rmtree(path)
    return left


def _is_left(path: Path, newer: DirectoryOwner) -> bool:
    try:
        owner = msgspec.json.decode((path / _OWNER).read_bytes(), type=DirectoryOwner)
    except (OSError, msgspec.MsgspecError):
        return False  # being made, or nothing of ours
    return owner.is_gone(newer) and not _is_held(path / "lock")


def _is_held(path: Path) -> bool:
    lock = FileLock(path, inherited=False)
    with suppress(OSError):
        if lock.take():
            lock.release()
            return False
    return True


def _began(pid: int) -> str:
    """When a process started, in ticks of its machine: with its number that is this process and no later one. "" if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
