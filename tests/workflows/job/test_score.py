"""The scoring processes of a job: what each gives, and which weights it scores with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.jobs import job as job_of
from transferqueue.errors import DeadlineExceeded

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transferqueue.adapters.scoring import (  # noqa: E402
    load_causal_lm,
    load_value_model,
    response_logprobs,
    response_values,
    teacher_top_k,
)
from transferqueue.adapters.weights import ModuleWeights  # noqa: E402
from transferqueue.workflows.flow.stage import Context  # noqa: E402
from transferqueue.workflows.job import names  # noqa: E402
from transferqueue.workflows.job.graph import create_table  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.stages import score  # noqa: E402
from transferqueue.workflows.job.tiny_model.make import make  # noqa: E402

PROMPTS = [np.array([3, 4, 5], np.int32), np.array([6], np.int32)]
RESPONSES = [np.array([7, 8], np.int32), np.array([9, 10, 11, 1], np.int32)]
COLUMNS = {"prompt_ids": PROMPTS, "response_ids": RESPONSES}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    make(place / "policy")
    make(place / "large", seed=1)
    make(place / "critic", kind="value")
    return place


def job(models: Path, kind: str, *changes: str) -> Job:
    used = {"model": "policy", "teacher": "large", "critic": "critic"}
    of_kind = {"ppo": ("model", "critic"), "distill": ("model", "teacher")}.get(kind, ("model",))
    paths = [f'{table}.path="{models / used[table]}"' for table in of_kind]
    return job_of(kind, *paths, "model.dtype=float32", "sampling.temperature=0.7", *changes)


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded") as queue:
        yield queue


def context(queue: tq.Queue, job: Job) -> Context:
    settings = msgspec.json.decode(msgspec.json.encode(job))
    return Context(queue=queue, table=create_table(queue, job), emit=lambda event: None, settings=settings)


class Batch:
    """Two rows generated with a version, as a stage reads them."""

    def __init__(self, version: int) -> None:
        self.policy_version = np.array([version] * len(PROMPTS), np.int64)

    def __getitem__(self, name: str) -> Any:
        return COLUMNS[name]


def scored(stage: Any, version: int = 0) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [None] * len(PROMPTS) for name in stage.gives}
    for part in stage(Batch(version)):
        for name, values in part.columns.items():
            for at, value in zip(part.at, values, strict=True):
                found[name][at] = value
    return found


def assert_near(found: list[Any], wanted: Any) -> None:
    np.testing.assert_allclose(np.concatenate(found), wanted.detach(), atol=1e-5)


def test_the_reference_is_the_policy_as_it_was(queue: tq.Queue, models: Path) -> None:
    wanted_of = load_causal_lm(models / "policy", dtype="float32", device="cpu")
    with score.reference(context(queue, job(models, "grpo-trainer-old"))) as stage:
        found = scored(stage)["ref_logprobs"]
    assert_near(found, response_logprobs(wanted_of, PROMPTS, RESPONSES, temperature=0.7))


def test_a_synchronised_reference_takes_the_newest_policy_every_so_many_steps(queue: tq.Queue, models: Path) -> None:
    policy = load_causal_lm(models / "policy", dtype="float32", device="cpu")
    given = job(models, "grpo-trainer-old", "reference.sync_every=2", "pacing.mode=sync")
    with score.reference(context(queue, given)) as stage, torch.no_grad():
        at_start = response_logprobs(policy, PROMPTS, RESPONSES, temperature=0.7)
        for version in (1, 2, 3):
            for parameter in policy.parameters():
                parameter.mul_(1.1)
            publish(queue, names.POLICY, version, policy)
            if version != 3:
                now = response_logprobs(policy, PROMPTS, RESPONSES, temperature=0.7)
            assert_near(scored(stage, version)["ref_logprobs"], at_start if version == 1 else now)


def test_the_teacher_gives_as_many_tokens_as_the_table_has(queue: tq.Queue, models: Path) -> None:
    wanted_of = load_causal_lm(models / "large", dtype="float32", device="cpu")
    with score.teacher(context(queue, job(models, "distill"))) as stage:
        found = scored(stage)
    ids, logprobs = teacher_top_k(wanted_of, PROMPTS, RESPONSES, k=4, temperature=0.7)
    assert np.array_equal(np.concatenate(found["teacher_ids"]), ids)
    assert_near(found["teacher_logprobs"], logprobs)


def test_the_drawn_token_alone_is_enough_for_the_reverse_direction(queue: tq.Queue, models: Path) -> None:
    given = job(models, "distill", "algorithm.top_k=0")
    with score.teacher(context(queue, given)) as stage:
        found = scored(stage)
    assert [row.tolist() for row in found["teacher_ids"]] == [row[:, None].tolist() for row in RESPONSES]


def publish(queue: tq.Queue, channel: str, version: int, model: Any) -> None:
    queue.weights(channel, keep=2).publish(version, dict(ModuleWeights(model)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_values_are_of_the_critic_as_it_is_trained(queue: tq.Queue, models: Path, mode: str) -> None:
    critic = load_value_model(models / "critic", dtype="float32", device="cpu")
    given = context(queue, job(models, "ppo", f"pacing.mode={mode}"))
    publish(queue, names.CRITIC, 0, critic)
    with score.value(given) as stage, torch.no_grad():
        assert_near(scored(stage)["values"], response_values(critic, PROMPTS, RESPONSES))
        critic.score.bias.add_(1.0)
        publish(queue, names.CRITIC, 1, critic)
        assert_near(scored(stage, version=1)["values"], response_values(critic, PROMPTS, RESPONSES))


def test_in_sync_mode_values_wait_for_the_version_that_their_rows_have(queue: tq.Queue, models: Path) -> None:
    critic = load_value_model(models / "critic", dtype="float32", device="cpu")
    given = context(queue, job(models, "ppo", "pacing.mode=sync"))
    publish(queue, names.CRITIC, 0, critic)
    with score.value(given) as stage, torch.no_grad():
        critic.score.bias.add_(1.0)
        learner = threading.Timer(0.1, publish, (queue, names.CRITIC, 3, critic))
        learner.start()
        assert_near(scored(stage, version=3)["values"], response_values(critic, PROMPTS, RESPONSES))
        learner.join()


def test_rows_whose_version_the_critic_never_publishes_end_the_wait(
    queue: tq.Queue, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "CRITIC_S", 0.05)
    monkeypatch.setattr(score, "FIRST_S", 0.05)
    given = context(queue, job(models, "ppo", "pacing.mode=sync"))
    with pytest.raises(DeadlineExceeded, match='no weights came on channel "rollouts/critic"'), score.value(given):
        pass
    publish(queue, names.CRITIC, 0, load_value_model(models / "critic", dtype="float32", device="cpu"))
    with (
        score.value(given) as stage,
        pytest.raises(DeadlineExceeded, match="rows of version 1 wait for that version of the critic, which is at 0"),
    ):
        scored(stage, version=1)


def test_in_the_order_of_the_data_a_score_does_not_depend_on_the_rows_beside_it(
    queue: tq.Queue, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rows a lease gets depends on the time; a run must repeat bit for bit."""
    critic = load_value_model(models / "critic", dtype="float32", device="cpu")
    publish(queue, names.CRITIC, 0, critic)
    with score.value(context(queue, job(models, "ppo", "reproducible=true"))) as stage:
        both = scored(stage)["values"]
        for row in range(len(PROMPTS)):
            monkeypatch.setattr(Batch, "__getitem__", lambda self, name, row=row: COLUMNS[name][row : row + 1])
            one = Batch(0)
            one.policy_version = one.policy_version[:1]
            alone = next(iter(stage(one))).columns["values"]
            np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(both[row]))


