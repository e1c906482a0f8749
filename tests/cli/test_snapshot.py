"""`transferqueue snapshot` and `restore`, as people use them."""

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
        assert run("restore", "run", "--address", second.address).stdout.strip() == str(tmp_path / "run/000001")
        with tq.connect(second.address) as queue:
            assert queue.table("t").read()["text"].list() == ["a", "b"]
