"""A newer package has one selector more, under the same protocol: the older one, client or server, names it, those that
it has, and the package to install; and everything else goes on between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, get_args

import pytest

import transferqueue as tq
from tests.markdown import ROOT
from transferqueue.errors import VersionMismatch, listing
from transferqueue.policies import Selector
from transferqueue.wire.versions import VERSION

NEWER: Final = "0.99.0"
ADDED: Final = (
    ("policies.py", "RowOrder = ", "class OfNewerPackage(_Policy):\n    pass\n\n\nRowOrder = OfNewerPackage | "),
    ("ledger/tasks/selectors.py", "    Fifo,\n", "    Fifo,\n    OfNewerPackage,\n"),
    (
        "ledger/tasks/selectors.py",
        "    Fifo: (",
        "    OfNewerPackage: (lambda units: units.tokens, frozenset()),\n    Fifo: (",
    ),
    ("wire/versions.py", f'VERSION: Final = "{VERSION}"', f'VERSION: Final = "{NEWER}"'),
    ("__init__.py", " Selector ", " Selector OfNewerPackage "),
)
"""What CONTRIBUTING says of a selector: the first text becomes the second in a file of the package."""
CLIENT: Final = """
import sys, transferqueue as tq
with tq.connect(sys.argv[1]) as queue:
    table = queue.create_table("shared", tasks=[tq.Task("a", needs=["x"])])
    for create in (
        lambda: queue.create_table("t", tasks=[tq.Task("a", needs=["x"], selector=tq.OfNewerPackage())]),
        lambda: table.add_task(tq.Task("b", needs=["x"], selector=tq.OfNewerPackage())),
    ):
        try:
            create()
        except tq.ProtocolError as error:
            print(type(error).__name__, error)
    table.put(x=[1, 2])
    print(queue.tables())
"""
SERVER: Final = """
import sys, transferqueue as tq
with tq.connect("embedded") as queue:
    queue.create_table("t", tasks=[tq.Task("a", needs=["x"], selector=tq.OfNewerPackage())])
    queue.create_table("fifo", tasks=[tq.Task("a", needs=["x"])])
    print(queue.address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a newer package."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(ROOT / "transferqueue", folder / "transferqueue", symlinks=True)
    for name, old, new in ADDED:
        path = folder / "transferqueue" / name
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
    return folder


@contextmanager
def running(folder: Path, script: str, *args: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """Standard input and output of a script of the package in a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield process.stdin, process.stdout
        finally:
            process.stdin.close()
    assert process.returncode == 0


def test_a_newer_client_is_told_which_package_the_server_needs(newer: Path) -> None:
    said = (
        f"VersionMismatch the server's package {VERSION} does not know 'OfNewerPackage'; it has "
        f"{listing(kind.__name__ for kind in get_args(Selector))}: use one of these, or install the client's package "
        f"{NEWER}, or a later one, for the server"
    )
    with tq.connect("embedded") as queue:
        with running(newer, CLIENT, queue.address) as (_, out):
            assert out.read().splitlines() == [said, said, "['shared']"]
        assert len(queue.table("shared").read()) == 2


def test_an_older_client_names_what_the_newer_server_sent_and_works_on(newer: Path) -> None:
    with running(newer, SERVER) as (_, out), tq.connect(out.readline().strip()) as queue:
        fifo = queue.table("fifo")
        for _ in range(2):
            with pytest.raises(
                VersionMismatch,
                match=f"the client's package {VERSION} does not know 'OfNewerPackage'; it has Fifo, .*: install the "
                f"server's package {NEWER}, or a later one, for the client",
            ):
                queue.table("t")
        fifo.put(x=[1, 2])
        with fifo.lease("a", rows=2) as batch:
            assert batch["x"].list() == [1, 2]
        assert queue.tables() == ["fifo", "t"]
