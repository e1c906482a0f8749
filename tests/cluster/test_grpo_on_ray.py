"""The GRPO job on a Ray cluster of four nodes, of which one is removed: as many rows are trained, each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("reasoning_gym")
ray = pytest.importorskip("ray", reason="make test-ray has Ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

import transferqueue as tq  # noqa: E402
from tests.cluster.shards import shards  # noqa: E402
from tests.workflows.test_demo import SMALL  # noqa: E402
from transferqueue.cluster.on_ray.shard_actors import PER_NODE, places  # noqa: E402
from transferqueue.workflows.flow.events import WORK, Event, Figures, TimeSpan  # noqa: E402
from transferqueue.workflows.grpo.job import JobSettings  # noqa: E402
from transferqueue.workflows.grpo.on_ray import run_demo_on_ray  # noqa: E402
from transferqueue.workflows.grpo.run import RunOutcome  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SETTINGS = JobSettings(learning=replace(SMALL, steps=6), rollouts=2)
REMOVED_AT_STEP = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def workers(cluster: Any) -> Iterator[list[Any]]:
    """Three nodes beside the head's; what is left of them goes with the test."""
    added = [cluster.add_node(num_cpus=2) for _ in range(3)]
    yield added
    for node in set(added) & set(cluster.list_all_nodes()):
        cluster.remove_node(node)


class Removal:
    """Removes, at a step, the node in whose shard the prompts lie. Its stages run there too."""

    def __init__(self, cluster: Any, workers: list[Any]) -> None:
        self.cluster = cluster
        self.nodes = {node.node_id: node for node in workers}
        self.order = places(ray.nodes(), ray.get_runtime_context().get_node_id(), PER_NODE)
        self.address = ""
        self.doomed = ""
        self.done = False

    def options(self) -> dict[str, dict[str, Any]]:
        """Of every worker node some stage, rollouts apart; the trainer is with the server."""
        head = ray.get_runtime_context().get_node_id()
        stages = {"train": head, "prompts": self.order[0], "rollout-0": self.order[0], "rollout-1": self.order[1]}
        stages |= {"reward": self.order[2], "advantage": self.order[2]}
        return {
            stage: {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
            for stage, node in stages.items()
        }

    def started(self, service: tq.Deployment, _labels: object) -> None:
        self.address = service.address

    def __call__(self, label: str, event: Event) -> None:
        """The first put of prompts is the first of all: the trainer is warming up. It makes one shard less empty."""
        if label == "prompts-0" and isinstance(event, TimeSpan) and event.name == WORK and not self.doomed:
            with tq.connect(self.address) as queue:
                fullest = max(shards(queue), key=lambda one: one["used_bytes"])
            self.doomed = self.order[int(fullest["label"].rpartition("-")[2])]
        if isinstance(event, Figures) and event.values.get("step") == REMOVED_AT_STEP and not self.done:
            self.done = True
            self.cluster.remove_node(self.nodes[self.doomed])


def run(settings: JobSettings, removal: Removal, directory: Path) -> tuple[RunOutcome, list[Figures]]:
    steps: list[Figures] = []

    def observe(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == "step":
            steps.append(event)
        removal(label, event)

    outcome = run_demo_on_ray(
        settings, directory=directory, observe=observe, started=removal.started, options=removal.options()
    )
    print(f"GRPO on four nodes, one removed: {outcome.summary.seconds:.1f} s, {outcome.audit}")
    return outcome, steps


def check(outcome: RunOutcome, steps: list[Figures]) -> None:
    """As many rows were trained as were to be, in so many steps, each once; and all that were put are accounted for."""
    assert [step.values["step"] for step in steps] == list(range(1, SETTINGS.learning.steps + 1))
    assert sum(step.values["rows"] for step in steps) == outcome.audit.done == SETTINGS.rows_total
    assert (outcome.audit.live, outcome.audit.put) == (0, outcome.audit.done + outcome.audit.dropped_rows)
    assert set(outcome.summary.staleness_histogram) <= {"0", "1"}
    assert 0 <= outcome.summary.heldout_reward_after <= 1
    assert all(path.stat().st_size for path in outcome.files)


def test_rows_lost_with_a_node_are_replaced(cluster: Any, workers: list[Any], tmp_path: Path) -> None:
    removal = Removal(cluster, workers)
    outcome, steps = run(SETTINGS, removal, tmp_path / "run")
    check(outcome, steps)
    assert removal.done
    assert outcome.audit.dropped.get("lost", 0) > 0


def test_with_replicas_none_is_lost(cluster: Any, workers: list[Any], tmp_path: Path) -> None:
    removal = Removal(cluster, workers)
    outcome, steps = run(replace(SETTINGS, replicas=2), removal, tmp_path / "run")
    check(outcome, steps)
    assert removal.done
    assert set(outcome.audit.dropped) <= {"surplus"}


def test_the_command_runs_the_job_on_the_cluster(cluster: Any, workers: list[Any], tmp_path: Path) -> None:
    """Joined by RAY_ADDRESS, from a driver of its own; nothing of it is left afterwards."""
    command = ("demo", "--on", "ray", "--dataset", "spell_backward", "--steps", "2", "--out", str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-m", "transferqueue.cli", *command],
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5 processes: prompts-0, " in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["rows_done"]) == (2, 2048)
    assert [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"].startswith("grpo-")] == []
