"""Workflows, container file, compose file and manifests, read by the linters and schemas of their formats:
`make test-deploy` has them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
KUBERNETES = "1.35"
"""The oldest release of Kubernetes that is still maintained."""


def program(name: str) -> str:
    """A linter beside this Python; skips where it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"make test-deploy has {name}")
    return found


def accepted(*command: object) -> None:
    """The linter finds nothing."""
    ran = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_workflows_are_sound() -> None:
    """Syntax, expressions, events, permissions, names of actions' inputs; and their scripts, by shellcheck."""
    accepted(program("actionlint"), "-shellcheck", program("shellcheck"), *WORKFLOWS)


def test_the_workflows_and_the_compose_file_fit_their_schemas() -> None:
    checker = program("check-jsonschema")
    accepted(checker, "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    accepted(checker, "--builtin-schema", "vendor.compose-spec", ROOT / "deploy/container/compose.yaml")


def test_the_container_file_is_sound() -> None:
    accepted(program("hadolint"), ROOT / "deploy/container/Dockerfile")


def test_shell_scripts_are_sound() -> None:
    accepted(program("shellcheck"), *sorted(ROOT.glob("deploy/**/*.sbatch")))


def test_manifests_fit_the_schemas_of_kubernetes() -> None:
    """Of Ray's own kinds, for which there is no schema here, the templates of pods."""
    validator, yaml = (
        pytest.importorskip("kubernetes_validate", reason="make test-deploy has it"),
        pytest.importorskip("yaml"),
    )
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/queue.yaml").read_text()))
    for path in sorted(ROOT.glob("deploy/kuberay/*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            documents += list(templates(document)) if document["apiVersion"] == "ray.io/v1" else [document]
    assert len(documents) >= 6
    for document in documents:
        validator.validate(document, KUBERNETES, strict=True)


def templates(value: object) -> object:
    """Every pod template in a document, as a document of its own."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name == "template" and "spec" in entry:
                yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-ray"}, "template": entry}
            else:
                yield from templates(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from templates(entry)
