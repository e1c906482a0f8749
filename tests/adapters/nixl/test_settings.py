"""Where the setting `--bytes nixl` is refused, and where it changes nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.server.test_without_effect import serve_for_a_moment
from transferqueue.errors import UsageError
from transferqueue.observe.machine import network
from transferqueue.server.process.serve import serve


def test_it_is_refused_where_there_is_no_tcp_address(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^bytes='nixl' refused: clients at tcp addresses use it.*; give --tcp too"):
        serve(f"ipc://{tmp_path}/q.sock", on_ready=print, carrier="nixl")
    assert not list(tmp_path.iterdir())


def test_what_the_environment_says_is_for_those_with_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_BYTES", "nixl")
    serve_for_a_moment(tmp_path)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_nixl_that_cannot_be_loaded_is_to_mend_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl-1.5.1.dist-info").mkdir()
    (tmp_path / "nixl-1.5.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl\nVersion: 1.5.1\n")
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    api = tmp_path / "nixl" / "_api.py"
    api.write_text("raise OSError('libucp.so.0: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    check = network.carrier("nixl:cma")
    assert (check.verdict, check.found) == (
        "fail",
        "nixl:cma: nixl 1.5.1 cannot be loaded: nixl: OSError: libucp.so.0: cannot open shared object file",
    )
    api.write_text("")
    assert network.carrier("nixl:cma").verdict == "ok"
