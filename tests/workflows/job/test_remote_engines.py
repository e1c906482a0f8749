"""Engines at another site: which processes run where, what is refused, and a whole job of two sites."""

import os
import re
import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from tests.markdown import ROOT
from tests.workflows.job.jobs import GRPO
from tests.workflows.job.short_run import ROWS, STEPS, finished, lines, make_place, train
from transferqueue.cli.app import app
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.job.graph import stage_jobs
from transferqueue.workflows.job.run.remote_engines import check_site
from transferqueue.workflows.job.settings.read import job_from_values

ADDRESS = "tcp://127.0.0.1:7777"
ENGINES = [
    {"kind": "transformers", "count": 1},
    {"kind": "transformers", "count": 2, "site": "far"},
    {"kind": "transformers", "count": 1, "site": "farther"},
]
SITES = GRPO | {"engine": ENGINES, "queue": {"address": ADDRESS}}


def generating(jobs: list[StageJob]) -> list[str]:
    return [job.label for job in jobs if job.name == "rollout"]


def test_each_site_has_its_engines_and_the_own_site_everything_else() -> None:
    job = job_from_values(SITES)
    own, far, farther = (stage_jobs(job, site=site, weights=site and "ipc:///w") for site in ("", "far", "farther"))
    assert (generating(own), generating(far), generating(farther)) == (
        ["rollout-0"],
        ["rollout-1", "rollout-2"],
        ["rollout-3"],
    )
    assert len(far) == 2
    assert {"prompts", "reward", "advantage", "train"} <= {job.name for job in own}
    assert ({job.weights for job in own}, {job.weights for job in far}) == ({""}, {"ipc:///w"})
    assert msgspec.json.decode(msgspec.json.encode(far[0]), type=StageJob) == far[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"queue": {}}, r'engine.site="far" without queue.address'),
        ({"elastic": {"max": 6}}, "elastic.max=6 with engines at far, farther"),
    ],
)
def test_what_two_sites_cannot_have_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job_from_values(SITES | changes)


def test_a_site_without_engines_and_a_queue_that_it_cannot_reach_are_refused() -> None:
    job = job_from_values(SITES)
    check_site(job, "far")
    with pytest.raises(UsageError, match='site "near" has no engine; those of the job are far, farther'):
        check_site(job, "near")
    with pytest.raises(UsageError, match='site "" has no engine'):
        check_site(job, "")
    with pytest.raises(UsageError, match=r'queue.address="ipc:///q.sock" cannot be reached from site "far"'):
        check_site(job_from_values(SITES | {"queue": {"address": "ipc:///q.sock"}}), "far")


@pytest.mark.parametrize("words", [["--site", "far"], ["job.toml", "--site", "far", "--resume"]])
def test_the_command_refuses_a_site_with_what_is_for_whole_runs(words: list[str]) -> None:
    refused = CliRunner().invoke(app, ["train", *words])
    assert refused.exit_code
    assert "train --site runs engines of a job" in str(refused.exception) + refused.output


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_of_two_sites_trains_every_row_and_each_version_comes_by_the_relay(tmp_path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    place = make_place(tmp_path)
    text = re.sub("slots = 16 }", 'slots = 16, site = "far" }', (place / "job.toml").read_text())
    (place / "job.toml").write_text(text)
    serving = [sys.executable, "-m", "transferqueue.cli", "serve", "--tcp", "127.0.0.1:0", "--arena-bytes", "256MiB"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRANSFERQUEUE_RUNTIME": str(tmp_path / "runtime")}
    server = subprocess.Popen(
        [*serving, "--address", f"ipc://{tmp_path}/q.sock"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        _, ipc, tcp = server.stdout.readline().split()
        far = train(place, "job.toml", "--site", "far", "--set", f"queue.address={tcp}", "--out", "far")
        near = train(place, "job.toml", "--set", f"queue.address={ipc}", "--out", "near", "--json")
        summary = finished(near)
        _, said = far.communicate(timeout=120)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert far.returncode == 0, said
    assert (summary["steps"], summary["rows_done"]) == (STEPS, ROWS)
    assert "version 1 is here" in said
    assert sorted(log.name for log in (place / "far" / "logs").iterdir()) == ["rollout-0.log"]
    assert not (place / "near" / "logs" / "rollout-0.log").exists()
    assert len(lines(place / "near" / "steps.jsonl")) == STEPS
