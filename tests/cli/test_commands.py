"""The commands as people use them: a served queue, and what top, inspect and doctor say of it."""

import json
import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.cli.deployment import ANSWER_S, PROGRAM, Served, run, run_as_a_program, served
from transferqueue.cli import app, connection
from transferqueue.observe.figure_table import FigureTable, figures_channel
from transferqueue.workflows.dispatch.channels import publish

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def rollouts(deployment: Served) -> Iterator[tq.Table]:
    """Two groups of four: three members of the first are leased by `rollout-5`, one member of the second has no
    reward."""
    with tq.connect(deployment.address, label="maker") as queue:
        table = queue.create_table(
            "rollouts",
            tasks=[
                tq.Task("reward", needs=["response_ids"], gives=["rewards"]),
                tq.Task("train", needs=["response_ids", "rewards"], groups=tq.Complete()),
            ],
            limits=tq.Limits(rows=4096, bytes="64MiB"),
            pacing=tq.Pacing("train", batch_rows=4, depth=1, max_staleness=1),
        )
        yield table


@pytest.fixture(scope="module")
def rows(rollouts: tq.Table) -> np.ndarray:
    return rollouts.put(
        response_ids=[np.arange(n, dtype=np.int64) for n in range(1, 9)],
        group_id=np.repeat([1, 2], 4),
        group_size=4,
        ordinal=np.tile(np.arange(4), 2),
        policy_version=0,
        key=[f"gsm8k/{n}" for n in range(8)],
        tokens=np.arange(1, 9),
    )


@pytest.fixture(scope="module")
def stalled(deployment: Served, rollouts: tq.Table, rows: np.ndarray) -> Iterator[tq.Batch]:
    """All rewards are in but one of the second group; the first group is leased by a worker that does nothing."""
    rollouts.update(rows[:7], rewards=np.ones(7, np.float32))
    with tq.connect(deployment.address, label="rollout-5") as worker:
        yield worker.table("rollouts").lease("train", groups=1, timeout_s=5)


def test_top_counts_rows_of_each_task(deployment: Served, stalled: tq.Batch) -> None:
    frame = deployment.json("top", "--once", "--interval", "0.05")
    assert frame["address"] == deployment.address
    table = frame["stats"]["tables"]["rollouts"]
    assert (table["rows_put"], table["rows_live"], table["rows_limit"]) == (8, 8, 4096)
    assert {name: table["tasks"]["train"][name] for name in ("pending", "held", "ready", "leased", "done")} == {
        "pending": 1,
        "held": 3,
        "ready": 0,
        "leased": 4,
        "done": 0,
    }
    assert frame["rates"]["rollouts"]["put_s"] == 0.0
    assert frame["interval_s"] > 0
    assert frame["stats"]["sessions"] == 3


@pytest.mark.parametrize("columns", [80, 120])
def test_top_prints_a_frame_that_fits(deployment: Served, stalled: tq.Batch, columns: int) -> None:
    done = deployment.run("top", "--once", "--interval", "0.05", columns=columns)
    assert done.returncode == 0
    assert done.stderr == ""
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert "rollouts · 8 of 4,096 rows" in done.stdout


def test_inspect_lists_tables(deployment: Served, stalled: tq.Batch) -> None:
    lines = deployment.run("inspect").stdout.splitlines()
    assert lines[1].split()[:4] == ["rollouts", "8", "8", "0"]


def test_inspect_shows_the_terms_of_a_table(deployment: Served, stalled: tq.Batch) -> None:
    text = deployment.run("inspect", "rollouts", columns=120).stdout
    assert "train takes 4 rows a step, production runs at most 1 batch ahead" in text
    assert "train takes groups: Complete" in text
    fields = {field["name"]: field for field in deployment.json("inspect", "rollouts")["fields"]}
    assert fields["response_ids"]["type"] == "int64[None]"
    assert fields["rewards"]["given_by"] == ["reward"]


def test_inspect_tells_a_rows_whole_life(deployment: Served, stalled: tq.Batch, rows: np.ndarray) -> None:
    life = deployment.json("inspect", "rollouts", str(rows[0]))
    assert (life["state"], life["key"], life["group_id"], life["ordinal"]) == ("live", "gsm8k/0", 1, 0)
    assert life["fields"]["rewards"] | {"set": True, "inline": True, "value": 1.0} == life["fields"]["rewards"]
    assert life["tasks"]["train"]["state"] == "leased"
    assert life["tasks"]["reward"]["state"] == "ready"
    assert [event["what"] for event in life["events"]][:1] == ["put"]
    text = deployment.run("inspect", "rollouts", "--key", "gsm8k/0", columns=120).stdout
    assert f"row {rows[0]} of rollouts · live · put " in text
    assert "by maker" in text
    assert "by rollout-5" in text


