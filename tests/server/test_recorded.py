"""A state directory and a snapshot that an earlier build wrote: read as they were, or refused by a text that names who
wrote them."""

import subprocess
import sys

import pytest

from tests.server import recorded
from transferqueue.errors import UsageError

TOLD = {
    "ids": [[4]],
    "note": ["ü"],
    "balanced": True,
    "rows": {"rows_put": 3, "rows_live": 1, "rows_done": 1, "dropped": {"bad": 1}},
}


@pytest.mark.slow
def test_a_server_goes_on_from_a_recorded_state_directory_or_says_who_wrote_it(tmp_path):
    state = recorded.unpack(recorded.STATE, tmp_path / "state")
    try:
        with recorded.serving(tmp_path / "run", state) as queue:
            assert recorded.told(queue) == TOLD, recorded.REMEDY
            assert queue.table("rollouts").find("k2").tolist() == [1]
    except recorded.NotServed as error:
        said = str(error)
    else:
        return
    # Its classes are another version's, and that is refused. Where it is meant: python -m tests.server.recorded
    assert "start that version, drain its tables or take a snapshot there" in said
    assert "0.1.0" in said


@pytest.mark.slow
def test_a_recorded_snapshot_is_restored(tmp_path):
    recorded.unpack(recorded.SNAPSHOT, tmp_path / "snapshots")
    with recorded.serving(tmp_path / "run", None, tmp_path / "snapshots") as queue:
        queue.restore("kept")
        found = recorded.told(queue)
        assert (found["ids"], found["note"], found["balanced"]) == (TOLD["ids"], TOLD["note"], True), recorded.REMEDY
        assert queue.table("rollouts").find("k2").tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_snapshot_of_an_earlier_format_is_refused(number, tmp_path):
    recorded.unpack(recorded.HERE / f"snapshot-{number}.tar.xz", tmp_path / "snapshots")
    with recorded.serving(tmp_path / "run", None, tmp_path / "snapshots") as queue:
        with pytest.raises(
            UsageError, match=f"has format {number}; this version reads 3: restore it with the version of"
        ):
            queue.restore("kept")
        assert queue.tables() == []


@pytest.mark.slow
def test_a_state_directory_of_a_later_format_is_refused(tmp_path):
    state = recorded.unpack(recorded.STATE, tmp_path / "state")
    later = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA user_version=99').connection.commit()"
    subprocess.run([sys.executable, "-c", later, str(state / "journal.sqlite")], check=True)
    with (
        pytest.raises(recorded.NotServed, match="has format 99, this version reads 2"),
        recorded.serving(tmp_path / "run", state),
    ):
        pass
