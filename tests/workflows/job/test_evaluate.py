"""Held-out evaluation: which version, which figures, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import transferqueue as tq  # noqa: E402
from tests.workflows.job.policies import context_of, job_of, publish, table_of  # noqa: E402
from transferqueue.adapters.weights import ChannelWeights  # noqa: E402
from transferqueue.errors import UsageError  # noqa: E402
from transferqueue.workflows.flow.events import Event, Figures  # noqa: E402
from transferqueue.workflows.job.graph import evaluation_engine  # noqa: E402
from transferqueue.workflows.job.names import POLICY  # noqa: E402
from transferqueue.workflows.job.run.figures import HELD_OUT_FIGURES  # noqa: E402
from transferqueue.workflows.job.settings.job import Job  # noqa: E402
from transferqueue.workflows.job.stages.evaluate import (  # noqa: E402
    HeldWeights,
    end_evaluations,
    evaluate,
    request_evaluation,
)
from transferqueue.workflows.job.tiny_model.make import make, write_data  # noqa: E402

ROWS = 6
REWARD = "tests.workflows.job.length_reward:length"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    make(place, initializer_range=0.3)
    write_data(place, task="sum", train=20, test=20)
    return place


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


def job(directory: Path, **tables: Any) -> Job:
    evaluation = {"path": str(directory / "test.jsonl"), "rows": ROWS} | tables.pop("evaluation", {})
    reward = {"reward": [{"function": REWARD}]}
    return job_of(directory, **{"steps": 4, "evaluation": evaluation, **reward, **tables})


DESCRIBED = {figure.name for figure in HELD_OUT_FIGURES}


def is_described(name: str) -> bool:
    return any(name == each or (name.startswith(each) and each[-1] in "/@") for each in DESCRIBED)


def figures(queue: tq.Queue, settings: Job) -> list[dict[str, Any]]:
    """Serve the requests that are there, and return what was reported: figures that the reference describes."""
    events: list[Event] = []
    table = table_of(queue, settings)
    end_evaluations(queue)
    with evaluate(context_of(queue, table, settings, events)) as serve:
        serve()
    found = [event.values for event in events if isinstance(event, Figures)]
    assert [name for each in found for name in each if not is_described(name.removeprefix("hard/"))] == []
    return found


def test_the_first_version_is_handed_over_when_the_channel_keeps_it_no_longer(queue: tq.Queue) -> None:
    """An engine that reads the channel itself would not find it there."""
    channel = queue.weights(POLICY, keep=1)
    channel.publish(0, {"w": np.zeros(4, np.float32)})
    with HeldWeights(queue) as held:
        channel.publish(1, {"w": np.ones(4, np.float32)})
        with held.at(0) as (source, version):
            assert not isinstance(source, ChannelWeights)
            assert (version, dict(source)["w"].tolist()) == (0, [0.0] * 4)
        with held.at(1) as (source, version):
            assert isinstance(source, ChannelWeights)
            assert (version, dict(source)["w"].tolist()) == (1, [1.0] * 4)


def test_each_request_is_measured_with_its_version(queue: tq.Queue, directory: Path) -> None:
    settings = job(directory)
    for version, step in ((0, 0), (1, 2), (2, 4)):
        publish(queue, directory, version, scale=1.0 + version)
        request_evaluation(queue, step, version)
    request_evaluation(queue, 4, 2)
    found = figures(queue, settings)
    assert [(each["when"], each["step"], each["version"]) for each in found] == [
        ("before", 0, 0),
        ("during", 2, 1),
        ("after", 4, 2),
    ]
    for each in found:
        assert each["rows"] == ROWS
        assert each["reward"] == pytest.approx(each[f"reward/{REWARD}"], rel=1e-6)
        assert 0 < each["tokens"] <= 12
    assert len({each["reward"] for each in found}) > 1


def test_the_first_version_is_held_until_it_is_evaluated(queue: tq.Queue, directory: Path) -> None:
    settings = job(directory)
    events: list[Event] = []
    table = table_of(queue, settings)
    publish(queue, directory, 0, keep=1)
    with evaluate(context_of(queue, table, settings, events)) as serve:
        for version in (1, 2, 3):
            publish(queue, directory, version, keep=1)
        request_evaluation(queue, 0, 0)
        request_evaluation(queue, 1, 1)
        end_evaluations(queue)
        end_evaluations(queue)
        request_evaluation(queue, 2, 2)
        serve()
    found = [event.values for event in events if isinstance(event, Figures)]
    assert [(each["step"], each["version"], each.get("asked_version")) for each in found] == [(0, 0, None), (1, 3, 1)]


def test_greedy_evaluation_repeats_and_samples_differ(queue: tq.Queue, directory: Path) -> None:
    publish(queue, directory, 0)
    settings = job(directory, evaluation={"samples": 3, "temperature": 1.0})
    for step in (0, 1):
        request_evaluation(queue, step, 0)
    first, second = figures(queue, settings)
    assert first["rows"] == 3 * ROWS
    assert first["reward"] == second["reward"]


def test_distillation_is_measured_by_the_divergence_from_the_teacher(queue: tq.Queue, directory: Path) -> None:
    """Of a teacher that is the student it is 0; of another it is positive."""
    for seed, low, high in ((0, -1e-5, 1e-5), (1, 0.01, 100)):
        with tq.connect() as fresh:
            teacher = directory / f"teacher-{seed}"
            make(teacher, initializer_range=0.3, seed=seed)
            publish(fresh, directory, 0)
            request_evaluation(fresh, 0, 0)
            settings = job(
                directory,
                reward=[],
                algorithm={"kind": "distill"},
                teacher={"path": str(teacher)},
                sampling={"group_size": 1, "tokens_max": 12},
            )
            (found,) = figures(fresh, settings)
            assert low < found["kl"] < high
            assert found["rows"] == ROWS


def test_sft_is_measured_by_the_loss_of_held_out_responses(queue: tq.Queue, directory: Path) -> None:
    settings = job(
        directory,
        reward=[],
        engine=[],
        algorithm={"kind": "sft"},
        data={"path": str(directory / "train.jsonl"), "template": "{question}", "response": "answer"},
    )
    publish(queue, directory, 0)
    request_evaluation(queue, 0, 0)
    (found,) = figures(queue, settings)
    assert found["rows"] == ROWS
    assert 2 < found["loss"] < 12


def test_episodes_are_evaluated_as_they_are_trained(queue: tq.Queue, directory: Path) -> None:
    settings = job(directory, reward=[], environment=[{"factory": "examples/jobs/environments.py:calculator"}])
    publish(queue, directory, 0)
    request_evaluation(queue, 0, 0)
    (found,) = figures(queue, settings)
    assert found["rows"] == ROWS
    assert 1 <= found["turns"] <= 3
    assert np.isfinite(found["reward"])


def test_the_process_ends_with_the_job_if_nobody_ends_the_evaluations(
    queue: tq.Queue, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferqueue.workflows.job.stages.evaluate._WAIT_S", 0.05)
    settings = job(directory)
    table = table_of(queue, settings)
    publish(queue, directory, 0)
    table.seal()
    with evaluate(context_of(queue, table, settings, [])) as serve:
        serve()


def test_a_server_that_generates_for_training_does_not_evaluate(directory: Path) -> None:
    server = {"kind": "vllm_server", "url": "http://127.0.0.1:9", "slots": 7}
    assert evaluation_engine(job(directory, engine=[server])).kind == "transformers"
    assert evaluation_engine(job(directory, engine=[server])).slots == 7
    here = {"kind": "transformers", "options": {"attn_implementation": "eager"}}
    assert evaluation_engine(job(directory, engine=[server, here])).options == here["options"]
    wide = {"kind": "vllm", "tensor_parallel": 2, "count": 4}
    assert evaluation_engine(job(directory, engine=[wide])).tensor_parallel == 2


def test_each_set_has_its_name_in_the_figures_and_passes_are_estimated(queue: tq.Queue, directory: Path) -> None:
    other = {"name": "hard", "path": str(directory / "train.jsonl"), "rows": 2, "samples": 4}
    settings = job(
        directory,
        evaluation={"sets": [other], "temperature": 1.0, "samples": 2, "pass_at": [1, 2, 4], "pass_reward": 5.0},
    )
    publish(queue, directory, 0)
    request_evaluation(queue, 0, 0)
    (found,) = figures(queue, settings)
    assert (found["rows"], found["hard/rows"]) == (2 * ROWS, 2 * 4)
    assert {name for name in found if "pass@" in name} == {"pass@1", "pass@2", *(f"hard/pass@{k}" for k in (1, 2, 4))}
    assert 0 <= found["hard/pass@1"] <= found["hard/pass@2"] <= found["hard/pass@4"] <= 1


def test_a_compared_figure_that_no_evaluation_has_is_an_error(queue: tq.Queue, directory: Path) -> None:
    settings = job(directory, evaluation={"patience": 1, "figure": "reward/gone"})
    publish(queue, directory, 0)
    request_evaluation(queue, 0, 0)
    with pytest.raises(UsageError, match=r"evaluation.figure='reward/gone' is not among the figures"):
        figures(queue, settings)