@pytest.fixture
def trainer(deployment: Served, stalled: tq.Batch) -> Iterator[None]:
    """Waits at the server for three whole groups, which will not come."""
    with tq.connect(deployment.address, label="trainer") as queue:
        waiting = threading.Thread(target=_wait_for_groups, args=(queue.table("rollouts"),))
        waiting.start()
        while not queue.stats().waiting:  # each look is a round trip: by the second the lease has arrived
            pass
        yield
        queue.close()
        waiting.join()


def _wait_for_groups(table: tq.Table) -> None:
    with pytest.raises(tq.Disconnected):
        table.lease("train", groups=3, timeout_s=60)


@pytest.mark.usefixtures("trainer")
def test_doctor_begins_with_the_verdict_and_lists_who_waits_for_what(deployment: Served) -> None:
    done = deployment.run("doctor", deployment.address, "--patience", "0", columns=400)
    assert done.returncode == 1
    assert done.stdout.startswith("✗ rollouts/reward: 8 rows ready, no worker connected; start one\n")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  … task") and "waits for 3" in line]
    assert line.startswith('  … task "train" of table "rollouts" waits for 3 complete groups: ')
    assert '1 group is leased for "train" by rollout-5' in line
    assert '1 row lacks "rewards" (given by "reward": 1 ready and not leased' in line
    assert "(trainer has waited " in line
    found = json.loads(deployment.run("doctor", "--patience", "0", "--json").stdout)
    assert found["verdict"]["short"] == "reward: no worker"
    assert [one["task"] for one in found["stages"]["rollouts"]] == ["", "reward", "train"]


@pytest.mark.usefixtures("trainer")
def test_doctor_is_patient(deployment: Served) -> None:
    done = deployment.run("doctor", deployment.address, "--patience", "3600")
    assert done.returncode == 0
    assert done.stdout.startswith("… ")


def test_doctor_ends_with_what_a_run_warns_of() -> None:
    died = "rollout-0 ended with exit code 1; its first exception was OSError: no offset"
    figures = FigureTable(title="Training", columns=("figure",), lines=(), warnings=(died,))
    with served() as own, tq.connect(own.address) as queue:
        publish(queue, figures_channel("rollouts", "run"), figures)
        done = own.run("doctor", own.address, columns=400)
    assert done.stdout.endswith(f"\nTraining: {died}\n"), done


@pytest.mark.usefixtures("trainer")
def test_top_says_who_waits_for_what(deployment: Served) -> None:
    text = deployment.run("top", "--once", "--interval", "0.05", columns=120).stdout
    assert "  trainer · lease rollouts/train · " in text
    (wait,) = deployment.json("top", "--once", "--interval", "0.05")["stats"]["waiting"]
    assert (wait["label"], wait["request"], wait["task"]) == ("trainer", "Lease", "train")


