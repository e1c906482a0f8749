"""What deploy/ has is well formed, says nothing that contradicts itself, and the Slurm script runs a job."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "deploy"
YAML = sorted(ROOT.rglob("*.yaml"))
SHELL = sorted(ROOT.rglob("*.sbatch"))
KINDS = {"RayCluster": "ray.io/v1", "RayJob": "ray.io/v1", "NetworkPolicy": "networking.k8s.io/v1"}
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/bin/sh\necho 127.0.0.1\n"


@pytest.fixture(scope="module")
def documents():
    yaml = pytest.importorskip("yaml")
    return [(path, one) for path in YAML for one in yaml.safe_load_all(path.read_text())]


def pods(value):
    """Every pod specification in a document."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for one in value.values():
            yield from pods(one)
    elif isinstance(value, list):
        for one in value:
            yield from pods(one)


def test_there_is_something_to_look_at():
    assert [path.name for path in YAML] == ["raycluster.yaml", "rayjob.yaml"]
    assert [path.name for path in SHELL] == ["ray.sbatch"]
    listed = set(re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text()))
    here = {
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert listed == here - {"README.md"}


def test_every_document_is_of_a_known_kind_and_named(documents):
    for path, document in documents:
        assert KINDS[document["kind"]] == document["apiVersion"], path
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", document["metadata"]["name"]), path
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}, path


def test_every_pod_is_confined_bounded_and_has_rays_token(documents):
    found = [(path, pod) for path, document in documents for pod in pods(document["spec"])]
    assert len(found) == 3
    for path, pod in found:
        for container in pod["containers"]:
            assert container["resources"]["limits"] == container["resources"]["requests"], path
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, path
            assert ":" in container["image"], path
            names = {one["name"]: one for one in container["env"]}
            assert names["RAY_AUTH_MODE"]["value"] == "token", path
            assert "secretKeyRef" in names["RAY_AUTH_TOKEN"]["valueFrom"], path


def test_ray_nodes_have_shared_memory_within_their_memory(documents):
    cluster = next(document["spec"] for _, document in documents if document["kind"] == "RayCluster")
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        (container,) = pod["containers"]
        mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volume = next(one for one in pod["volumes"] if one["name"] == mounted["/dev/shm"])
        assert volume["emptyDir"]["medium"] == "Memory"
        assert gibibytes(volume["emptyDir"]["sizeLimit"]) <= gibibytes(container["resources"]["limits"]["memory"]) / 2


def gibibytes(size):
    return int(re.fullmatch(r"(\d+)Gi", size)[1])


def test_the_job_runs_on_that_cluster_what_is_here(documents):
    cluster, job = (next(d for _, d in documents if d["kind"] == kind) for kind in ("RayCluster", "RayJob"))
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert job["spec"]["entrypoint"].split()[1].endswith("deploy/job.py")
    images = {container["image"] for one in (cluster, job) for pod in pods(one) for container in pod["containers"]}
    assert len(images) == 1


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_every_script_is_a_script_and_stops_at_its_first_error(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert re.findall(r"(?<![\"'\\{])\$[A-Za-z@]", re.sub(r"'[^']*'", "", text)) == [], "an expansion without quotes"
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, path], check=True, timeout=60)


def test_a_script_without_a_command_says_how_to_call_it(tmp_path):
    said = subprocess.run(["bash", SHELL[0]], capture_output=True, text=True, check=False, timeout=30, cwd=tmp_path)
    assert said.returncode == 2
    assert "usage: sbatch" in said.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_slurm_script_runs_the_job_and_leaves_nothing(tmp_path):
    """On this machine alone: srun here starts a step where it is called, as on the first machine of an allocation."""
    pytest.importorskip("ray", reason="make test-ray has Ray")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    short = Path(tempfile.mkdtemp(prefix="ray"))
    env = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": f"test-{os.getpid()}",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_SUBMIT_DIR": str(tmp_path / "work"),
        "TMPDIR": str(tmp_path / "work"),
        "RAY_TMPDIR": str(short),  # the path of a socket has room for 107 bytes
        "RAY_PORT": "26379",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ran = subprocess.run(
        ["bash", SHELL[0], sys.executable, ROOT / "job.py"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    shutil.rmtree(short)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "64 rows from 1 nodes, sum 2016" in ran.stdout
    assert list((tmp_path / "work").glob(".ray-token*")) == []
