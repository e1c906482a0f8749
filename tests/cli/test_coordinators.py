"""Commands on a deployment of several coordinators, named by the addresses of all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import transferqueue as tq
from tests.cli.deployment import Served, run, served
from transferqueue.cli import connection
from transferqueue.wire.home_coordinator import home_coordinator

pytestmark = pytest.mark.slow
TABLES = ("b", "c")  # at 1/2 and at 2/2, see tests/test_seat.py


@pytest.fixture(scope="module")
def two() -> Iterator[list[Served]]:
    with served("--coordinator", "rl:1/2") as first, served("--coordinator", "rl:2/2") as second:
        with tq.connect([first.address, second.address]) as queue:
            for name in TABLES:
                queue.create_table(name, tasks=[tq.Task("train", needs=["x"])]).put(x=[[1], [2]])
        yield [first, second]


@pytest.fixture
def address(two: list[Served]) -> str:
    return ",".join(one.address for one in two)


def test_top_shows_them_one_beneath_the_other(two: list[Served], address: str) -> None:
    text = run("top", address, "--once", "--interval", "0.05").stdout
    places = [text.index(part) for part in (two[0].address, "b · 2 of", two[1].address, "c · 2 of")]
    assert [home_coordinator(name, 2) for name in TABLES] == [1, 2]
    assert places == sorted(places)
    decoder, frames, text = json.JSONDecoder(), [], run("top", address, "--once", "--json", "--interval", "0.05").stdout
    while text.strip():
        frame, end = decoder.raw_decode(text.strip())
        frames.append(frame)
        text = text.strip()[end:]
    assert [frame["address"] for frame in frames] == [one.address for one in two]
    assert [list(frame["stats"]["tables"]) for frame in frames] == [["b"], ["c"]]


def test_inspect_and_doctor_know_the_tables_of_all(two: list[Served], address: str) -> None:
    assert list(json.loads(run("inspect", "--address", address, "--json").stdout)) == list(TABLES)
    for name in TABLES:
        terms = json.loads(run("inspect", name, "--address", address, "--json").stdout)
        assert terms["name"] == name
        assert json.loads(run("inspect", name, "0", "--address", address, "--json").stdout)["row"] == 0
    assert list(json.loads(run("doctor", address, "--json").stdout)) == [one.address for one in two]
    of_one, of_all = run("doctor", address, "--table", "b").stdout, run("doctor", address).stdout
    assert "b/train: 2 rows ready, no worker connected; start one" in of_one
    assert of_all.startswith(two[0].address)
    assert of_all.count("/train: 2 rows ready, no worker connected; start one") == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("shard",), "a shard adds its memory to one coordinator, and ipc://"),
        (("shard", "drain", "1"), "a shard is of one coordinator, and ipc://"),
    ],
)
def test_what_is_for_one_alone_says_so(address: str, words: tuple[str, ...], why: str) -> None:
    option = "--join" if words == ("shard",) else "--address"
    done = run(*words, option, address)
    assert done.returncode != 0
    assert why in " ".join(done.stderr.split())


def test_a_snapshot_of_all_prints_where_each_part_is(address: str, tmp_path: Path) -> None:
    path = f"all-{tmp_path.name}"
    done = run("snapshot", path, "--address", address)
    parts = [Path(line) for line in done.stdout.splitlines()]
    try:
        assert [part.parts[-3:] for part in parts] == [(path, f"{number}-of-2", "000001") for number in (1, 2)]
        refused = run("restore", path, "--address", address)
        assert refused.returncode != 0
        assert "a snapshot is restored into an empty deployment; this one has b" in " ".join(refused.stderr.split())
    finally:
        for part in parts:
            shutil.rmtree(part.parents[1], ignore_errors=True)


def test_a_seat_that_is_none() -> None:
    done = run("serve", "--coordinator", "3/2")
    assert done.returncode != 0
    assert "coordinator 3/2 is no seat" in done.stderr


def test_one_that_is_gone_is_told_of_and_the_other_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.3)
    with served("--coordinator", "1/2") as first, served("--coordinator", "2/2") as second:
        with tq.connect([first.address, second.address]) as queue:
            first.stop()
            found = queue.doctor().coordinators
            assert found[first.address].unreachable
            assert found[second.address].tables == {}
        done = run("doctor", f"{first.address},{second.address}")
        assert done.returncode != 0
        assert f"no server runs at {first.address}" in " ".join(done.stderr.split())
