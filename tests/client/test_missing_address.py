"""A queue that no address names: the server of this user if one runs, else an embedded one, which is said."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue import connecting
from transferqueue.transport import default_address


@pytest.fixture(autouse=True)
def no_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFERQUEUE_ADDRESS", "TRANSFERQUEUE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFERQUEUE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr(connecting, "_told", [])


@pytest.fixture
def served() -> Iterator[str]:
    """The address of this user's server, at the place where commands look."""
    command = [sys.executable, "-m", "transferqueue.server", "--address", default_address(), "--arena-bytes", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield default_address()
        process.terminate()


@pytest.mark.parametrize("name", ["TRANSFERQUEUE_ADDRESS", "TRANSFERQUEUE_TOKEN"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(tq.UsageError, match=f"{name} is set and empty; give it the address of the server, or unset it"):
        tq.connect()
    with tq.connect("embedded") as queue:  # which asks no variable
        assert queue.tables() == []


@pytest.mark.slow  # a server process
def test_the_running_server_of_this_user_is_found_as_commands_find_it(served: str) -> None:
    with tq.connect(served) as there:
        there.create_table("rollouts")
        with tq.connect() as found, tq.connect(None) as also:
            assert found.address == also.address == served
            assert found.tables() == ["rollouts"]
        assert asyncio.run(tables_of_a_loop()) == ["rollouts"]
    with tq.connect("embedded") as own, tq.connect(arena_bytes="64MiB") as sized:
        assert own.tables() == sized.tables() == []


@pytest.mark.slow  # a server process
def test_a_server_in_a_directory_of_others_is_not_joined(served: str) -> None:
    Path(served.removeprefix("ipc://")).parent.chmod(0o755)
    with pytest.raises(tq.UsageError, match="has mode 755: other users could open the queue"):
        tq.connect()


async def tables_of_a_loop() -> list[str]:
    async with tq.aconnect() as queue:
        return await queue.tables()


def test_a_socket_that_a_killed_server_left_is_no_server() -> None:
    stale = Path(default_address().removeprefix("ipc://"))
    stale.parent.mkdir(mode=0o700)
    stale.touch()
    with tq.connect() as queue:
        assert queue.address != default_address()


def test_an_embedded_queue_that_was_not_asked_for_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "transferqueue"), tq.connect() as queue, tq.connect() as other:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert (
            f'a queue was embedded in this process; other processes join with tq.connect("{queue.address}")'
            in caplog.text
        )
        for one in (queue, other):
            with pytest.raises(
                tq.NotFound, match=r"this queue was embedded \d+\.\d s ago; TRANSFERQUEUE_ADDRESS is not set"
            ):
                one.table("rollouts")


def test_an_embedded_queue_that_was_asked_for_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with tq.connect("embedded") as queue, pytest.raises(tq.NotFound) as error:
        queue.table("rollouts")
    assert "embedded" not in str(error.value)
    assert not caplog.records