def test_doctor_without_an_address_explains_the_server_that_the_environment_names(
    deployment: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_ADDRESS", deployment.address)
    assert app.run(["doctor", "--patience", "3600"]) == 0
    shown = capsys.readouterr().out
    assert "shared memory" not in shown
    assert "rollouts" in shown


def test_doctor_where_no_server_runs_names_the_check_of_the_machine(tmp_path: Path) -> None:
    done = run("doctor", environment={"TRANSFERQUEUE_RUNTIME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (3, "")
    assert "no server runs at" in done.stderr
    assert "transferqueue doctor --machine" in done.stderr


def test_doctor_of_this_machine(deployment: Served) -> None:
    sections = deployment.json("doctor", "--machine")
    found = {check["subject"]: check["verdict"] for section in sections for check in section["checks"]}
    assert found["runtime directory"] == "ok"
    assert found["pidfd"] == "ok"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--arena-bytes", "1GiB"), "--arena-bytes and --runtime are of the machine; add --machine"),
        (("--machine", "--table", "t"), "--machine checks this machine, and 't' names a queue"),
        (("--machine", "ipc:///tmp/x"), "--machine checks this machine, and 'ipc:///tmp/x' names a queue"),
    ],
)
def test_options_of_the_machine_and_of_a_queue_do_not_mix(words: tuple[str, ...], told: str) -> None:
    done = run("doctor", *words)
    assert done.returncode == 2
    assert told in done.stderr


def test_names_that_do_not_exist_list_those_that_do(deployment: Served, stalled: tq.Batch) -> None:
    done = deployment.run("inspect", "rollout")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: table "rollout" does not exist; there are rollouts\n'
    assert deployment.run("inspect", "rollouts", "--key", "nobody").returncode == 2
    assert deployment.run("inspect", "rollouts", "99999").returncode == 2


def test_a_row_and_a_key_at_once_are_refused(deployment: Served) -> None:
    done = deployment.run("inspect", "rollouts", "1", "--key", "x")
    assert (done.returncode, done.stderr) == (2, "error: row 1 and key 'x' both name a row; give one of them\n")


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.3)
    started = time.monotonic()
    done = run("top", "--once", "--address", "tcp://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 15


def test_a_text_that_is_no_address() -> None:
    """The whole way: a process of its own, its exit code and its streams."""
    done = run_as_a_program("top", "--address", "localhost")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: address 'localhost' has an unknown form")


def test_a_second_server_on_one_address(deployment: Served) -> None:
    done = deployment.run("serve")
    assert (done.returncode, done.stdout) == (2, "")
    assert deployment.address in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_runtime_and_an_ipc_address_at_once_are_refused() -> None:
    done = run("serve", "--runtime", "/tmp/a", "--address", "ipc:///tmp/b/control.sock")
    assert done.returncode == 2
    assert "both name a directory" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_server_stops_cleanly(how: signal.Signals) -> None:
    with served("--tcp", "127.0.0.1:0") as found:
        assert found.run("inspect").stdout == "no tables yet\n"
        assert found.stop(how) == 0
        assert list(found.runtime.rglob("*")) == []


def test_top_lives_on_a_terminal_until_q(deployment: Served, stalled: tq.Batch) -> None:
    screen, terminal = pty.openpty()
    command = [*PROGRAM, "top", deployment.address, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        _read_until(screen, b"rollouts")
        os.write(screen, b"q")
        _drain(screen)
        assert process.wait(ANSWER_S) == 0
    os.close(screen)


def test_top_prints_frames_where_there_is_no_terminal(deployment: Served, stalled: tq.Batch) -> None:
    command = [*PROGRAM, "top", deployment.address, "--interval", "0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        _read_until(process.stdout.fileno(), b"rollouts")
        _read_until(process.stdout.fileno(), b"rollouts")
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 0


def _read_until(screen: int, expected: bytes) -> None:
    seen = b""
    while expected not in seen:
        assert select.select([screen], [], [], ANSWER_S)[0], seen
        seen += os.read(screen, 65_536)


def _drain(screen: int) -> None:
    """Read what a terminal would, until the program closes it."""
    try:
        while os.read(screen, 65_536):
            pass
    except OSError:  # EIO: no one has the other end any more
        return


def test_a_durable_server_needs_a_directory_and_only_that_one_does(tmp_path: Path) -> None:
    address = ("--address", f"ipc://{tmp_path}/a.sock")
    for words, told in [
        (("--durability", "process"), "durability process and state None do not go together: memory keeps nothing"),
        (("--state", str(tmp_path / "s")), "durability memory and state '"),
        (("--durability", "tape"), "durability 'tape' is unknown; choose one of memory, process, disk"),
        (("--durability", "disk", "--state", str(tmp_path / "s"), "--tcp", "127.0.0.1:0"), "cannot listen at port 0"),
    ]:
        done = run("serve", *address, *words)
        assert done.returncode == 2
        assert told in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_supervised_server_goes_on_and_stops(tmp_path: Path) -> None:
    with served("--durability", "process", "--state", str(tmp_path / "s"), "--supervise") as found:
        assert found.stop() == 0
    assert (tmp_path / "s" / "journal.sqlite").exists()


@pytest.mark.parametrize("words", [(), ("--step", "2", "--until", "2")])
def test_a_replay_needs_one_step(words: tuple[str, ...]) -> None:
    done = run("replay", "runs/none", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: give one of --step K, to compute step K again, and --until K")


def test_a_prompt_and_json_do_not_share_the_output() -> None:
    done = run("replay", "runs/none", "--until", "2", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "leave one of them out" in done.stderr


def test_names_that_contradict_each_other_are_refused_before_any_server_is_asked() -> None:
    done = run("inspect", "--key", "k", "--address", "ipc:///nowhere/socket")
    assert (done.returncode, done.stderr) == (
        2,
        "error: key 'k' names a row of no table; name the table: inspect TABLE --key k\n",
    )
