"""`transferqueue snapshot` and `restore`, as people use them."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import transferqueue as tq
from tests.cli.deployment import run, served

pytestmark = pytest.mark.slow


def test_a_snapshot_of_one_server_is_restored_into_another(tmp_path: Path) -> None:
    with served("--snapshots", str(tmp_path)) as first:
        with tq.connect(first.address) as queue:
            queue.create_table("t", tasks=[tq.Task("train")]).put(text=["a", "b"])
        done = run("snapshot", "run", "--keep", "3", "--address", first.address)
        assert done.stdout.strip() == str(tmp_path / "run/000001"), done.stderr
        refused = run("restore", "run", "--address", first.address)
        assert refused.returncode
        assert "this one has t" in refused.stderr
        outside = run("snapshot", "../x", "--address", first.address)
        assert outside.returncode
        assert "is outside" in outside.stderr
    with served("--snapshots", str(tmp_path)) as second:
        made = json.loads((tmp_path / "run/000001/MANIFEST.json").read_text())["about"]["made_at"]
        said = run("restore", "run", "--address", second.address).stdout.strip()
        assert said == f"{tmp_path / 'run/000001'}  made {datetime.fromtimestamp(made, UTC):%Y-%m-%dT%H:%M:%SZ}"
        with tq.connect(second.address) as queue:
            assert queue.table("t").read()["text"].list() == ["a", "b"]