@pytest.mark.parametrize("name", [names.CRITIC, names.POLICY])
def test_in_the_order_of_the_data_each_row_is_scored_by_the_version_that_it_was_generated_with(
    queue: tq.Queue, models: Path, name: str
) -> None:
    """Rows of one lease may have different versions, and an older one may come after a newer one."""
    is_critic = name == names.CRITIC
    model = (load_value_model if is_critic else load_causal_lm)(
        models / ("critic" if is_critic else "policy"), dtype="float32", device="cpu"
    )
    kind, factory = ("ppo", score.value) if is_critic else ("grpo-trainer-old", score.proximal)
    given = context(queue, job(models, kind, "reproducible=true", "pacing.mode=async"))

    def alone(row: int) -> Any:
        rows = [PROMPTS[row]], [RESPONSES[row]]
        return response_values(model, *rows) if is_critic else response_logprobs(model, *rows, temperature=0.7)

    wanted = {}
    with torch.no_grad():
        for version in (0, 1):
            publish(queue, name, version, model)
            wanted |= {(version, row): alone(row).numpy() for row in range(len(PROMPTS))}
            for parameter in model.parameters():
                parameter.mul_(1.1)
    with factory(given) as stage:
        for versions in ([1, 0], [0, 1], [0, 0]):
            batch = Batch(0)
            batch.policy_version = np.array(versions)
            for part in stage(batch):
                ((row,), (values,)) = part.at, part.columns[stage.gives[0]]
                np.testing.assert_array_equal(values, wanted[versions[row], row])


def test_the_proximal_policy_follows_the_trained_one(queue: tq.Queue, models: Path) -> None:
    policy = load_causal_lm(models / "large", dtype="float32", device="cpu")
    given = context(queue, job(models, "grpo-trainer-old"))
    publish(queue, names.POLICY, 0, policy)
    with score.proximal(given) as stage:
        found = scored(stage)["prox_logprobs"]
    assert_near(found, response_logprobs(policy, PROMPTS, RESPONSES, temperature=0.7))
