"""A supervised server comes back; one that cannot is given up; one that was stopped stays stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transferqueue.errors import DiskFailed, JournalFailed, OutOfMemory, UsageError
from transferqueue.limits import DISK_RETRY_S, DISK_RETRY_S_MAX, RESTARTS_MAX
from transferqueue.server.process.supervisor import (
    EXIT_AGAIN,
    EXIT_DISK,
    EXIT_REPORTED,
    EXIT_WRONG_CALL,
    disk_pause_s,
    exit_code,
)

PROGRAM = """
import os, signal, sys
from pathlib import Path
from transferqueue.errors import Corruption, DiskFailed, JournalFailed, UsageError
from transferqueue.server.process.supervisor import supervise
lives = Path(sys.argv[2])
def run():
    lives.open("a").write("x")
    print("alive", flush=True)
    {body}
sys.exit(supervise(run))
"""


def supervised(tmp_path, body):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body), "", str(tmp_path / "lives")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lives(tmp_path):
    return len((tmp_path / "lives").read_text())


def child_of(process):
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def error(made):
    raise made


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (lambda: None, 0),
        (lambda: error(UsageError("wrong")), EXIT_WRONG_CALL),
        (lambda: error(OutOfMemory("small")), EXIT_REPORTED),
        (lambda: error(JournalFailed("locked")), EXIT_AGAIN),
        (lambda: error(DiskFailed("full")), EXIT_DISK),
        (lambda: error(SystemExit(3)), 3),
        (lambda: error(SystemExit()), 0),
    ],
)
def test_what_ended_a_server_is_its_exit_code(run, code, capsys):
    assert exit_code(run) == code
    told = capsys.readouterr().err
    assert told == "" or told.startswith("transferqueue: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("return", 0, ""),
        ("raise UsageError('not like this')", EXIT_WRONG_CALL, "transferqueue: not like this"),
        ("raise Corruption('torn')", EXIT_REPORTED, "transferqueue: torn"),
    ],
)
def test_a_server_that_told_why_it_ended_is_not_started_again(tmp_path, body, code, told):
    process = supervised(tmp_path, body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert told in stderr
    assert lives(tmp_path) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL % 256,
            "the server crashed (exit code -9); the supervisor starts it again",
        ),
        ("raise ZeroDivisionError", 70, "ZeroDivisionError"),
        ("raise JournalFailed('disk full')", EXIT_AGAIN, "disk full"),
    ],
)
def test_a_server_that_crashes_for_ever_is_given_up(tmp_path, body, code, told):
    process = supervised(tmp_path, body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert told in stderr
    assert "is not started again" in stderr.replace("\n", " ")
    assert lives(tmp_path) == RESTARTS_MAX + 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_and_its_supervisor(tmp_path, number):
    process = supervised(tmp_path, "signal.pause()")
    assert process.stdout.readline() == "alive\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM % 256
    assert "starts it again" not in stderr
    assert lives(tmp_path) == 1


@pytest.mark.slow
def test_a_server_that_was_killed_comes_back(tmp_path):
    process = supervised(tmp_path, "signal.pause()")
    for _ in range(3):
        assert process.stdout.readline() == "alive\n"
        os.kill(child_of(process), signal.SIGKILL)
    assert process.stdout.readline() == "alive\n"
    process.terminate()
    process.communicate(timeout=60)
    assert lives(tmp_path) == 4


def test_a_disk_that_stays_full_is_tried_ever_more_rarely_and_a_server_that_served_begins_anew():
    pauses = [0.0]
    while pauses[-1] < DISK_RETRY_S_MAX:
        pauses.append(disk_pause_s(ran_s=0.0 if len(pauses) > 1 else 1.0, paused_s=pauses[-1]))
    assert pauses == [0, 1, 2, 4, 8, 16, 30]
    assert [disk_pause_s(ran_s=paused + 1, paused_s=paused) for paused in pauses] == [DISK_RETRY_S] * len(pauses)


@pytest.mark.slow
def test_a_server_whose_disk_fails_is_started_again_after_ever_longer_pauses(tmp_path):
    process = supervised(tmp_path, "raise DiskFailed('the disk is full')")
    for pause in ("1", "2"):
        assert process.stderr.readline() == "transferqueue: the disk is full\n"
        assert f"the server's disk failed; the supervisor starts it again in {pause} s" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert lives(tmp_path) == 2
