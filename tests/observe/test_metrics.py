"""The Prometheus text of a real queue, read back by Prometheus' own library, says what its stats say."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import transferqueue as tq
from transferqueue.errors.text import visible
from transferqueue.observe.prometheus import exposition
from transferqueue.wire.answers.stats import SpillStats, Stats


def read(stats: Stats) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(exposition(stats).decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


@pytest.fixture(scope="module")
def stats() -> Stats:
    """Six rows put, two done, one leased, one dropped; a channel at version 3."""
    with tq.connect() as queue:
        pacing = tq.Pacing("train", batch_rows=4, max_staleness=1, channel="policy")
        table = queue.create_table("rollouts", tasks=[tq.Task("train", needs=["rewards"])], pacing=pacing)
        rows = table.put(rewards=np.arange(6, dtype=np.float32), policy_version=3)
        queue.weights("policy").publish(3, {"w": np.zeros(4, np.float32)})
        queue.weights("policy").applied(3)
        with table.lease("train", rows=2):
            pass
        table.drop(rows[5:], "too_long")
        with table.lease("train", rows=1):
            found = queue.stats()
    return found


def test_what_is_read_back_are_the_figures_of_the_stats(stats: Stats) -> None:
    found = read(stats)
    table, task = frozenset({("table", "rollouts")}), frozenset({("table", "rollouts"), ("task", "train")})
    assert found["transferqueue_table_rows_put_total", table] == 6
    assert found["transferqueue_table_rows_dropped_total", table | {("reason", "too_long")}] == 1
    assert found["transferqueue_task_rows", task | {("state", "leased")}] == 1
    assert found["transferqueue_task_rows", task | {("state", "ready")}] == 2
    assert found["transferqueue_task_rows_done_total", task] == 2
    assert found["transferqueue_table_staleness_rows_total", table | {("versions", "0")}] == 3
    assert found["transferqueue_task_oldest_lease_age_seconds", task] >= 0
    assert found["transferqueue_channel_version", frozenset({("channel", "policy")})] == 3
    assert found["transferqueue_channel_applied_version_min", frozenset({("channel", "policy")})] == 3
    assert found["transferqueue_server_used_bytes", frozenset()] == stats.server.used_bytes
    assert found["transferqueue_table_sealed", table] == 0


def test_what_is_not_known_has_no_sample(stats: Stats) -> None:
    assert not [name for name, _ in read(stats) if name == "transferqueue_table_bytes_limit"]


def test_every_family_is_told_once_with_its_kind_and_what_it_is(stats: Stats) -> None:
    lines = exposition(stats).decode().splitlines()
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert helped == typed
    assert len(set(helped)) == len(helped) > 40
    histograms = [line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith(" histogram")]
    parts = {name + end for name in histograms for end in ("_bucket", "_sum", "_count")}
    assert {line.partition("{")[0].split()[0] for line in lines if not line.startswith("#")} <= {*helped, *parts}


def test_turns_of_the_loop_are_a_histogram(stats: Stats) -> None:
    requests = stats.server.turns["request"]
    found = read(stats)
    kind = ("kind", "request")
    name = "transferqueue_server_turn_seconds"
    assert found[f"{name}_count", frozenset({kind})] == sum(requests.counts) > 0
    assert found[f"{name}_bucket", frozenset({kind, ("le", "+Inf")})] == sum(requests.counts)
    assert found[f"{name}_bucket", frozenset({kind, ("le", "16.0")})] == sum(requests.counts[:-1])
    assert found[f"{name}_sum", frozenset({kind})] == requests.sum_s
    longest = frozenset({kind, ("of", requests.longest_of)})
    assert found["transferqueue_server_turn_longest_seconds", longest] == requests.longest_s


def test_text_of_users_cannot_break_a_line(stats: Stats) -> None:
    """A drop reason is a name and has none of these; a label of tomorrow may."""
    nasty = 'a\\b"c\nd} 1'
    table = msgspec.structs.replace(stats.tables["rollouts"], dropped={nasty: 7})
    found = read(msgspec.structs.replace(stats, tables={"rollouts": table}))
    assert (
        found["transferqueue_table_rows_dropped_total", frozenset({("table", "rollouts"), ("reason", visible(nasty))})]
        == 7
    )


def test_a_task_that_nobody_works_on_or_that_cannot_progress_has_a_figure(stats: Stats) -> None:
    task = frozenset({("table", "rollouts"), ("task", "train")})
    unattended, stranded = "transferqueue_task_unattended_seconds", "transferqueue_task_stranded"
    found = read(stats)
    assert (unattended, task) not in found
    assert found[stranded, task] == 0
    table = stats.tables["rollouts"]
    stuck = msgspec.structs.replace(table.tasks["train"], unattended_s=48.0, stranded=True)
    found = read(
        msgspec.structs.replace(stats, tables={"rollouts": msgspec.structs.replace(table, tasks={"train": stuck})})
    )
    assert found[unattended, task] == 48
    assert found[stranded, task] == 1


def test_what_is_on_the_disk_of_a_server_that_spills_is_told(stats: Stats) -> None:
    assert not [name for name, _ in read(stats) if name.startswith("transferqueue_spill")]
    figures = dict.fromkeys(set(SpillStats.__struct_fields__) - {"paused", "load_waits_s"}, 7)
    spill = SpillStats(**figures, load_waits_s=1.5, paused="No space left on device")
    found = read(msgspec.structs.replace(stats, server=msgspec.structs.replace(stats.server, spill=spill)))
    assert found["transferqueue_spill_bytes", frozenset()] == 7
    assert found["transferqueue_spill_load_waits_seconds_total", frozenset()] == 1.5
    assert found["transferqueue_spill_paused", frozenset()] == 1
