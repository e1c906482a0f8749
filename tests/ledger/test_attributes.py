"""An attribute of a row, of a row in a task or of a group is declared in one line: a copy of the package with one line
more stores it in images, in snapshots and in their files, refuses values of foreign files that are out of range, and
images of the package without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import transferqueue
from transferqueue.ledger.persistence.image import fingerprint
from transferqueue.ledger.rows import groups, row_state
from transferqueue.ledger.tasks import group_task, task_state

PACKAGE = Path(transferqueue.__file__).parent
MORE = 'Attribute("novel", "i8", 3, 0, 9),\n'
NOT_COPIED = shutil.ignore_patterns("__pycache__", "adapters", "workflows")
PLACES = {
    "row": ("ledger/rows/row_state.py", '    Attribute("stamped"', "table.rows.columns"),
    "row in a task": ("ledger/tasks/task_state.py", '    Attribute("attempts"', 'table.tasks["t"].columns'),
}
PROGRAM = """
import sys
from pathlib import Path

from tests.ledger.driver import World
from transferqueue.errors import Corruption
from transferqueue.ledger import Ledger
from transferqueue.ledger.persistence.image import fingerprint
from transferqueue.policies import Task
from transferqueue.server.durability.snapshot_directory import SnapshotReader, SnapshotWriter
from transferqueue.server.durability.snapshot_files import (
    check_contents, read_contents, read_manifest, read_tables, write_contents,
)

world = World()
client = world.client()
client.create(tasks=[Task("t")])
client.put(5, inline={{"x": range(5)}})
ledger = world.ledger

def column(ledger):
    table = ledger.state.tables["t"]
    return {where}["novel"].a[:5]

assert column(ledger).tolist() == [3] * 5
column(ledger)[:] = [1, 2, 3, 4, 5]
again = Ledger.from_image(ledger.image())
assert column(again).tolist() == [1, 2, 3, 4, 5]
for value in (0, 10):
    column(ledger)[0] = value
    writer = SnapshotWriter(Path(sys.argv[1]), lambda nbytes: None)
    manifest = write_contents(writer, ledger.take_snapshot(3.0), None, 0.0, "test")
    reader = SnapshotReader.open(writer.publish(manifest, 9), lambda nbytes: None)
    manifest = read_manifest(reader)
    tables = read_tables(reader, manifest)
    try:
        check_contents(manifest, tables)
    except Corruption as error:
        assert value == 10 and "has novel 10, which is out of range" in str(error), error
        continue
    assert value == 0
    other = Ledger()
    other.restore_snapshot(read_contents(reader, manifest, tables, {{}}), 5.0)
    assert column(other).tolist() == [0, 2, 3, 4, 5]
assert fingerprint().hex() != sys.argv[2]
print("stored")
"""


@pytest.mark.slow
@pytest.mark.parametrize("of", PLACES)
def test_one_line_stores_an_attribute_wherever_a_row_is_stored(tmp_path: Path, of: str) -> None:
    module, line, where = PLACES[of]
    shutil.copytree(PACKAGE, tmp_path / "transferqueue", ignore=NOT_COPIED)
    path = tmp_path / "transferqueue" / module
    source = path.read_text()
    assert source.count(line) == 1
    path.write_text(source.replace(line, f"    {MORE}{line}"))
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(where=where), str(tmp_path / "snapshots"), fingerprint().hex()],
        cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.stdout == "stored\n", made.stderr


def test_each_attribute_fits_its_own_range() -> None:
    for one in (
        *row_state.ATTRIBUTES,
        *task_state.STORED,
        *groups.ATTRIBUTES.values(),
        *group_task.ATTRIBUTES.values(),
    ):
        assert one.name
        if one.codes:
            assert one.highest == len(one.codes) - 1
