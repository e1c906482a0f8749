"""Shared memory that somebody else fills up while rows are read, changed in place and put: nobody dies, and everyone is
told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILLED = """
import atexit, subprocess, sys
import numpy as np
import transferqueue as tq

address = sys.argv[1]
server = subprocess.Popen(
    [sys.executable, "-m", "transferqueue.server", "--address", address, "--arena-bytes", "150MiB"],
    stdout=subprocess.PIPE, text=True,
)
atexit.register(server.kill)
assert server.stdout.readline().startswith("ready")
row = np.arange(1 << 20)  # 8 MiB; pages are taken 64 MiB ahead of use
with tq.connect(address) as queue:
    table = queue.create_table("t", tasks=[tq.Task("a")])
    rows = table.put(x=[row] * 2)
    view = table.read(rows)["x"][0]
    hog = open("/dev/shm/hog", "wb", buffering=0)
    try:
        while hog.write(bytes(1 << 20)):
            pass
    except OSError:
        pass
    assert (view == row).all()
    view[:] = 7  # in place, in memory of this process
    assert (table.read(rows)["x"][0] == row).all()
    refused = None
    for _ in range(24):
        try:
            table.put(x=[row], timeout_s=0.5)
        except tq.DeadlineExceeded as error:
            refused = str(error)
            break
    assert refused and "No space left on device" in refused and "enlarge the file system" in refused, refused
    assert (table.read(rows)["x"][1] == row).all()
    assert queue.audit().balanced
    hog.truncate(0)
    table.put(x=[row], timeout_s=10)
    assert (view == 7).all()
server.terminate()
assert server.wait(20) == 0
print("held")
"""


@pytest.mark.slow
def test_others_fill_shared_memory_under_readers_and_writers(tmp_path: Path) -> None:
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=160m none /dev/shm && { test -z "$2" || exec "$1" -c "$2" "$3"; }'
    command = [*mount, script, "sh", sys.executable]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "", ""], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine lets no user mount a small file system")
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/run/q.sock"
    done = subprocess.run([*command, FILLED, address], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "held\n", done.stderr
