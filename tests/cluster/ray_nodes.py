"""A Ray cluster on this machine whose nodes share no /tmp, no /dev/shm and no pids, as machines do; only the disk is
common.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import pytest

READY_S = 120.0
_ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_OWN = (
    "mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 /tmp/runtime && "
    "export TRANSFERQUEUE_RUNTIME=/tmp/runtime"
)


def check_isolation() -> None:
    """Skip the test where a process may not have namespaces of its own."""
    if shutil.which("unshare") is None or subprocess.run([*_ALONE, "sh", "-c", _OWN], check=False).returncode:
        pytest.skip("needs the right to make namespaces (root, and unshare)")


class RayNodes(AbstractContextManager["RayNodes"]):
    """A head with `num_cpus`, in this process's namespaces, and nodes that `add` starts. address: for ``ray.init`` and
    ``RAY_ADDRESS``.
    """

    def __init__(self, *, num_cpus: int = 2) -> None:
        self._num_cpus = num_cpus
        self.nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        from ray.cluster_utils import Cluster

        self._head: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": self._num_cpus, "include_dashboard": False}
        )
        self.address: str = self._head.address
        return self

    def add(self, resource: str = "", *, num_cpus: int = 2) -> int:
        """Start a node, with one of a resource, and wait until the cluster has it; return its number."""
        before = self._alive()
        ray_start = [str(Path(sys.executable).with_name("ray")), "start", f"--address={self.address}", "--block"]
        ray_start += [f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
        if resource:
            ray_start.append(f"--resources='{{\"{resource}\": 1}}'")
        self.nodes.append(
            subprocess.Popen(
                [*_ALONE, "sh", "-c", f"{_OWN} && exec {' '.join(ray_start)}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
            )
        )
        deadline = time.monotonic() + READY_S
        while len(self._alive() - before) != 1:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {len(self.nodes) - 1} did not join the cluster within {READY_S:g} s")
            time.sleep(0.1)
        return len(self.nodes) - 1

    def _alive(self) -> set[str]:
        """Ids of the nodes that the cluster has."""
        return set(self._head.global_state._live_node_ids())

    def kill(self, number: int) -> None:
        """Kill every process of a node at once."""
        os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
        self._head.shutdown()
