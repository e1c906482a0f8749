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
YAML = sorted(ROOT.glob("kuberay/*.yaml"))
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
    others = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.yaml") if path not in YAML)
    assert others == ["container/compose.yaml", "kubernetes/queue.yaml"]
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


# ---------------------------------------------------------------- without Ray


@pytest.fixture(scope="module")
def kubernetes():
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((ROOT / "kubernetes/queue.yaml").read_text()))


def test_the_server_on_kubernetes_is_confined_and_its_parts_fit(kubernetes):
    kinds = {document["kind"]: document for document in kubernetes}
    assert set(kinds) == {"Service", "StatefulSet", "NetworkPolicy"}
    labels = kinds["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert kinds["Service"]["spec"]["selector"] == labels
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (pod,) = pods(kinds["StatefulSet"]["spec"])
    assert pod["securityContext"]["runAsNonRoot"]
    volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    (server,) = pod["containers"]
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")
    arena = next(argument for argument in server["args"] if argument.startswith("--arena-bytes="))
    arena_gib = int(re.fullmatch(r"--arena-bytes=(\d+)GiB", arena)[1])
    shared_gib, memory_gib = (
        gibibytes(shared["emptyDir"]["sizeLimit"]),
        gibibytes(server["resources"]["limits"]["memory"]),
    )
    assert arena_gib < shared_gib < memory_gib


def options_of(command):
    return {option for parameter in command.params for option in parameter.opts}


def test_every_option_in_these_files_exists(kubernetes):
    """Also in compose.yaml and the Dockerfile."""
    yaml, typer = pytest.importorskip("yaml"), pytest.importorskip("typer")
    from transferqueue.cli.app import app

    commands = typer.main.get_command(app).commands
    known = options_of(commands["serve"]) | options_of(commands["top"])
    compose = yaml.safe_load((ROOT / "container/compose.yaml").read_text())["services"]
    dockerfile = (ROOT / "container/Dockerfile").read_text()
    (pod,) = pods(next(document for document in kubernetes if document["kind"] == "StatefulSet")["spec"])
    words = [
        *pod["containers"][0]["args"],
        *map(str, compose["queue"]["command"]),
        *re.findall(r'"(--[a-z-]+)"', dockerfile),
    ]
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= known
    assert len(used) >= 6


def test_the_worker_of_the_compose_file_works(tmp_path):
    """Its program, against a server of this test instead of the one in the other container."""
    yaml = pytest.importorskip("yaml")
    import transferqueue as tq

    worker = yaml.safe_load((ROOT / "container/compose.yaml").read_text())["services"]["worker"]
    with tq.connect("embedded", runtime=tmp_path) as queue:
        program = worker["command"][0].replace("ipc:///run/transferqueue/control.sock", queue.address)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['hello from a container']\n"), done.stderr


def test_the_container_is_built_from_what_is_here_and_runs_as_nobody_in_particular():
    text = (ROOT / "container/Dockerfile").read_text()
    for copied in re.findall(r"^COPY ([\w.]+) /", text, re.MULTILINE):
        assert (ROOT.parent / copied).exists(), copied
    assert re.search(r"^USER [1-9]\d+$", text, re.MULTILINE), "a number: a name says nothing where the image is not"
    assert (ROOT.parent / ".dockerignore").exists()


def test_the_workflows_run_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT.parent / "Makefile").read_text(), re.MULTILINE))
    for path in sorted((ROOT.parent / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 90, path
            runs = [step["run"] for step in job["steps"] if "run" in step]
            assert {target for run in runs for target in re.findall(r"\bmake ([a-z-]+)", run)} <= targets, path
