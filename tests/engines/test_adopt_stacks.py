"""`transferqueue adopt` beside the installed verl, slime and OpenRLHF: no key or option of theirs is unknown."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("yaml")

from transferqueue.workflows.adopt.apply import rule_of
from transferqueue.workflows.adopt.report import adopt
from transferqueue.workflows.adopt.stacks.openrlhf import OPENRLHF
from transferqueue.workflows.adopt.stacks.slime import SLIME

pytestmark = pytest.mark.slow


def folder(package: str) -> Path:
    """Where a package is installed; skips where it is not."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"make test-{package} installs {package}")
    return Path(spec.origin).parent


@pytest.mark.parametrize("kind", ["ppo", "ppo_megatron", "ppo_veomni", "ppo_torchtitan"])
def test_every_key_of_verls_own_configuration_has_its_place(kind: str) -> None:
    """verl ships its whole configuration, as Hydra composes it."""
    adopted = adopt([str(folder("verl") / "trainer" / "config" / f"_generated_{kind}_trainer.yaml")], stack="verl")
    assert len(adopted.lines) > 500
    assert [line.key for line in adopted.lines if line.verdict == "unknown"] == []


def test_verls_own_file_is_read_and_its_groups_are_named() -> None:
    adopted = adopt([str(folder("verl") / "trainer" / "config" / "ppo_trainer.yaml")])
    assert [line.key for line in adopted.lines if line.verdict == "unknown"] == []
    assert any("actor_rollout_ref.actor" in note for note in adopted.notes)


def test_every_option_of_slimes_has_its_place() -> None:
    text = (folder("slime") / "utils" / "arguments.py").read_text()
    options = [name.replace("_", "-") for name in re.findall(r'"--([\w-]+)"', text)]
    assert len(options) > 150
    assert [name for name in options if rule_of(SLIME, name) is None] == []


def test_every_option_of_openrlhfs_has_its_place() -> None:
    options = re.findall(r'"--([\w.-]+)"', (folder("openrlhf") / "cli" / "train_ppo_ray.py").read_text())
    assert len(options) > 130
    assert [name for name in options if rule_of(OPENRLHF, name) is None] == []
