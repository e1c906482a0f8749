"""`transferqueue shard`: what it says and refuses. That it lends: tests/cluster/test_shards.py."""

import transferqueue as tq
from transferqueue.cli import main


def test_draining_what_has_not_joined_is_refused_by_name(tmp_path, capsys):
    directory = tmp_path / "run"
    with tq.connect(runtime=directory) as queue:
        assert main(["shard", "drain", "3", "--address", queue.address]) == 2
    said = capsys.readouterr().err
    assert "shard 3 has not joined; this deployment has none" in said


def test_a_host_that_is_none_of_this_machine_is_refused(tmp_path, capsys):
    with tq.connect(runtime=tmp_path / "run") as queue:
        assert main(["shard", "--join", queue.address, "--arena-bytes", "1MiB", "--host", "192.0.2.1"]) == 2
        assert queue.stats().server.shards == []
    assert "192.0.2.1 cannot be listened at" in capsys.readouterr().err


def test_help_tells_how_to_join_and_how_to_leave(capsys):
    assert main(["shard", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--join" in said
    assert "drain" in said
    assert "Add this machine's memory" in said
