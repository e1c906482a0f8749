"""Settings that cannot do what they are for: each is refused, or the log says so."""

import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest

from transferqueue.errors import UsageError
from transferqueue.limits import MIB
from transferqueue.server.durability.state_directory import StateDirectory
from transferqueue.server.durability_level import Level
from transferqueue.server.process.serve import serve
from transferqueue.server.spill.spill_file import SpillFile
from transferqueue.transport.system.file_system import memory_file_system

DISK = "name a directory on a disk"


@pytest.fixture
def in_memory():
    """A directory on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        assert memory_file_system(Path(path)) == "tmpfs"
        yield Path(path)


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_only_what_is_in_memory_is_called_so():
    assert memory_file_system(Path("/proc")) == ""


def test_a_spill_directory_in_memory_is_warned_of(in_memory, logged):
    file = SpillFile(in_memory, 16 * MIB, lambda: None, lambda: None)
    file.stop()
    assert logged() == [f"spill directory {in_memory} is in memory (tmpfs): spilling there frees no memory; {DISK}"]


@pytest.mark.parametrize("level", [Level.PROCESS, Level.DISK])
def test_a_state_in_memory_is_warned_of_where_it_is_to_survive_a_reboot(level, in_memory, logged):
    StateDirectory(in_memory / "state", level, first_epoch=1, arena_bytes=MIB).close()
    warned = [text for text in logged() if DISK in text]
    assert len(warned) == (level is Level.DISK)
    assert all("(tmpfs): nothing in it survives a reboot, as durability disk promises" in text for text in warned)


def test_an_arena_keeps_its_size_and_whoever_asks_for_another_is_told(tmp_path, logged):
    for arena_bytes in (MIB, None, MIB - 1):
        StateDirectory(tmp_path / "state", Level.PROCESS, first_epoch=1, arena_bytes=arena_bytes).close()
    assert logged() == []
    StateDirectory(tmp_path / "state", Level.PROCESS, first_epoch=1, arena_bytes=2 * MIB).close()
    (warned,) = logged()
    assert "its arena stays at 1048576 bytes, and arena_bytes=2097152 changes nothing" in warned


def test_keys_are_refused_where_there_is_no_tcp_address(tmp_path):
    rule = "keys '/keys' refused: clients at tcp addresses need them, and this server has none"
    with pytest.raises(UsageError, match=rf"^{rule}.*; give --tcp too, or leave --"):
        serve(f"ipc://{tmp_path}/q.sock", on_ready=print, keys=Path("/keys"))
    assert not list(tmp_path.iterdir())


def test_plain_bytes_without_keys_are_warned_of(tmp_path, logged):
    serve_for_a_moment(tmp_path, plain_bytes=True)
    assert logged() == ["--plain-bytes changes nothing: this server has no keys, so it encrypts nothing"]


def serve_for_a_moment(directory: Path, **options):
    """Serve until the server listens."""
    serve(
        f"ipc://{directory}/run/q.sock",
        arena_bytes=MIB,
        on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM),
        **options,
    )
