"""`transferqueue adopt` beside the installed TRL: the keys and the defaults of its table are TRL's."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

if importlib.util.find_spec("trl") is None or importlib.util.find_spec("yaml") is None:
    pytest.skip("make test-engines installs TRL", allow_module_level=True)

from trl import GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from transferqueue.workflows.adopt.apply import rule_of
from transferqueue.workflows.adopt.stacks.trl import TRL

pytestmark = pytest.mark.slow
FIELDS = {field.name: field.default for of in (ModelConfig, GRPOConfig) for field in dataclasses.fields(of)}


def test_the_defaults_are_trls() -> None:
    launcher = {"num_processes"}  # an argument of accelerate
    assumed = {name: value for name, value in TRL.defaults.items() if name not in launcher}
    assert {name: FIELDS.get(name) for name in assumed} == assumed


def test_every_option_of_trls_script_has_its_place() -> None:
    """None falls through as unknown."""
    options = [field.name for field in dataclasses.fields(GRPOScriptArguments)] + list(FIELDS)
    assert [name for name in options if rule_of(TRL, name) is None] == []


def test_a_key_of_the_table_is_one_of_trls_or_of_its_script() -> None:
    old = {"max_prompt_length", "torch_dtype", "warmup_ratio", "use_liger_loss"}
    of_script = ("dataset", "reward_", "chat_template_path", "ignore_bias_buffers")
    script = {rule.name for rule in TRL.rules if rule.name.startswith(of_script)}
    launcher = {"num_processes", "num_machines", "config_file", "accelerate_config", "config", "overwrite_output_dir"}
    names = {rule.name for rule in TRL.rules if "*" not in rule.name} - old - script - launcher
    assert names - set(FIELDS) == set()
