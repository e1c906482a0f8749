"""ROLL's transfer backend on the drop-in, by ROLL's own code, over Ray. `make test-roll` runs it.

ROLL's workers, which need GPUs, do not start here: what they do to a batch is done by a task of Ray.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("roll") is None:
    pytest.skip("make test-roll fetches ROLL", allow_module_level=True)

import numpy as np
import ray
import torch

from transferqueue.adapters.transfer_queue_hook import FOLDER, activate

activate()  # before ROLL, which imports transfer_queue
LOGS = tempfile.TemporaryDirectory(prefix="roll-logs-")
os.environ["ROLL_LOG_DIR"] = LOGS.name  # else ROLL makes a folder where it is imported

from roll.configs.base_config import TransferBackendArguments
from roll.distributed.scheduler import transfer_backend

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
ROWS = 4


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """ROLL's backend, as its base pipeline starts it."""
    path = os.pathsep.join([FOLDER, *(part for part in sys.path if part)])
    ray.init(
        num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path, "ROLL_LOG_DIR": LOGS.name}}
    )
    try:
        transfer_backend.init_transfer_backend(TransferBackendArguments(backend_name="TransferQueue"))
        yield transfer_backend
    finally:
        transfer_backend.tq.close()
        ray.shutdown()


def columns() -> dict[str, Any]:
    """Tensors, and an object column as a multimodal pipeline of ROLL has it."""
    images = [
        {"pixel_values": torch.full((3, row + 1), float(row)), "image_grid_thw": torch.tensor([[1, row, 2]])}
        for row in range(ROWS)
    ]
    objects = np.empty(ROWS, object)
    objects[:] = images
    return {
        "input_ids": torch.arange(ROWS * 6).reshape(ROWS, 6),
        "response_mask": torch.ones(ROWS, 6, dtype=torch.bool),
        "multi_modal_inputs": objects,
        "domain": np.array(["math", "code", "math", "vqa"], dtype=object),
    }


def same_rows(read: Any, given: Any) -> bool:
    """Tensors come back jagged, as from the original."""
    return all(torch.equal(one, other) for one, other in zip(read.unbind(), given.unbind(), strict=True))


@ray.remote
def in_a_worker(batch: Any) -> tuple[dict[str, Any], Any]:
    """Read a batch that came without its values, and add a column, as a worker of ROLL does."""
    read = batch.materialize()
    given = {name: read[name] if torch.is_tensor(read[name]) else list(read[name]) for name in read.keys()}  # noqa: SIM118
    rewards = {"rewards": read["input_ids"].sum(1).float()}
    return given, transfer_backend.put(batch.partition, batch.row_ids(), rewards, len(batch))


def test_a_batch_comes_back_whole_in_another_process(backend: Any) -> None:
    given = columns()
    batch = backend.put("step-1", [f"row-{row}" for row in range(ROWS)], given, ROWS)
    read, added = ray.get(in_a_worker.remote(batch))
    assert set(read) == set(given)
    for name in ("input_ids", "response_mask"):
        assert same_rows(read[name], given[name])
    assert list(read["domain"]) == list(given["domain"])
    for before, after in zip(given["multi_modal_inputs"], read["multi_modal_inputs"], strict=True):
        assert set(after) == set(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(added.materialize(["rewards"])["rewards"], given["input_ids"].sum(1).float())


def test_chosen_rows_are_read_alone_and_dropped_rows_are_gone(backend: Any) -> None:
    given = columns()
    batch = backend.put("step-2", [f"row-{row}" for row in range(ROWS)], given, ROWS)
    batch.cache = None
    chosen = batch.select_idxs([2, 0]).materialize(["input_ids"])["input_ids"]
    assert same_rows(chosen, given["input_ids"][[2, 0]])
    batch.drop()
    with pytest.raises(Exception, match=r"not found|gone|row-"):
        backend.get("step-2", batch.row_ids(), ["input_ids"])
