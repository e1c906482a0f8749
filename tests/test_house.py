"""What a reader must take in does not grow: folders, circles of imports, class names. The list:
``python -m tests.house``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import circles
from tests.house.measure import groups_of_messages, ledger_states, message_cases, message_checks, repeated_classes
from tests.house.source import PACKAGE, entries, folders, modules

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = {
    "entries in the largest folder": 21,
    "public class names used more than once": 0,
    "circles of modules": 0,
    "circles among the entries of a folder": 0,
    "places in server that reach through a ledger's state": 0,
    "types of messages asked for by isinstance": 25,
    "types of messages asked for by match": 11,
}
"""What is there today. Lower a number when it falls; raise none."""


@pytest.fixture(scope="module")
def found():
    known = modules(ROOT)
    edges = circles.graph(known)
    groups = groups_of_messages(known)
    return {
        "entries in the largest folder": {str(folder): len(entries(folder)) for folder in folders(ROOT / PACKAGE)},
        "public class names used more than once": repeated_classes(known),
        "circles of modules": circles.strongly_connected(edges),
        "circles among the entries of a folder": circles.within_folders(edges),
        "places in server that reach through a ledger's state": [
            place for one in known.values() if one.room == "server" for place in ledger_states(one)
        ],
        "types of messages asked for by isinstance": [
            place for one in known.values() for place in message_checks(one, groups)
        ],
        "types of messages asked for by match": [place for one in known.values() for place in message_cases(one)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", BOUNDS)
def test_the_house_does_not_grow(found, what):
    figures = found[what]
    count = max(figures.values()) if what.startswith("entries") else len(figures)
    assert count <= BOUNDS[what], f"{what}: {count}; at most {BOUNDS[what]}: {figures}"


def test_circles_are_found_by_modules_and_by_folders():
    edges = {
        "p": ["p.a.x"],
        "p.a": [],
        "p.a.x": ["p.b.y"],
        "p.a.z": [],
        "p.b.y": ["p.a.z"],
        "p.c": ["p.d"],
        "p.d": ["p.c"],
    }
    assert circles.strongly_connected(edges) == [["p.c", "p.d"]]
    assert circles.within_folders(edges) == [["p.a", "p.b"], ["p.c", "p.d"]]
    assert circles.imports_between(edges, ["p.a", "p.b"]) == ["p.a.x > p.b.y", "p.b.y > p.a.z"]
    assert circles.shortest({"a": ["b", "c"], "b": ["c"], "c": ["a"]}, ["a", "b", "c"]) == ["a", "c"]


@pytest.mark.slow
def test_a_trace_passes_through_client_server_and_ledger():
    command = [sys.executable, "-m", "tests.house", "trace", "--json"]
    traced = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    for operation, functions in json.loads(traced.stdout).items():
        rooms = {function.split("/")[1] for function in functions}
        assert {"client", "server", "ledger", "wire"} <= rooms, operation


THE_INCUMBENTS = "adapters/transfer_queue"
"""What is below it has the names of the package that it stands for."""


def test_the_map_in_architecture_names_every_folder():
    page = (ROOT / "docs/contribute/architecture.md").read_text()
    named = re.findall(r"^\| `([a-z_/]+/)` \|", page, re.MULTILINE)
    there = {
        f"{path.parent.relative_to(ROOT)}/"
        for room in ("transferqueue", "adapters", "workflows")
        for path in (ROOT / room).rglob("*.py")
        if not str(path.parent.relative_to(ROOT)).startswith((f"{THE_INCUMBENTS}/", f"{THE_INCUMBENTS}_path"))
    }
    assert sorted(named) == sorted(there)
