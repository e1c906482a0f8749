"""docs/reference/environment.md has every environment variable that the code reads, and `connect` follows them as every
command does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import transferqueue as tq
from transferqueue.cli.connection import address_of

ROOT = Path(__file__).parents[1]
ROOMS = ("transferqueue", "adapters", "workflows")
_READ = re.compile(r"(?:environ(?:\.get|\.pop|\.setdefault)?[\[(]|getenv\()\s*(?:f?\"(\w+)\"|(_?[A-Z]\w*))")
_OURS = re.compile(r"\b(?:TRANSFERQUEUE|TQ)_[A-Z][A-Z_]+\b")
_CONSTANT = re.compile(r"^([A-Z][A-Z_]*)(?:: Final)? = \"([A-Z][A-Z_]+)\"", re.MULTILINE)


def test_the_page_has_every_variable_that_is_read_and_no_other() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    sources = [path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    constants = {name: value for source in sources for name, value in _CONSTANT.findall(source)}
    read: set[str] = set()
    for source in sources:
        read |= {text or constants.get(name, name) for text, name in _READ.findall(source)}
        read |= {name for name in _OURS.findall(source) if name.startswith("TRANSFERQUEUE_")}
    assert read == listed
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file():
            assert set(_OURS.findall(path.read_text())) <= listed, path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> tq.Queue:
    with tq.connect("embedded") as queue:
        monkeypatch.setenv("TRANSFERQUEUE_ADDRESS", queue.address)
        yield queue  # type: ignore[misc]


def test_connect_without_an_address_joins_the_server_that_commands_speak_to(server: tq.Queue) -> None:
    server.create_table("t")
    assert address_of(None) == server.address
    with tq.connect() as queue:
        assert (queue.address, queue.tables()) == (server.address, ["t"])


async def _tables() -> tuple[str, list[str]]:
    async with tq.aconnect() as queue:
        return queue.address, await queue.tables()


def test_so_does_aconnect(server: tq.Queue) -> None:
    import asyncio

    assert asyncio.run(_tables()) == (server.address, [])


@pytest.mark.parametrize("named", [{"address": "embedded"}, {"arena_bytes": "64MiB"}])
def test_a_server_of_ones_own_is_embedded_all_the_same(server: tq.Queue, named: dict[str, str]) -> None:
    with tq.connect(**named) as queue:  # type: ignore[arg-type]
        assert queue.address != server.address


def test_an_address_goes_before_the_environment(server: tq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_ADDRESS", "ipc:///nowhere/at/all.sock")
    with tq.connect(server.address) as queue:
        assert queue.address == server.address
    with pytest.raises(tq.Unreachable, match="/nowhere/at/all"):
        tq.connect(timeout_s=0.01)


def test_a_variable_that_is_no_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_ADDRESS", "localhost")
    with pytest.raises(tq.UsageError, match="localhost"):
        tq.connect()


def test_a_key_is_not_for_an_embedded_server() -> None:
    with pytest.raises(tq.UsageError, match="a key is for a server that runs"):
        tq.connect("embedded", key="tqjoin_x")
