"""Screens at the two widths that terminals have most: nothing runs over, nothing that matters is left out."""

from collections.abc import Callable

import msgspec
import pytest
from rich.text import Text

from tests.observe.snapshots import server, stats, table, task
from transferqueue.cli.screens.doctor import doctor_lines
from transferqueue.cli.screens.inspect import tables_lines, terms_lines
from transferqueue.cli.screens.machine import machine_lines
from transferqueue.cli.screens.row import row_lines
from transferqueue.cli.screens.top import top_lines
from transferqueue.limits import Limits
from transferqueue.observe.diagnosis import Diagnosis, Finding
from transferqueue.observe.frame import frame
from transferqueue.observe.machine.check import Section
from transferqueue.observe.machine.result import fail, ok, warn
from transferqueue.observe.stages import TableStage, Worker
from transferqueue.observe.table_terms import policy_text, table_terms
from transferqueue.observe.verdict import QueueReport, QueueVerdict
from transferqueue.policies import Acked, Complete, DeliverPartial, Fifo, Pacing, Task, TokenBalanced
from transferqueue.schema import Field
from transferqueue.wire.answers.row import RowEvent, RowField, RowLife, RowTask
from transferqueue.wire.answers.stats import ChannelStats, ShardStats, SpillStats, Stats, Waiting

ADDRESS = "ipc:///tmp/transferqueue-0/control.sock"
NEEDS = "needs 3 complete groups: 2 are leased by rollout-5, silent 74 s; 1 lacks rewards"


def busy(now_s: float, step: int) -> Stats:
    reward = task(pending=12, ready=340, leased=64, done=9001 + step * 508, given=9100 + step * 510, age_s=2.1)
    reference = task(ready=4, leased=9, done=3)
    train = task(pending=600, ready=64, held=128, leased=512, done=8192 + step * 200, dropped=12, failed=3, age_s=8.2)
    rollouts = table(
        rows_put=10_000 + step * 512,
        rows_live=1024,
        rows_done=8192 + step * 200,
        rows_dropped=15,
        dropped={"stale": 12, "attempts": 3},
        bytes=1180 << 20,
        bytes_limit=8 << 30,
        version=12,
        age_s=8.2,
        staleness={"0": 800, "1": 200},
        outstanding=1024,
        outstanding_limit=1024,
        pacing_task="train",
        tasks={"reward": reward, "reference-logprobs": reference, "train": train},
    )
    sealed = table(rows_limit=65_536, rows_live=65_536, sealed=True, tasks={"judge": task(pending=65_536)})
    waits = [
        Waiting(
            session=3,
            label="train-0",
            request="Lease",
            table="rollouts",
            task="train",
            waited_s=3.2,
            left_s=26.1,
            why=NEEDS,
        ),
        Waiting(
            session=5, label="", request="Grant", table="", task="", waited_s=13.2, left_s=6.1, why="arena is full"
        ),
    ]
    return stats(
        now_s=now_s,
        tables={"rollouts": rollouts, "eval": sealed},
        channels={
            "policy": ChannelStats(
                newest=12,
                kept=[11, 12],
                bytes=9 << 20,
                age_s=1.0,
                applied={"3": 12, "4": 11, "5": 12},
                applied_age_s={},
                publish_lag_s={},
                turns={},
            )
        },
        waiting=waits,
    )


def top_screen(width: int) -> list[Text]:
    return top_lines(frame(ADDRESS, busy(10.0, 1), busy(12.0, 3)), width)


TERMS = table_terms(
    "rollouts",
    fields={
        "prompt_ids": Field("prompt_ids", "int64", (None,)),
        "images": Field("images", "uint8", (None, None, 3)),
        "rewards": Field("rewards", "float32"),
    },
    tasks={
        "reward": Task("reward", needs=["prompt_ids"], gives=["rewards"]),
        "train": Task(
            "train",
            needs=["prompt_ids", "rewards", "advantages"],
            selector=TokenBalanced(equal_counts=False),
            groups=Complete(deadline_s=30, incomplete=DeliverPartial()),
        ),
    },
    limits=Limits(rows=4096, bytes="8GiB"),
    pacing=Pacing("train", batch_rows=512, max_staleness=1, channel="policy"),
    retention=Acked(),
    stats=table(rows_put=30, rows_live=20, rows_done=8, rows_dropped=2, dropped={"stale": 2}, sealed=True),
)

