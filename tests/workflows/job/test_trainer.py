"""The whole loop of a trainer against a real queue: modes, streaming, resume, deaths at every point."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import transferqueue as tq
from tests.scale import only_long
from tests.workflows.job import stand_ins
from transferqueue.adapters.weights import ChannelWeights
from transferqueue.errors import FlowSignal, UsageError
from transferqueue.workflows.flow.events import Figures
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.run.figures import described
from transferqueue.workflows.job.settings.resolve import resolve
from transferqueue.workflows.job.stages.evaluate import requests_table
from transferqueue.workflows.job.tiny_model.make import make
from transferqueue.workflows.job.training.checkpoint import Checkpoints, checkpoint_state


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    return path


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as queue:
        yield queue


def events(told: list[Any], kind: str) -> list[dict[str, Any]]:
    return [event.values for event in told if isinstance(event, Figures) and event.kind == kind]


def trained(queue: tq.Queue, given: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Run the job to its end in this process; the figures of each step."""
    told: list[Any] = []
    with stand_ins.table_of(queue, stand_ins.job_of(given)) as table:
        stand_ins.train(queue.address, given, str(directory), told)
        audit = table.audit()
    job = stand_ins.job_of(given)
    batch = job.trainer.prompts_per_step * job.sampling.group_size
    assert audit.balanced
    assert (audit.rows_done, audit.rows_live) == (job.steps * batch, 0), audit
    return events(told, "step")


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("mode", "stream"),
    [
        ("sync", "on"),
        ("async", "on"),
        *only_long(("sync", "off"), ("delayed", "on"), ("delayed", "off"), ("async", "off")),
    ],
)
def test_a_job_trains_its_steps_and_leaves_no_row(
    mode: str, stream: str, model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    given = stand_ins.values(model, reproducible=mode != "async", pacing={"mode": mode}, trainer={"stream": stream})
    steps = trained(queue, given, tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert all(step["rows"] == 6 and step["lost_rows"] == 0 for step in steps)
    staleness = {behind for step in steps for behind in step["staleness"]}
    assert staleness == {"0"} if mode == "sync" else staleness <= {"0", "1"}
    named = {"loss", "gradient_norm", "lr", "tokens", "reward", "reward/builtins:len", "truncated", "length_p95"}
    named |= {"step_s", "idle_s", "passes_s", "update_s", "stood_still_s", "save_s", "training_tokens_per_s"}
    assert named | {"equal_groups", "group_std", "staleness_mean", "own_tokens", "engine_error"} <= set(steps[0])
    assert all(described(name) for step in steps for name in step)
    for step in steps:
        parts = [step[name] for name in ("idle_s", "passes_s", "update_s", "stood_still_s", "save_s")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= step["step_s"] * 1.01
        assert mode != "sync" or step["own_tokens"] == step["tokens"]
    assert stand_ins.final_weights(queue)[0] == 4
    assert Checkpoints(tmp_path / "checkpoints" / "train").steps() == [2, 4]


def test_over_sampling_takes_the_first_rows_and_the_others_a_version_later(
    model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    given = stand_ins.values(model, pacing={"mode": "sync", "over_sample": 1.5}, reproducible=False)
    steps = trained(queue, given, tmp_path)
    assert {behind for step in steps for behind in step["staleness"]} <= {"0", "1"}
    with queue.weights(names.FULL).pull(timeout_s=0) as full:  # generators are told of each full batch, and of its rows
        assert (full.version, len(full["rows"])) == (4, steps[-1]["rows"])


def test_without_checkpoints_rows_are_done_at_once(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    assert len(trained(queue, stand_ins.values(model, checkpoint={"every": 0}), tmp_path)) == 4
    assert not (tmp_path / "checkpoints").exists()


def test_held_out_prompts_are_asked_for_before_during_and_after(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    given = stand_ins.values(model, evaluation={"path": "held-out", "every": 3})
    trained(queue, given, tmp_path)
    with requests_table(queue).lease(names.EVALUATE, rows=3) as batch:
        assert batch["step"].list() == [0, 3, 4]
        assert batch["version"].list() == [0, 3, 4]
        batch.ack()
    with pytest.raises(tq.EndOfTable):
        requests_table(queue).lease(names.EVALUATE, rows=1, timeout_s=5)


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_ends_early_when_evaluations_improve_no_more(
    model: Path, queue: tq.Queue, tmp_path: Path, every: int
) -> None:
    """The figures are in the folder of the run, as its supervisor writes them."""
    given = stand_ins.values(
        model,
        evaluation={"path": "held-out", "every": 2, "patience": 1},
        pacing={"mode": "async", "max_staleness": 2},
        weights={"every": every},
    )
    lines = [json.dumps({"step": step, "version": step, "reward": 1.0 - step}) for step in (0, 2)]
    (tmp_path / "evaluations.jsonl").write_text("\n".join(lines))
    told: list[Any] = []
    with stand_ins.table_of(queue, stand_ins.job_of(given)) as table:
        stand_ins.train(queue.address, given, str(tmp_path), told)
        audit = table.audit()
    assert [step["step"] for step in events(told, "step")] == [1]
    assert audit.balanced
    assert (audit.rows_done, audit.rows_live) == (6, 0)
    assert Checkpoints(tmp_path / "checkpoints" / "train").steps() == [1]
    assert stand_ins.final_weights(queue)[0] == 1
    with requests_table(queue).lease(names.EVALUATE, rows=2) as batch:
        assert batch["step"].list() == [0, 1]
        batch.ack()
    with pytest.raises(tq.EndOfTable):
        requests_table(queue).lease(names.EVALUATE, rows=1, timeout_s=5)


def test_a_checkpoint_says_what_it_is_of(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    trained(queue, stand_ins.values(model), tmp_path)
    state = checkpoint_state(Checkpoints(tmp_path / "checkpoints" / "train").path(2))
    assert (state.step, state.version, state.position) == (2, 2, (6, (), ()))


def test_versions_may_be_fewer_than_steps(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    given = stand_ins.values(model, weights={"every": 2}, pacing={"mode": "async", "max_staleness": 2})
    assert [step["version"] for step in trained(queue, given, tmp_path)] == [0, 2, 2, 4]


def test_a_step_of_several_updates_publishes_once(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    given = stand_ins.values(model, algorithm={"kind": "grpo", "epochs": 2, "minibatches": 3})
    steps = trained(queue, given, tmp_path)
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert all(step["rows"] == 6 for step in steps)
    assert all({"engine_error", "policy_movement"} <= set(step) for step in steps)  # before the first update, and after


# ---------------------------------------------------------------- further uses


def trained_by_use(
    queue: tq.Queue, given: dict[str, Any], directory: Path, *deaths: tuple[str, int]
) -> tuple[list[dict[str, Any]], dict[str, tuple[int, int]], dict[str, int]]:
    """Run a job whose rows are trained several times, each of its lives but the last in a process that dies; its steps,
    the rows done and dropped by use, and dropped by reason."""
    told: list[Any] = []
    job = stand_ins.job_of(given)
    with stand_ins.table_of(queue, job) as table:
        for point, count in deaths:
            assert life(queue.address, given, str(directory), point, count) == -signal.SIGKILL
        stand_ins.train(queue.address, given, str(directory), told)
        stats = table.stats()
        audit = table.audit()
    assert (audit.balanced, audit.rows_live) == (True, 0)
    uses = {task: stats.tasks[task] for task in (names.TRAIN, *names.further_uses(job.pacing.uses))}
    for use in uses.values():  # each use has its own fate
        assert use.done + use.dropped == audit.rows_put
    assert audit.rows_done == min(use.done for use in uses.values())
    return events(told, "step"), {task: (use.done, use.dropped) for task, use in uses.items()}, dict(audit.dropped)


@pytest.mark.parametrize(
    ("mode", "reproducible", "stream"),
    [("sync", False, "on"), ("async", True, "on"), *only_long(("sync", True, "off"), ("async", False, "off"))],
)
def test_rows_are_trained_again_in_the_steps_after_their_first(
    mode: str, reproducible: bool, stream: str, model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    given = stand_ins.values(
        model, steps=5, reproducible=reproducible, pacing={"mode": mode, "uses": 3}, trainer={"stream": stream}
    )
    steps, uses, dropped = trained_by_use(queue, given, tmp_path)
    assert [step["rows"] for step in steps] == [6] * 5
    assert [step["reused_rows"] for step in steps] == [0, 6, 12, 12, 12]
    assert [done for done, _ in uses.values()] == [30, 24, 18]
    assert dropped["surplus_use"] == 12  # of the last two steps
    assert all(step["tokens"] > step["rows"] for step in steps)
    most = 2 if mode == "sync" else 3
    assert all(int(behind) <= most for step in steps for behind in step["reused_staleness"])
    if mode == "sync":
        assert [step["reused_staleness"] for step in steps[1:3]] == [{"1": 6}, {"1": 6, "2": 6}]
    assert all(described(name) for step in steps for name in step)


def test_rows_that_are_too_old_for_a_further_use_are_dropped_with_the_next_checkpoint(
    model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    """The trainer died after version 3 was there: the weights of checkpoint 2 come again as version 4, so the rows of
    step 2, of version 1, would be three versions old at their second use."""
    given = stand_ins.values(model, steps=4, reproducible=False, pacing={"mode": "sync", "uses": 2})
    steps, uses, dropped = trained_by_use(queue, given, tmp_path, ("publish", 4))
    assert [(step["step"], step["rows"], step["reused_rows"]) for step in steps] == [(3, 6, 0), (4, 6, 6)]
    assert uses == {names.TRAIN: (24, 0), "train_use_2": (12, 12)}
    assert dropped == {"stale_use": 6, "surplus_use": 6}


class _Trouble(stand_ins.StandIns):
    """drops: the number of a prompt whose rows are dropped. slow: one whose rows come after the others."""

    drops, slow = -1, -1

    def _work(self, queue: tq.Queue, table: tq.Table, task: str) -> None:
        if task == names.ADVANTAGE and self.drops >= 0:
            where = [tq.Compare("ordinal", ">=", 2 * self.drops), tq.Compare("ordinal", "<", 2 * self.drops + 2)]
            with suppress(FlowSignal), table.lease(task, groups=1, where=where, timeout_s=0) as batch:
                batch.drop("equal")
                return
        if task == names.ROLLOUT and self.slow >= 0 and table.cursor() < 80:
            where = [tq.Compare("ordinal", ">=", 2 * self.slow + 2)]
            with table.lease(task, rows=2, at_least=1, where=where, timeout_s=stand_ins.WAIT_S) as batch:
                batch.ack(**self._responses(queue, batch))
            return
        super()._work(queue, table, task)


@pytest.mark.parametrize(
    ("trouble", "pacing"),
    [({"drops": 4}, {}), ({"slow": 0}, {"over_sample": 1.5}), ({"slow": 0}, {"over_sample": 1.5, "max_staleness": 9})],
)
def test_rows_that_are_dropped_or_slow_keep_back_no_further_use_of_others(
    trouble: dict[str, int], pacing: dict[str, Any], model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    given = stand_ins.values(
        model, steps=9, reproducible=False, pacing={"mode": "sync", "uses": 2, **pacing}, data={"epochs": 2}
    )
    told: list[Any] = []
    job = resolve(stand_ins.job_of(given))
    # more prompts than are trained, for those that never come in time
    served = _Trouble(queue.address, replace(job, steps=job.steps + 4))
    served.drops, served.slow = trouble.get("drops", -1), trouble.get("slow", -1)
    with served:
        table = graph.create_table(queue, job)
        stand_ins.train(queue.address, given, str(tmp_path), told)
        audit = table.audit()
    steps = events(told, "step")
    assert [(step["rows"], step["reused_rows"]) for step in steps] == [(6, 0), *[(6, 6)] * 8]
    assert (audit.balanced, audit.rows_live, audit.rows_done) == (True, 0, 48)
    assert audit.dropped["surplus_use"] == 6


def test_a_new_run_from_the_checkpoint_of_another_trains_each_row_once_a_step(
    model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    given = stand_ins.values(model, steps=2, pacing={"mode": "sync", "uses": 2})
    with tq.connect() as other:
        trained_by_use(other, given, tmp_path / "one")
    given |= {"steps": 5, "checkpoint": {"every": 2, "resume": str(tmp_path / "one")}}
    steps, _, _ = trained_by_use(queue, given, tmp_path / "two")
    assert [(step["step"], step["rows"], step["reused_rows"]) for step in steps] == [(3, 6, 0), (4, 6, 6), (5, 6, 6)]


def test_a_run_whose_table_is_older_than_its_checkpoint_does_not_use_rows_again_before_their_first_use(
    model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    given = stand_ins.values(model, steps=5, pacing={"mode": "sync", "uses": 2})
    with tq.connect() as other, stand_ins.table_of(other, stand_ins.job_of(given)):
        assert life(other.address, given, str(tmp_path), "checkpointed", 2) == -signal.SIGKILL
    with (
        tq.connect() as other,
        stand_ins.table_of(other, stand_ins.job_of(given)),
        pytest.raises(UsageError, match=r"step 3 is to train 3 places of the data again .*--set reproducible=false"),
    ):
        stand_ins.train(other.address, given, str(tmp_path))
    steps, _, _ = trained_by_use(queue, given | {"reproducible": False}, tmp_path)
    assert [(step["step"], step["rows"], step["reused_rows"]) for step in steps] == [(3, 6, 0), (4, 6, 6), (5, 6, 6)]


USE_DEATHS = (
    ("sync", (("publish", 4),)),
    ("async", (("ack", 4), ("update", 1))),
    ("sync", (("ack", 4),)),
    ("sync", (("ack", 5), ("checkpointed", 1))),
    ("sync", (("checkpoint", 1),)),
    ("sync", (("checkpointed", 1), ("checkpointed", 2))),
    ("sync", (("checkpointed", 3),)),
    ("delayed", (("update", 4), ("publish", 1))),
    ("async", (("checkpointed", 2),)),
)
"""In which mode, and after which calls, lives end. An ack is of one use, and a checkpoint is told for each."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "deaths"), [*USE_DEATHS[:2], *only_long(*USE_DEATHS[2:])])
def test_killed_trainers_use_each_row_as_often_as_an_undisturbed_one(
    mode: str, deaths: tuple[tuple[str, int], ...], model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    """Fixed seeds, rows in order: a use that was lost or doubled would show in the weights."""
    given = stand_ins.values(model, steps=5, pacing={"mode": mode, "uses": 2})
    with tq.connect() as other:
        _, uses, dropped = trained_by_use(other, given, tmp_path / "whole")
        wanted = stand_ins.final_weights(other)[1]
    assert [done for done, _ in uses.values()] == [30, 24]
    _, again, dropped_again = trained_by_use(queue, given, tmp_path / "killed", *deaths)
    assert [done for done, _ in again.values()] == [30, 24]
    assert dropped["surplus_use"] == dropped_again["surplus_use"] == 6
    weights = stand_ins.final_weights(queue)[1]
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor), name


# ---------------------------------------------------------------- resume


def undisturbed(given: dict[str, Any], directory: Path) -> dict[str, torch.Tensor]:
    with tq.connect() as queue:
        trained(queue, given, directory)
        return stand_ins.final_weights(queue)[1]


def started(*arguments: Any) -> Any:
    """Start one life of a trainer in a process of its own: `stand_ins.train`, or `stand_ins.train_and_die` with a point
    as text."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["transferqueue.workflows.job.training.process", "transformers.models.qwen3", "tests.workflows.job.stand_ins"]
    )
    dies = len(arguments) > 3 and isinstance(arguments[3], str)
    process = context.Process(target=stand_ins.train_and_die if dies else stand_ins.train, args=arguments)  # type: ignore[attr-defined]
    process.start()
    return process


def life(*arguments: Any) -> int:
    """Run one life to its end; its exit code."""
    return ended(started(*arguments))


def ended(process: Any) -> int:
    process.join(300)
    assert process.exitcode is not None, "the trainer hangs"
    return int(process.exitcode)


DEATHS = (
    ("sync", "publish", 4, 6),  # version 3 is there, and checkpoint 2: its weights come again as version 4
    ("async", "publish", 5, 4),  # where the table begins is the first; steps are trained again without a new version
    ("sync", "update", 3, 4),
    ("sync", "update", 4, 6),
    ("sync", "ack", 3, 6),
    ("sync", "checkpoint", 1, 4),
    ("sync", "checkpointed", 2, 4),
    ("async", "publish", 1, 4),
    ("async", "update", 4, 4),
    ("async", "ack", 3, 4),
    ("async", "checkpointed", 2, 4),
    ("delayed", "ack", 3, 4),
)
"""In which mode, and after which call, a life ends, and the version of the last step of the next."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "point", "count", "version"), [*DEATHS[:2], *only_long(*DEATHS[2:])])
def test_a_trainer_killed_at_any_point_ends_with_the_weights_of_an_undisturbed_one(
    mode: str, point: str, count: int, version: int, model: Path, queue: tq.Queue, tmp_path: Path
) -> None:
    """Fixed seeds, rows in order. A version, a row or a state of the optimizer that was lost or doubled would show in
    the weights."""
    given = stand_ins.values(model, pacing={"mode": mode})
    wanted = undisturbed(given, tmp_path / "whole")
    with stand_ins.table_of(queue, stand_ins.job_of(given)) as table:
        assert life(queue.address, given, str(tmp_path / "killed"), point, count) == -signal.SIGKILL
        assert life(queue.address, given, str(tmp_path / "killed")) == 0
        audit = table.audit()
    assert (audit.balanced, audit.rows_done, audit.rows_live) == (True, 24, 0)
    latest, weights = stand_ins.final_weights(queue)
    assert latest == version
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor), name


def test_a_checkpoint_of_another_model_is_refused(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    trained(queue, stand_ins.values(model), tmp_path / "run")
    other = tmp_path / "other"
    make(other, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    given = stand_ins.values(other, checkpoint={"resume": str(tmp_path / "run")})
    with pytest.raises(UsageError, match=r"is of another model: .* differ; give its model"):
        stand_ins.train(queue.address, given, str(tmp_path / "next"))


# ---------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("parallel", ["fsdp2", *only_long("ddp")])
def test_two_ranks_learn_what_one_process_learns(parallel: str, model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    given = stand_ins.values(model, steps=3)
    with tq.connect() as alone, stand_ins.table_of(alone, stand_ins.job_of(given), follows=False):
        stand_ins.train(alone.address, given, str(tmp_path / "alone"))
        wanted = stand_ins.final_weights(alone)[1]
    given["trainer"] |= {"parallel": parallel, "ranks": 2, "micro_tokens": 24}
    with stand_ins.table_of(queue, stand_ins.job_of(given), follows=False) as table:
        ranks = [started(queue.address, given, str(tmp_path / "ranks"), None, rank) for rank in range(2)]
        assert [ended(rank) for rank in ranks] == [0, 0]
        assert (table.audit().rows_done, table.audit().rows_live) == (18, 0)
    version, weights = stand_ins.final_weights(queue)
    assert version == 3
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    assert Checkpoints(tmp_path / "ranks" / "checkpoints" / "train").steps() == [2, 3]


def test_adapters_are_trained_published_merged_and_resumed(model: Path, queue: tq.Queue, tmp_path: Path) -> None:
    given = stand_ins.values(model, trainer={"lora_rank": 2}, weights={"lora": "merged"})
    trained(queue, given, tmp_path)
    version, weights = stand_ins.final_weights(queue)
    assert version == 4
    assert not any("lora" in name for name in weights)
    with tq.connect() as other, stand_ins.table_of(other, stand_ins.job_of(given | {"steps": 5})):
        stand_ins.train(other.address, given | {"steps": 5}, str(tmp_path))
        assert stand_ins.final_weights(other)[0] == 5


def test_adapters_travel_alone_and_are_merged_to_what_a_trainer_would_have_merged(model: Path, tmp_path: Path) -> None:
    found, names_of, written = dict[str, Any](), dict[str, set[str]](), dict[str, list[int]]()
    for lora in ("adapter", "merged"):
        given, told = stand_ins.values(model, trainer={"lora_rank": 2}, weights={"lora": lora}), list[Any]()
        with tq.connect() as queue, stand_ins.table_of(queue, stand_ins.job_of(given), follows=False):
            stand_ins.train(queue.address, given, str(tmp_path / lora), told)
            with queue.weights(names.POLICY).pull(timeout_s=0) as weights:
                found[lora] = {name: tensor.clone() for name, tensor in ChannelWeights(queue.address, weights)}
                names_of[lora] = set(weights)
        written[lora] = [event["bytes"] for event in events(told, "publication")]
    assert names_of["merged"] == found["merged"].keys() == found["adapter"].keys()
    added = {name.rpartition(".")[2] for name in names_of["adapter"] - names_of["merged"]}
    assert added == {"lora_a", "lora_b", "lora_scale"}
    assert [name for name, tensor in found["merged"].items() if not torch.equal(found["adapter"][name], tensor)] == []
    assert max(written["adapter"][1:]) < 0.2 * written["merged"][0]
