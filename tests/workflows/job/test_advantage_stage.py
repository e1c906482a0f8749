"""The advantage stage: the columns of each kind for whole groups or batches, and groups that teach nothing dropped."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job import jobs
from tests.workflows.job.policies import put_prompts
from transferqueue.workflows.flow.events import WORK
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_stage
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import names
from transferqueue.workflows.job.algorithms.advantages import ScoredRows, advantage_columns_of, group_advantages
from transferqueue.workflows.job.graph import create_table, fields, stages
from transferqueue.workflows.job.stages.advantage import advantage
from transferqueue.workflows.job.stages.all_dropped_guard import AllDroppedGuard

WAIT_S = 30.0
LENGTHS = [3, 1, 2, 4, 2, 3, 1, 2]
REWARDS = [1.0, 0.0, 0.0, 0.5, 0.25, 0.25, 0.25, 0.25]


def ragged(draw: int, lengths=LENGTHS) -> list[np.ndarray]:
    draws = np.random.default_rng(draw)
    return [-draws.random(length).astype(np.float32) for length in lengths]


COLUMNS = {
    "rewards": REWARDS,
    "response_ids": [np.arange(length, dtype=np.int32) for length in LENGTHS],
    "rollout_logprobs": ragged(1),
    "ref_logprobs": ragged(2),
    "values": ragged(3),
    "loss_mask": [np.arange(length) != 1 for length in LENGTHS],
}


def serve(settings):
    """Run the stage over two groups of four rows; return columns that it gave by row, and counts of drops."""
    (stage,) = [stage for stage in stages(settings) if stage.task.name == names.ADVANTAGE]
    needed = [*stage.task.needs, *stage.task.gives]
    with tq.connect() as queue:
        table = queue.create_table(
            names.TABLE,
            fields=[field for field in fields(settings) if field.name in needed],
            tasks=[stage.task, tq.Task("keep", needs=stage.task.gives)],
        )
        table.put(
            group_id=np.repeat([0, 1], 4),
            group_size=4,
            **{name: values for name, values in COLUMNS.items() if name in stage.task.needs},
        )
        table.seal()
        plain = msgspec.json.decode(msgspec.json.encode(settings))
        with advantage(Context(queue=queue, table=table, emit=lambda event: None, settings=plain)) as work:
            run_stage(table, stage, work, emit=lambda event: None)
        left = table.read()
        return {name: list(left[name]) for name in stage.task.gives}, table.audit().dropped


def job(kind, *changes):
    return jobs.job(kind, "sampling.group_size=4", "trainer.prompts_per_step=2", *changes)


@pytest.mark.parametrize(("least", "kept"), [(0, 0), (2, 3)])
def test_a_group_goes_on_without_members_that_failed_if_enough_are_left(least, kept):
    """One of four fails, and three of four: the advantages of the first group compare the three that are left."""
    settings = jobs.job("play", "sampling.group_size=4", f"sampling.group_min={least}", "trainer.prompts_per_step=2")
    rewards = np.array([1.0, 0.0, 0.5], np.float32)
    with tq.connect() as queue:
        table = create_table(queue, settings)
        put_prompts(table, prompts=2, group_size=4)
        with table.lease(names.PLAY, rows=8, timeout_s=WAIT_S) as batch:
            left = batch.rows[[0, 2, 3, 6]]
            batch.ack(left, **played(np.append(rewards, 1.0)))
            batch.drop("environment_timeout")
        counts = table.audit()
        assert counts.dropped == {"environment_timeout": 4, "group_incomplete": 4 - kept}
        assert counts.rows_put == 8 == sum(counts.dropped.values()) + counts.rows_live
        if kept:
            plain = msgspec.json.decode(msgspec.json.encode(settings))
            with (
                advantage(Context(queue=queue, table=table, emit=lambda event: None, settings=plain)) as work,
                table.lease(names.ADVANTAGE, groups=1, timeout_s=WAIT_S) as batch,
            ):
                (part,) = work(batch)
                batch.ack(batch.rows[part.at], **part.columns)
            with table.lease(names.TRAIN, groups=1, timeout_s=WAIT_S) as batch:
                assert batch.rows.tolist() == left[:3].tolist()
                assert batch["advantages"].numpy().tolist() == group_advantages(rewards, [0, 0, 0]).tolist()


def played(rewards):
    """Columns of episodes of one token."""
    rows = len(rewards)
    return {
        "response_ids": [np.array([7], np.int32)] * rows,
        "token_versions": [np.array([0], np.int32)] * rows,
        "rollout_logprobs": [np.array([-1.0], np.float32)] * rows,
        "finish_reason": ["stop"] * rows,
        "loss_mask": [np.array([True])] * rows,
        "rewards": rewards.astype(np.float32),
        "turn_rewards": [np.array([reward], np.float32) for reward in rewards],
    }


def test_grpo_gives_one_advantage_a_row_and_keeps_equal_groups():
    columns, dropped = serve(job("grpo"))
    assert np.round(columns["advantages"], 3).tolist() == pytest.approx(
        [1.305, -0.783, -0.783, 0.261, 0, 0, 0, 0], abs=2e-3
    )
    assert dropped == {}


def test_dapo_drops_equal_groups_whatever_their_length_costs():
    columns, dropped = serve(
        job("dapo", "sampling.tokens_max=4", "algorithm.overlong_buffer=2", "algorithm.overlong_penalty=0.5")
    )
    assert dropped == {"zero_advantage": 4}
    assert len(columns["advantages"]) == 4
    shaped = [1.0 - 0.25, 0.0, 0.0, 0.5 - 0.5]
    expected = (np.array(shaped) - np.mean(shaped)) / (np.std(shaped, ddof=1) + 1e-4)
    assert columns["advantages"] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "reinforce_pp"])
def test_kinds_by_token_whiten_over_the_whole_batch(kind):
    settings = jobs.job(kind, "trainer.prompts_per_step=8")
    columns, _ = serve(settings)
    with_kl = kind == "ppo"
    rows = ScoredRows(
        rewards=REWARDS,
        group_id=range(8),
        masks=[np.ones(length, bool) for length in LENGTHS],
        logprobs=COLUMNS["rollout_logprobs"] if with_kl else (),
        ref_logprobs=COLUMNS["ref_logprobs"] if with_kl else (),
        values=COLUMNS["values"] if with_kl else (),
    )
    expected = advantage_columns_of(rows, settings.algorithm)
    assert set(columns) == set(expected)
    for name, values in expected.items():
        assert [row.tolist() for row in columns[name]] == [row.tolist() for row in values]
    every = np.concatenate(columns["token_advantages"])
    assert (float(every.mean()), float(every.std(ddof=1))) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-3))


def test_tokens_of_an_environment_are_stepped_over():
    settings = jobs.job(
        "reinforce_pp",
        "trainer.prompts_per_step=8",
        'environment=[{ factory = "my_envs:make" }]',
        "reward=[]",
        "algorithm.whiten=false",
    )
    columns, _ = serve(settings)
    for row, (mask, reward) in enumerate(zip(COLUMNS["loss_mask"], REWARDS, strict=True)):
        assert columns["token_advantages"][row].tolist() == pytest.approx((mask * reward).tolist())


def test_a_job_whose_groups_are_all_dropped_ends_and_says_why():
    guard = AllDroppedGuard(job("dapo"), "the rewards were equal", "check them")  # 8 rows a batch
    guard.count(kept=0, dropped=100)
    guard.count(kept=1, dropped=100)
    guard.count(kept=0, dropped=159)
    with pytest.raises(
        StageFailedInProcess, match=r"the last 160 rows, 20 batches, were all dropped: the rewards were equal"
    ):
        guard.count(kept=0, dropped=1)


# ---------------------------------------------------------------- rows of one step


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_whitened_batch_has_the_rows_of_the_next_step_though_later_ones_are_ready_before(mode):
    """After a step was taken back, rows of the step after it are generated beside its own; and in mode async always."""
    settings = jobs.job("ppo", "trainer.prompts_per_step=8", f"pacing.mode={mode}", "reproducible=true")
    (stage,) = [stage for stage in stages(settings) if stage.task.name == names.ADVANTAGE]
    plain = msgspec.json.decode(msgspec.json.encode(settings))
    needed = [*stage.task.needs, *stage.task.gives]
    with tq.connect() as queue:
        table = queue.create_table(
            names.TABLE,
            fields=[field for field in fields(settings) if field.name in needed],
            tasks=[stage.task, tq.Task("keep", needs=stage.task.gives)],
        )
        ordinals = [9, 0, 6, 8, 5, 15, 4, 14, 13, 3, 12, 2, 11, 1, 10]
        (late,) = put_steps(table, stage, [7], without="values")
        put_steps(table, stage, ordinals)
        with (
            ThreadPoolExecutor(1) as pool,
            advantage(Context(queue=queue, table=table, emit=lambda event: None, settings=plain)) as work,
        ):
            leased = threading.Event()
            served = pool.submit(run_stage, table, stage, work, emit=lambda event: event.name == WORK and leased.set())
            assert leased.wait(WAIT_S)
            table.update([late], values=[COLUMNS["values"][7]])
            table.seal()
            served.result(WAIT_S)
        rows = table.read()
        given = dict(zip(rows.ordinal.tolist(), rows["token_advantages"], strict=True))
    for first in (0, 8):
        expected = whitened_step(settings)
        for row in range(8):
            assert given[first + row].tolist() == expected[row].tolist()


def put_steps(table, stage, ordinals, without=""):
    """Put rows with these ordinals: that of ordinal n has the columns of row n % 8."""
    rows = [ordinal % 8 for ordinal in ordinals]
    columns = {
        name: [values[row] for row in rows]
        for name, values in COLUMNS.items()
        if name in stage.task.needs and name != without
    }
    return table.put(ordinal=ordinals, group_id=ordinals, group_size=1, policy_version=0, **columns)


def whitened_step(settings):
    rows = ScoredRows(
        rewards=REWARDS,
        group_id=range(8),
        masks=[np.ones(length, bool) for length in LENGTHS],
        logprobs=COLUMNS["rollout_logprobs"],
        ref_logprobs=COLUMNS["ref_logprobs"],
        values=COLUMNS["values"],
    )
    return advantage_columns_of(rows, settings.algorithm)["token_advantages"]