LIFE = RowLife(
    table="rollouts",
    row=4711,
    state="live",
    reason="",
    age_s=8.2,
    resident=True,
    put_by=5,
    key="gsm8k/17",
    tags={"split": "train"},
    group_id=12,
    group_size=8,
    ordinal=3,
    policy_version=11,
    policy_version_max=12,
    tokens=532,
    priority=0.5,
    fields={
        "prompt_ids": RowField(set=True, inline=False, value=None, block=12, slot=3, shard=0, bytes=1 << 20),
        "rewards": RowField(set=True, inline=True, value=0.5, block=None, slot=None, shard=None, bytes=None),
        "advantages": RowField(set=False, inline=True, value=None, block=None, slot=None, shard=None, bytes=None),
    },
    tasks={
        "reward": RowTask(state="leased", lacks=[], attempts=2, lease=9, session=5, held_s=3.0, left_s=13.0),
        "train": RowTask(
            state="pending", lacks=["advantages"], attempts=0, lease=None, session=None, held_s=None, left_s=None
        ),
    },
    events=[
        RowEvent(ago_s=8.2, what="put", task="", session=5, detail="prompt_ids"),
        RowEvent(ago_s=3.0, what="leased", task="reward", session=6, detail=""),
    ],
    events_complete=True,
    labels={"5": "rollout-5"},
)

SECTIONS = [
    Section(
        "memory",
        [ok("shared memory", "/dev/shm: 23.5 GiB free of 23.5 GiB"), warn("memory", "little " * 20, "add " * 30)],
    ),
    Section("kernel", [fail("pidfd", "OSError: not permitted", "allow it")]),
]


def worker(name: str) -> Worker:
    return Worker(name=name, state="works", rows=2, silent_s=0.1)


SYMPTOMS = Diagnosis(
    elsewhere=[Finding(task="", text="the arena is full (maker has waited 12 s)")],
    tables={
        "rollouts": [Finding(task="train", text=f"task train {NEEDS}")],
        "eval": [Finding(task="judge", text="task judge waits for rows; none was put yet")],
        "quiet": [],
    },
)
MISSING = QueueVerdict(
    state="missing",
    trouble=True,
    mark="✗",
    text=(
        "rollouts/reward: 8 rows ready, no worker connected; its last worker left 48 s ago (reward-0, killed by "
        "SIGKILL); start it again"
    ),
    short="reward: no worker",
    remedy="Start it. " * 20,
    also=["eval/judge: 1 row ready, no worker connected; start one"],
)
FROZEN = Worker(name="rollout-0", state="silent", rows=4, silent_s=74.0)
STAGES = [
    TableStage(task="", state="idle", workers=[]),
    TableStage(task="rollout", state="silent", workers=[FROZEN, *(worker(f"rollout-{at}") for at in range(1, 9))]),
    TableStage(task="reward", state="missing", workers=[]),
    TableStage(task="train", state="idle", workers=[]),
]
REPORT = QueueReport(verdict=MISSING, stages={"rollouts": STAGES}, symptoms=SYMPTOMS)

SCREENS: dict[str, Callable[[int], list[Text]]] = {
    "top": top_screen,
    "tables": lambda width: tables_lines(busy(10.0, 1).tables, width),
    "terms": lambda width: terms_lines(TERMS, width),
    "row": lambda width: row_lines(LIFE, width),
    "machine": lambda width: machine_lines(SECTIONS, width),
    "doctor": lambda width: doctor_lines(REPORT, width),
}


