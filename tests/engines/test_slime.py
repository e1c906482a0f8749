"""slime's data source with its buffer in the queue, on slime's own code. `make test-slime` runs it.

What needs SGLang and Megatron, which is everything but the data source, does not start here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("slime") is None:
    pytest.skip("make test-slime fetches slime", allow_module_level=True)

import torch
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.misc import load_function
from slime.utils.types import Sample

import transferqueue as tq
from transferqueue.adapters.trainers.slime import QueueDataSource
from transferqueue.errors import UsageError
from transferqueue.workflows.job.tiny_model.make import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = 6

WORKER = """
import json, sys
from argparse import Namespace
import transferqueue as tq
from transferqueue.adapters.trainers.slime import QueueDataSource

source = QueueDataSource(Namespace(**json.loads(sys.argv[1])), tq.connect(sys.argv[2]))
source.load(-1)
first, second = source.get_samples(2)
first[0].response = "half"
source.add_samples([first])      # begun, and not finished
source.save(0)
source.add_samples([second])     # read before the checkpoint, and back after it
again, *_, third = source.get_samples(3)
source.add_samples([third])      # read after the checkpoint
print(again[0].response, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """slime's arguments of a data set of six prompts, as far as a data source reads them."""
    folder = tmp_path_factory.mktemp("slime")
    make(folder / "model")
    rows = [{"prompt": f"sort {place}", "label": str(place)} for place in range(PROMPTS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "hf_checkpoint": str(folder / "model"),
        "prompt_data": str(folder / "data.jsonl"),
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "rollout_max_prompt_len": None,
        "rollout_seed": 1,
        "rollout_shuffle": False,
        "rollout_global_dataset": True,
        "n_samples_per_prompt": 2,
        "dump_details": None,
        "buffer_filter_path": None,
    }


@pytest.fixture
def args(arguments: dict[str, Any], tmp_path: Path) -> Namespace:
    """These arguments, with a folder of checkpoints of their own."""
    return Namespace(**arguments, save=str(tmp_path / "run"), load=str(tmp_path / "run"))


def begun(group: list[Sample]) -> list[Sample]:
    """The group with a part of a response, as an aborted rollout leaves it."""
    for sample in group:
        sample.tokens, sample.response, sample.response_length = [5, 6, 7], "half", 2
        sample.rollout_log_probs, sample.status = [-0.25, -0.5], Sample.Status.ABORTED
        sample.rollout_routed_experts = torch.arange(6).reshape(2, 3)
    return group


def labels(groups: list[list[Sample]]) -> list[str | None]:
    return [group[0].label for group in groups]


def test_slime_finds_it_by_its_name() -> None:
    assert load_function("transferqueue.adapters.trainers.slime.QueueDataSource") is QueueDataSource


def test_groups_that_come_back_are_given_first_and_whole(args: Namespace) -> None:
    with tq.connect("embedded") as queue:
        source = QueueDataSource(args, queue)
        first, second = source.get_samples(2)
        source.add_samples([begun(first)])
        assert source.get_buffer_length() == 1
        again, third = source.get_samples(2)
        assert (labels([again, third]), labels([second])) == (["0", "2"], ["1"])
        for before, after in zip(first, again, strict=True):
            assert torch.equal(after.rollout_routed_experts, before.rollout_routed_experts)
            before.rollout_routed_experts = after.rollout_routed_experts = None
            assert after == before
        assert (source.get_buffer_length(), len(source)) == (0, PROMPTS)


def test_a_kill_loses_no_prompt_and_doubles_none(args: Namespace) -> None:
    with tq.connect("embedded") as queue:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(vars(args)), queue.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == "half"
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        source = QueueDataSource(args, queue)
        source.load(0)
        groups = source.get_samples(PROMPTS)
        assert labels(groups) == ["0", "1", "2", "3", "4", "5"]
        assert groups[0][0].response == "half"
        assert queue.audit().balanced


def test_a_job_that_begins_anew_has_an_empty_table(args: Namespace) -> None:
    with tq.connect("embedded") as queue:
        source = QueueDataSource(args, queue)
        source.add_samples([begun(group) for group in source.get_samples(2)])
        source.get_samples(1)
        source.save(3)
        anew = QueueDataSource(args, queue)
        anew.load(-1)
        assert anew.get_buffer_length() == 0
        assert labels(anew.get_samples(1)) == ["0"]


def test_slimes_own_buffer_skips_the_prompt(args: Namespace) -> None:
    """The defect that the queue mends: the list of groups is not in slime's checkpoint."""
    source = RolloutDataSourceWithBuffer(args)
    (first,) = source.get_samples(1)
    source.add_samples([begun(first)])
    source.save(0)
    restarted = RolloutDataSourceWithBuffer(args)
    restarted.load(0)
    assert labels(restarted.get_samples(2)) == ["1", "2"]


def test_what_is_not_possible_is_refused(args: Namespace) -> None:
    with tq.connect("embedded") as queue:
        source = QueueDataSource(args, queue)
        (group,) = source.get_samples(1)
        with pytest.raises(UsageError, match="group 1 has 1 samples; --n-samples-per-prompt is 2"):
            source.add_samples([group, group[:1]])
        assert source.get_buffer_length() == 0
        args.buffer_filter_path = "mine.filter"
        with pytest.raises(UsageError, match=r"--buffer-filter-path mine\.filter filters slime's own list"):
            QueueDataSource(args, queue)
