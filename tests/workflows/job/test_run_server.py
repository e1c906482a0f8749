"""The server of a run: it outlives its own death, keeps its state for a later start, and never outlives the run."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.errors import AddressInUse, Unreachable, UsageError
from transferqueue.workflows.job.run import server as server_module
from transferqueue.workflows.job.run.discard import _without_server, discard_run
from transferqueue.workflows.job.run.folder import RunFolder, unfinished_folder
from transferqueue.workflows.job.run.server import RunServer, discard_state
from transferqueue.workflows.job.settings.job import QueueSettings

pytestmark = pytest.mark.slow
SMALL = QueueSettings(memory_gib=0.0625)
GENEROUS_S = 60.0


def ended(pids: list[int]) -> bool:
    """Wait until all processes have ended; whether they did."""
    deadline = time.monotonic() + GENEROUS_S
    for pid in pids:
        try:
            death = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([death], [], [], max(0.0, deadline - time.monotonic()))
        os.close(death)
        if not ready:
            return False
    return True


def arena_of(folder: Path) -> Path:
    """The directory in shared memory of the run's server; other servers of this user have theirs beside it."""
    return (folder / "state" / (folder / "state" / "arena").readlink()).resolve().parent


def test_rows_outlive_the_server_and_the_run_but_not_their_discard(tmp_path):
    with RunServer(tmp_path, SMALL) as server:
        pids = server.pids()
        with tq.connect(server.address) as queue:
            table = queue.create_table("t", tasks=[tq.Task("x", needs=["v"])])
            table.put(v=[1, 2, 3])
            os.kill(pids[1], signal.SIGKILL)
            assert table.audit().rows_live == 3
        assert len(server.pids()) == 2
        pids += server.pids()
    assert ended(pids)
    with RunServer(tmp_path, SMALL) as server, tq.connect(server.address) as queue:
        assert queue.table("t").audit().rows_live == 3
    arena = arena_of(tmp_path)
    assert arena.is_dir()
    discard_state(tmp_path)
    assert not (tmp_path / "state").exists()
    assert not arena.exists()
    discard_state(tmp_path)


_PROGRAM = """
import os, signal, sys
from pathlib import Path
from transferqueue.workflows.job.run import server as server_module
from transferqueue.workflows.job.run.server import RunServer
from transferqueue.workflows.job.settings.job import QueueSettings
server = RunServer(Path(sys.argv[1]), QueueSettings(memory_gib=0.0625)).__enter__()
print(*server.pids(), flush=True)
if sys.argv[2] == "supervisor":
    os.kill(server.pids()[0], signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("also", ["", "supervisor"], ids=["the run is killed", "its supervisor too"])
def test_a_server_ends_with_the_run_that_was_killed(tmp_path, also):
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, tmp_path, also], capture_output=True, text=True, timeout=GENEROUS_S
    )
    pids = list(map(int, ran.stdout.split()))
    assert len(pids) == 2
    assert ended(pids)
    with RunServer(tmp_path, SMALL) as server:
        assert server.pids()
    discard_state(tmp_path)


def test_a_run_that_was_killed_can_be_discarded_once_its_processes_are_gone(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with RunServer(folder.path, SMALL) as server:
        with pytest.raises(AddressInUse, match=r"the server of the run, with its state in .*state, still runs"):
            discard_run(folder)
        assert server.pids()
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, folder.path, ""], capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert ended(list(map(int, ran.stdout.split())))
    (folder.path / "job.toml").write_text('name = "killed"')
    sockets = Path((folder.path / "runtime").read_text())
    assert sockets.is_dir()
    arena = arena_of(folder.path)
    assert arena.is_dir()
    with folder.locked(), pytest.raises(AddressInUse, match="is going on in another process"):
        discard_run(RunFolder(folder.path))
    assert discard_run(folder) > 0
    assert not arena.exists()
    assert not sockets.exists()
    assert {entry.name for entry in folder.path.iterdir()} == {"discarded", "job.toml", "server.log"}
    assert discard_run(folder) == 0
    with pytest.raises(
        UsageError, match=r"was discarded, and its rows are gone; start a new one with --set checkpoint.resume="
    ):
        unfinished_folder("killed", folder.path)


def test_a_link_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "arena").write_text("kept")
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "state" / "arena").symlink_to(tmp_path / "mine" / "arena")
    (tmp_path / "run" / "runtime").write_text(str(tmp_path / "mine"))
    discard_run(RunFolder(tmp_path / "run"))
    assert (tmp_path / "mine" / "arena").read_text() == "kept"
    assert not (tmp_path / "run" / "state").exists()


def test_a_finished_run_keeps_nothing_to_discard(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UsageError, match="is finished and keeps no rows"):
        discard_run(RunFolder(tmp_path))


def test_whether_a_run_is_finished_is_asked_under_its_lock(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with RunFolder(tmp_path).locked(), pytest.raises(AddressInUse, match="is going on in another process"):
        discard_run(RunFolder(tmp_path))


def test_no_server_begins_while_its_state_is_discarded(tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    with _without_server(tmp_path / "state"), pytest.raises(Unreachable, match="is in use by a live server"):
        RunServer(tmp_path, SMALL).__enter__()


def test_a_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "state").write_text("no directory")
    with pytest.raises(Unreachable, match=r"did not start: .*state"), RunServer(tmp_path, SMALL):
        pass


def test_ctrl_c_while_a_server_starts_ends_it_and_removes_its_socket_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module.tempfile, "mkdtemp", lambda prefix: str(Path(tmp_path / "sockets").absolute()))
    (tmp_path / "sockets").mkdir()
    server = RunServer(tmp_path / "run", SMALL)
    monkeypatch.setattr(server._ready, "wait", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert server.pids() == []
    assert not (tmp_path / "sockets").exists()


def test_a_lifeline_must_be_a_pipe(tmp_path):
    command = [sys.executable, "-m", "transferqueue.cli", "serve", "--runtime", tmp_path, "--lifeline"]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GENEROUS_S)
    assert ran.returncode == 2
    assert "--lifeline needs a pipe" in ran.stderr


KILLED = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]


def test_a_server_that_is_killed_before_it_listens_is_started_again(tmp_path, monkeypatch):
    deaths = iter([KILLED] * (server_module.STARTS_MAX - 1))
    command = RunServer._command
    monkeypatch.setattr(RunServer, "_command", lambda self: next(deaths, None) or command(self))
    with RunServer(tmp_path, SMALL) as server, tq.connect(server.address) as queue:
        assert queue.tables() == []


def test_a_server_that_is_killed_each_time_is_given_up_with_the_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(RunServer, "_command", lambda self: KILLED)
    with pytest.raises(Unreachable, match="did not start: it was killed by SIGKILL"), RunServer(tmp_path, SMALL):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["server.log"]