def plain(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("screen", SCREENS)
def test_no_line_runs_over(screen: str, width: int) -> None:
    lines = SCREENS[screen](width)
    assert [line.plain for line in lines if line.cell_len > width] == []
    assert [line.plain for line in lines if line.plain != line.plain.rstrip()] == []


def test_top_keeps_what_matters_at_80_and_shows_more_at_120() -> None:
    narrow, wide = plain(top_screen(80)), plain(top_screen(120))
    for text in (narrow, wide):
        headings = next(line for line in text.splitlines() if line.startswith("  task")).split()
        assert {"pending", "ready", "leased", "done", "done/s"} <= set(headings)
        assert "version 12" in text
        assert "1,024 of 1,024 ahead" in text
        assert "512 in/s" in text
        assert "stale 12  attempts 3" in text
        assert "train-0 · lease rollouts/train · 3.2 s, 26 s left" in text
        assert "applied 12 by 2, 11 by 1" in text
        assert ADDRESS in text
    assert "held" not in narrow
    assert {"held", "failed", "given/s"} <= set(wide.split())


def test_top_marks_the_task_that_sets_the_pace_and_measures_rates() -> None:
    (train,) = [line for line in plain(top_screen(120)).splitlines() if line.startswith("  train ")]
    assert train.split() == ["train", "◂", "600", "128", "64", "512", "8,792", "12", "3", "0", "200", "8.2", "s"]


def test_top_without_tables_and_without_waits() -> None:
    assert plain(top_lines(frame(ADDRESS, None, stats()), 80)).endswith("no tables yet")
    assert plain(top_lines(frame(ADDRESS, None, stats(tables={"t": table()})), 80)).endswith("no waits")


def test_the_first_frame_has_dashes_for_rates() -> None:
    text = plain(top_lines(frame(ADDRESS, None, busy(1.0, 1)), 120))
    (reward,) = [line for line in text.splitlines() if line.startswith("  reward")]
    assert reward.split()[-4:-2] == ["–", "–"]
    assert "in/s" not in text


def test_terms_say_policies_as_they_are_written() -> None:
    text = plain(terms_lines(TERMS, 120))
    assert "TokenBalanced(equal_counts=False)" in text
    assert "Complete(deadline_s=30, incomplete=DeliverPartial)" in text
    assert "train needs advantages: no field of the table yet" in text
    assert "30 put = 20 live + 8 done + 2 dropped (stale 2)" in text
    assert "train takes 512 rows a step" in text
    assert policy_text(Fifo()) == "Fifo"


def test_a_row_that_ended_is_shown_without_empty_parts() -> None:
    over = msgspec.structs.replace(
        LIFE,
        state="done",
        key=None,
        tags={},
        group_id=-1,
        policy_version=-1,
        tokens=-1,
        priority=0.0,
        fields={},
        tasks={},
    )
    lines = plain(row_lines(over, 80)).split("\n")
    empty = [number for number, line in enumerate(lines) if not line.strip()]
    assert len(empty) == 1
    assert lines[empty[0] + 1].split()[:2] == ["when", "what"] or "forgotten" in lines[empty[0] + 1]


def test_a_rows_whole_life() -> None:
    text = plain(row_lines(LIFE, 80))
    assert "row 4711 of rollouts · live · put 8.2 s ago by rollout-5" in text
    assert "key gsm8k/17 · group 12, member 3 of 8 · policy version 11 to 12" in text
    assert "leased          2  by rollout-5, 13 s left" in text
    assert "lacks advantages" in text
    assert "session 6" in text


def test_a_finding_is_followed_by_its_remedy() -> None:
    text = plain(machine_lines(SECTIONS, 80))
    assert "  ✗ pidfd          OSError: not permitted\n                   → allow it" in text
    assert text.endswith("A queue will not run here: 1 thing to mend.")


def test_doctor_begins_with_the_verdict_and_draws_the_stages() -> None:
    text = plain(doctor_lines(REPORT, 200))
    assert text.startswith(f"✗ {MISSING.text}\n  Start it.")
    assert "  also: eval/judge: 1 row ready, no worker connected; start one\n" in text
    assert (
        "rollouts → rollout: rollout-0 (silent 74 s), rollout-1 (2 rows), rollout-2 (2 rows) and 6 more "
        "→ reward: no worker → train: none\n"
    ) in text
    assert text.endswith("elsewhere\n  … the arena is full (maker has waited 12 s)")


def test_top_begins_with_the_verdict() -> None:
    assert plain(top_lines(frame(ADDRESS, None, stats(), MISSING), 80)).startswith(
        "✗ rollouts/reward: 8 rows ready, no worker connected"
    )


def spill(**known):
    zero = dict.fromkeys(("blocks", "spilled_blocks", "loaded_blocks", "lost_blocks", "loaded_bytes"), 0)
    return SpillStats(
        **{**zero, "bytes_max": 64 << 30, "bytes": 0, "spilled_bytes": 0, "load_waits_s": 0.0, "paused": "", **known}
    )


def test_the_disk_has_a_line():
    disk = spill(bytes=2 << 30, spilled_bytes=4 << 30, paused="No space left on device")
    shown = top_lines(frame(ADDRESS, None, stats(server=server(spill=disk))), 120)
    (line,) = [line.plain for line in shown if line.plain.startswith("spill")]
    assert line.endswith(" 2 GiB of 64 GiB on disk · 4 GiB went there, 0 B came back · paused: No space left on device")


def test_further_shards_are_one_line_that_says_who_leaves():
    shards = [
        ShardStats(
            shard=n, label="shard", capacity_bytes=8 << 30, used_bytes=n << 30, backed_bytes=n << 30, drains=n == 2
        )
        for n in (1, 2, 3)
    ]
    lines = top_lines(frame(ADDRESS, None, stats(server=server(shards=shards))), 80)
    (line,) = [line.plain for line in lines if line.plain.startswith("shards")]
    assert line.endswith("6 GiB of 24 GiB in 3 remote shards · 2 drains")
    assert len(line) <= 80
    assert not [line for line in top_lines(frame(ADDRESS, None, stats()), 80) if line.plain.startswith("shards")]
