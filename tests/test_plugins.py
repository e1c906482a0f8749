"""Plug-ins by name: ours, and those of other packages, which register carriers and selectors."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.server.lives import Life, again
from transferqueue.errors import Corruption, NotFound, UsageError
from transferqueue.lazy import Plugins
from transferqueue.policies import Plugin, Task
from transferqueue.schema import Field
from transferqueue.server.durability_level import Level
from transferqueue.transport.bulk.carriers import CARRIERS, STREAM, chosen_carrier
from transferqueue.wire import messages as m


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package that registers carriers and selectors."""
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Name: other\nVersion: 1\n")
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text(
        "[transferqueue.carriers]\npigeon = other_plugins:Pigeon\nnixl = other_plugins:Pigeon\n"
        "lost = no_such_module:Lost\n"
        "[transferqueue.selectors]\nnearest = other_plugins:Nearest\nlost = no_such_module:Lost\n"
    )
    (tmp_path / "other_plugins.py").write_text(
        "class Pigeon:\n    def __init__(self, setting):\n        self.setting = setting\n"
        "    def __str__(self):\n        return self.setting\n"
        "class Nearest:\n    def __init__(self, options):\n        self.wanted = options['tokens']\n"
        "    def keys(self, units):\n        return abs(units.tokens - self.wanted)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("other_package")
def test_a_carrier_of_another_package_is_chosen_by_its_name() -> None:
    assert str(chosen_carrier("pigeon:grey")) == "pigeon:grey"
    assert type(chosen_carrier("nixl")).__name__ == "NixlCarrier", "a name of ours is ours"
    assert chosen_carrier(STREAM) is None
    with pytest.raises(UsageError, match=r"bytes='owl' is no carrier of columns; choose one of stream, .*pigeon"):
        chosen_carrier("owl")


@pytest.mark.usefixtures("other_package")
def test_a_plugin_that_cannot_be_imported_says_which_and_why() -> None:
    with pytest.raises(UsageError, match=r"'lost' \(no_such_module:Lost\) cannot be imported: No module named"):
        CARRIERS.load("lost")
    missing = Plugins("transferqueue.none", {"gone": "transferqueue.adapters.carriers.gone:Gone"})
    with pytest.raises(UsageError, match=r"'gone' .*cannot be imported: .*; install its requirements"):
        missing.load("gone")


def nearest(tokens: int) -> list[Task]:
    return [Task("take", needs=["x"], selector=Plugin("nearest", {"tokens": tokens}))]


@pytest.mark.usefixtures("other_package")
def test_a_selector_of_another_package_orders_the_rows_of_a_server_that_has_it() -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=nearest(20))
        table.put(x=[0, 1, 2], tokens=[5, 21, 30])
        assert table.lease("take", rows=3)["x"].list() == [1, 2, 0]
        for plugin, error, said in (
            (Plugin("nearest"), UsageError, r'"nearest" refused options=\{\} \(KeyError: .tokens.\); give others'),
            (Plugin("lost"), UsageError, r"'lost' \(no_such_module:Lost\) cannot be imported"),
            (Plugin("furthest"), NotFound, r'"furthest" is not installed on the server; it has lost, nearest'),
        ):
            with pytest.raises(error, match=said):
                table.add_task(Task("other", selector=plugin))
        assert list(table.stats().tasks) == ["take"]


@pytest.mark.usefixtures("other_package")
def test_a_restarted_server_loads_the_selectors_of_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def life() -> Life:
        return Life(tmp_path / "state", Level.PROCESS, tmp_path / "shm")

    (tmp_path / "shm").mkdir()
    first = life()
    client = first.client()
    client.ask(m.CreateTable("t", [Field("x", "int64")], nearest(20)))
    first.crash()
    with monkeypatch.context() as gone:
        gone.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
        with pytest.raises(Corruption, match=r'"nearest" is not installed on the server.* Nothing was changed'):
            life()
    second = life()
    facts = m.RowFacts(tokens=np.array([5, 21, 30], "<i8").tobytes())
    columns = m.Columns([Field("x", "int64")], inline=[m.Inline("x", bytes(24))], facts=facts)
    worker = again(second, client)
    worker.ask(m.PutRequest("t", 3, columns))
    leased = worker.ask(m.LeaseRequest("t", "take", rows=3))
    assert np.frombuffer(leased.content.rows, "<i8").tolist() == [1, 2, 0]
    second.crash()
