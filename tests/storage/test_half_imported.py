"""While one thread imports torch, others put plain values: a module counts from when it is whole."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.storage.elements.dtypes import imported_module, imported_torch

HALF = """
import builtins
builtins.half_began.set()
assert builtins.half_gate.wait(20)
class Tensor: ...
"""


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A package `torch` whose import has begun in another thread, and goes on when the event is set."""
    import builtins

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(HALF)
    began, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(builtins, "half_began", began, raising=False)
    monkeypatch.setattr(builtins, "half_gate", gate, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    torches = {name: module for name, module in sys.modules.items() if name == "torch" or name.startswith("torch.")}
    for name in torches:
        del sys.modules[name]
    importer = threading.Thread(target=importlib.import_module, args=("torch",))
    importer.start()
    try:
        assert began.wait(20)
        yield gate
    finally:
        gate.set()
        importer.join()
        sys.modules.pop("torch", None)
        sys.modules.update(torches)


PLAIN: list[Any] = [
    np.arange(2),
    [1, 2],
    [np.arange(2), np.arange(3)],
    ["a", "b"],
    [{"a": 1}, [2]],
    memoryview(np.arange(2)),
]


def test_plain_values_are_put_while_another_thread_imports_torch(half: threading.Event) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=[tq.Task("work", needs=["c0"])])
        assert "torch" in sys.modules
        assert imported_torch() is None
        table.put(**{f"c{number}": value for number, value in enumerate(PLAIN)})
        with table.lease("work", rows=2) as batch:
            assert batch["c0"].numpy().tolist() == [0, 1]
            batch.ack(done=np.ones(2))
        assert table.audit().rows_done == 2


def test_a_module_counts_from_when_it_is_whole(half: threading.Event) -> None:
    assert imported_module("torch") is None
    half.set()
    whole = importlib.import_module("torch")
    assert imported_module("torch") is whole
    assert imported_torch() is whole


def test_what_is_no_import_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = type(sys)("stub_of_a_test")
    monkeypatch.setitem(sys.modules, "stub_of_a_test", stub)
    assert imported_module("stub_of_a_test") is stub
    monkeypatch.setitem(sys.modules, "stub_of_a_test", None)
    assert imported_module("stub_of_a_test") is None
