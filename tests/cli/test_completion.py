"""What a shell completes: commands, tables and rows of a running server, pages; and that it says nothing where there is
none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

import transferqueue as tq
from tests.cli.deployment import run
from transferqueue.cli import completion


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded", arena_bytes="16MiB") as found:
        for name in ("rollouts", "rewards", "samples"):
            found.create_table(name, tasks=[tq.Task("score", needs=["text"])])
        found.table("samples").put(text=[str(number) for number in range(30)])
        with found.table("samples").lease("score", rows=1):
            yield found


def completed(line: str, address: str = "", offered_by: str = "fish") -> list[str]:
    """What the shell is offered at the end of this command line; each offer is a line."""
    words = line.split(" ")
    environment = {
        "_TRANSFERQUEUE_COMPLETE": f"complete_{offered_by}",
        "_TYPER_COMPLETE_ARGS": line,
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    if address:
        environment["TRANSFERQUEUE_ADDRESS"] = address
    done = run(environment=environment)
    assert done.stderr == ""
    return [offer for offer in done.stdout.split("\n") if offer]


def test_commands(queue: tq.Queue) -> None:
    assert completed("transferqueue ins", offered_by="bash") == ["inspect"]


def test_tables_of_the_server_that_the_environment_names(queue: tq.Queue) -> None:
    assert completed("transferqueue inspect r", queue.address, "bash") == ["rewards", "rollouts"]
    assert completed("transferqueue doctor --table s", queue.address, "bash") == ["samples"]


def test_tables_of_the_server_that_the_command_line_names(queue: tq.Queue) -> None:
    assert completed(f"transferqueue inspect --address {queue.address} s", offered_by="bash") == ["samples"]


def test_rows_of_the_table_the_latest_first_with_what_happened_to_each(queue: tq.Queue) -> None:
    offers = completed("transferqueue inspect samples ", queue.address)
    assert len(offers) == completion.ROWS_SHOWN
    assert offers[:2] == ["0\tleased score", "29\tput"]
    assert completed("transferqueue inspect samples 2", queue.address, "bash")[0] == "29"


def test_pages_and_public_names() -> None:
    assert completed("transferqueue docs to", offered_by="bash") == ["tour"]
    assert "TokenBalanced" in completed("transferqueue docs Tok", offered_by="bash")


def test_nothing_where_no_server_is(tmp_path: os.PathLike[str]) -> None:
    for address in (f"ipc://{tmp_path}/none", "no address", "tcp://127.0.0.1:1"):
        assert completed("transferqueue inspect r", address) == []
        assert completed("transferqueue inspect r 1", address) == []


def test_nothing_of_a_table_that_is_not_there(queue: tq.Queue) -> None:
    assert completed("transferqueue inspect none 1", queue.address) == []


def test_a_server_that_does_not_answer_is_given_up(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "COMPLETE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(f"{tmp_path}/s")
        deaf.listen(1)
        assert completed("transferqueue inspect r", f"ipc://{tmp_path}/s") == []
