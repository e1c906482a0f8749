"""A flow whose stages are Ray tasks: its rows are done, also when one of its processes is killed; a broken stage ends
it."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

import transferqueue as tq
from transferqueue.errors import AlreadyExists
from transferqueue.workflows.flow.draining import ADDED, REMOVED
from transferqueue.workflows.flow.events import Failure, Figures
from transferqueue.workflows.flow.flow import StageFailed
from transferqueue.workflows.flow.on_ray import RayFlow, run_on_ray
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Stage

ray = pytest.importorskip("ray", reason="make test-ray has Ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ROOT = Path(__file__).parents[2]
HERE = "tests.workflows.flow_stages"
DOUBLE = tq.Task("double", needs=["x"], gives=["y"], retry=tq.Retry(first_s=0.01))
WORKERS = {"runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}}, "num_cpus": 0.5}
OPTIONS = {"numbers": WORKERS, "double": WORKERS}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        cluster.add_node(num_cpus=2)
        with tq.deploy_ray() as deployment:
            yield deployment.address
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def queue(address):
    with tq.connect(address) as queue:
        queue.create_table(
            "t",
            fields=[tq.Field("x", "int64"), tq.Field("y", "int64")],
            tasks=[DOUBLE],
            pacing=tq.Pacing("double", 8),
            retention=tq.Manual(),
        )
        yield queue
        queue.drop_table("t")


def jobs(factory, marks=""):
    settings = {"total": 32, "marks": str(marks)}
    stage = Stage(task=DOUBLE, rows=4, at_least=1, failures_max=3)
    return [
        StageJob(name="numbers", table="t", factory=f"{HERE}:numbers", settings=settings),
        StageJob(name="double", table="t", factory=f"{HERE}:{factory}", stage=stage, settings=settings),
    ]


def test_all_rows_are_done_and_what_stages_tell_is_heard(queue, address):
    told = []
    run_on_ray(address, jobs("double"), observe=lambda label, event: told.append((label, event)), options=OPTIONS)
    assert queue.audit().tables["t"].rows_put == 32
    assert queue.stats().tables["t"].tasks["double"].done == 32
    assert {label for label, _ in told} == {"numbers-0", "double-0"}
    assert any(isinstance(event, Figures) and event.kind == "finished" for _, event in told)


def test_a_killed_process_is_started_again(queue, address, tmp_path):
    def observe(_label, event):
        if isinstance(event, Figures) and event.kind == "holding":
            sessions = queue.sessions().values()
            os.kill(next(one.pid for one in sessions if one.label == "double-0"), signal.SIGKILL)

    run_on_ray(address, jobs("hangs_in_its_first_life", tmp_path), observe=observe, options=OPTIONS)
    assert queue.stats().tables["t"].tasks["double"].done == 32


def test_a_broken_stage_ends_the_flow_and_leaves_no_session(queue, address):
    told = []
    with pytest.raises(
        StageFailed, match='and no try is left: StageFailedInProcess: stage "double" failed 3'
    ) as raised:
        run_on_ray(address, jobs("raises"), observe=lambda label, event: told.append(event), options=OPTIONS)
    assert raised.value.stage == "double-0"
    assert "Traceback" in raised.value.last_words
    assert any(isinstance(event, Failure) for event in told)


def run_changing(address, factory, marks, change):
    """Run `double` with a factory; `change(flow, kind)` hears the kinds of figures. Returns all events."""
    told = []

    def observe(label, event):
        told.append((label, event))
        if isinstance(event, Figures):
            change(flow, event.kind)

    with RayFlow(address, jobs(factory, marks), observe=observe, options=OPTIONS) as flow:
        flow.run()
    return told


def more():
    """One more process of the stage, which works."""
    return msgspec.structs.replace(jobs("double")[1], instance=1)


def test_a_job_is_added_and_one_that_drains_ends_the_rows_that_it_has(queue, address, tmp_path):
    (tmp_path / "go").touch()
    removed = []

    def change(flow, kind):
        if kind == "holding" and not removed:
            removed.append(flow.remove("double-0", deadline_s=60.0))
            flow.add(more())
            with pytest.raises(AlreadyExists, match='"double-1" runs already'):
                flow.add(more())

    told = run_changing(address, "waits_for_a_mark", tmp_path, change)
    assert removed[0].result(0).how == "drained"
    kinds = [(label, event.kind) for label, event in told if isinstance(event, Figures)]
    assert ("double-1", ADDED) in kinds
    assert ("double-0", "finished") in kinds
    assert ("double-0", REMOVED) in kinds
    stats = queue.stats().tables["t"].tasks["double"]
    assert (stats.done, queue.audit().tables["t"].rows_put) == (32, 32)


def test_after_the_deadline_a_job_is_killed_and_its_rows_are_done_by_others(queue, address, tmp_path):
    removed = []

    def change(flow, kind):
        if kind == "holding" and not removed:
            removed.append(flow.remove("double-0", deadline_s=0.0))
            flow.add(more())

    told = run_changing(address, "hangs_in_its_first_life", tmp_path, change)
    assert removed[0].result(0).how == "killed"
    assert [event.values["how"] for _, event in told if getattr(event, "kind", "") == REMOVED] == ["killed"]
    assert queue.stats().tables["t"].tasks["double"].done == 32


def test_jobs_that_work_only_together_are_started_again_together(queue, address, tmp_path):
    """The first waits for ever when the second is killed: it is ended, and both begin again; `prepare` is called when
    none lives."""
    settings = {"marks": str(tmp_path)}
    factory = f"{HERE}:works_only_together"
    pair = [
        StageJob(name="pair", table="t", factory=factory, settings=settings, loop=True, together="both", instance=at)
        for at in range(2)
    ]
    lives, prepared = [], []

    def observe(label, event):
        if isinstance(event, Figures) and event.kind == "life":
            lives.append((event.values["instance"], event.values["life"]))

    def prepare(together):
        prepared.append(together)

    with RayFlow(address, pair, observe=observe, options={"pair": WORKERS}, prepare=prepare) as flow:
        flow.run()
    assert (tmp_path / "1-0").exists()
    assert set(lives) >= {(0, 1), (1, 1)}  # what a process said just before it is killed may be lost
    assert prepared == ["both", "both"]
