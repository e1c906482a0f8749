"""`serve --log-level` and `--log-json`: a line for each event of a server's life, on stderr."""

import json
import logging
import socket
import subprocess
import sys

import pytest

import transferqueue as tq
from transferqueue.cli.app import run
from transferqueue.cli.connection import check_sockets
from transferqueue.cli.logs import JsonLines, TextLines, log_to_stderr
from transferqueue.errors import UsageError
from transferqueue.server.event_log import log_event


@pytest.mark.slow
def test_a_server_logs_each_event_of_its_life_as_json(tmp_path):
    address = f"ipc://{tmp_path}/queue"
    serve = [sys.executable, "-m", "transferqueue.cli", "serve", "--address", address, "--arena-bytes", "16MiB"]
    with subprocess.Popen([*serve, "--log-json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().startswith("ready ")
        with tq.connect(address, label="reward-0\x1b") as queue:
            queue.create_table("rows").seal()
            queue.drop_table("rows")
        server.terminate()
        lines = [json.loads(line) for line in server.stderr.read().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines if "event" in line]
    assert events == [
        "server_started",
        "session_opened",
        "table_created",
        "table_sealed",
        "table_dropped",
        "session_ended",
        "server_stopped",
    ]
    assert lines[1]["label"] == "reward-0\\x1b"
    assert {"time", "level", "logger", "text"} <= set(lines[0])


def test_an_event_is_one_line_of_text_with_its_values(caplog):
    with caplog.at_level(logging.INFO, "transferqueue.server"):
        log_event("session_ended", session=7, label="two words", why="\x1b[2J")
    (record,) = caplog.records
    assert record.getMessage() == 'session_ended session=7 label="two words" why=\\x1b[2J'
    assert TextLines().format(record).endswith("INFO transferqueue.server: " + record.getMessage())
    assert json.loads(JsonLines().format(record))["why"] == "\\x1b[2J"


def test_an_unknown_level_is_refused():
    with pytest.raises(UsageError, match="--log-level loud is none; there are debug, info, warning, error"):
        log_to_stderr("loud", as_json=False)


@pytest.mark.parametrize("command", ["top", "inspect"])
def test_a_missing_socket_is_told_at_once(command, tmp_path, capsys, monkeypatch):
    """A wait for a socket file would be the connect's whole time limit."""
    monkeypatch.setattr("transferqueue.connect", None)
    assert run([command, "--address", f"ipc://{tmp_path}/nobody"]) == 3
    assert "there is no such socket; start one: transferqueue serve" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_socket_where_nothing_listens_is_told_at_once(kind, tmp_path, capsys, monkeypatch):
    """A server that was killed leaves its socket file."""
    monkeypatch.setattr("transferqueue.connect", None)
    with socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET) as left:
        left.bind(str(tmp_path / "q.sock") if kind == "ipc" else ("127.0.0.1", 0))
        address = f"ipc://{left.getsockname()}" if kind == "ipc" else f"tcp://127.0.0.1:{left.getsockname()[1]}"
        assert run(["top", "--once", "--address", address]) == 3
    assert "nothing listens there; start one: transferqueue serve" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_waited_for(tmp_path):
    with socket.socket(socket.AF_UNIX) as slow:
        slow.bind(str(tmp_path / "q.sock"))
        slow.listen()
        check_sockets(f"ipc://{tmp_path}/q.sock")
        with pytest.raises(tq.Unreachable, match="a process listens there and does not answer"):
            tq.connect(f"ipc://{tmp_path}/q.sock", timeout_s=0.1)
