"""Plug-ins by name: ours, and those of other packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from transferqueue.errors import UsageError
from transferqueue.lazy import Plugins
from transferqueue.transport.bulk.carriers import CARRIERS, STREAM, chosen_carrier


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package that registers carriers."""
    (tmp_path / "other_carriers-1.dist-info").mkdir()
    (tmp_path / "other_carriers-1.dist-info" / "METADATA").write_text("Name: other-carriers\nVersion: 1\n")
    (tmp_path / "other_carriers-1.dist-info" / "entry_points.txt").write_text(
        "[transferqueue.carriers]\npigeon = other_carriers:Pigeon\nnixl = other_carriers:Pigeon\n"
        "lost = no_such_module:Lost\n"
    )
    (tmp_path / "other_carriers.py").write_text(
        "class Pigeon:\n    def __init__(self, setting):\n        self.setting = setting\n"
        "    def __str__(self):\n        return self.setting\n"
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
