"""`transferqueue adopt` beside the installed TRL: the keys and the defaults of its table are TRL's."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

if importlib.util.find_spec("trl") is None or importlib.util.find_spec("yaml") is None:
    pytest.skip("make test-engines installs TRL", allow_module_level=True)

from trl import GRPOConfig, ModelConfig

from transferqueue.workflows.adopt.stacks.trl import TRL

pytestmark = pytest.mark.slow
FIELDS = {field.name: field.default for of in (ModelConfig, GRPOConfig) for field in dataclasses.fields(of)}


def test_the_defaults_are_trls() -> None:
    launcher = {"num_processes"}  # an argument of accelerate
    assumed = {name: value for name, value in TRL.defaults.items() if name not in launcher}
    assert {name: FIELDS.get(name) for name in assumed} == assumed


def test_a_key_of_the_table_is_one_of_trls_or_of_its_script() -> None:
    old = {"max_prompt_length", "torch_dtype", "warmup_ratio", "use_liger_loss"}
    script = {rule.name for rule in TRL.rules if rule.name.startswith(("dataset", "reward_", "chat_template_path"))}
    launcher = {"num_processes", "num_machines", "config_file", "accelerate_config", "config", "overwrite_output_dir"}
    names = {rule.name for rule in TRL.rules if not rule.name.endswith("*")} - old - script - launcher
    assert names - set(FIELDS) == set()
