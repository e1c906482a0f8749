"""ROLL's batches in the drop-in, by ROLL's own code with `examples/stacks/roll.patch`, over Ray. `make test-roll` runs
it.

ROLL's schedulers and workers, which need GPUs, do not start here. A task of Ray does what they do to a batch. What it
reads is compared with the same batch of ROLL's default backend, which keeps the values in the batch.
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

from tests.storage.values_of_stacks import same
from transferqueue.adapters.transfer_queue_hook import FOLDER, activate
from transferqueue.errors import NotFound

activate()  # before ROLL, which imports transfer_queue
LOGS = tempfile.TemporaryDirectory(prefix="roll-logs-")
os.environ["ROLL_LOG_DIR"] = LOGS.name  # ROLL makes a folder for its logs where it is imported

from roll.configs.base_config import TransferBackendArguments
from roll.distributed.scheduler import transfer_backend
from roll.distributed.scheduler.protocol import DataProto

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # verl's distribution has a package `tests`, too
ROWS = 4
TENSORS, OBJECTS = ["input_ids", "response_mask", "scores"], ["multi_modal_inputs", "domain"]


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    """The backend, as ROLL's base pipeline starts it, configured as ROLL's page on it says."""
    path = os.pathsep.join([FOLDER, *(part for part in sys.path if part)])
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "ROLL_LOG_DIR": LOGS.name}},
    )
    try:
        storage = {"backend": {"SimpleStorage": {"num_data_storage_units": 16}}}
        transfer_backend.init_transfer_backend(
            TransferBackendArguments(backend_name="TransferQueue", backend_config=storage)
        )
        yield
    finally:
        transfer_backend.tq.close()
        ray.shutdown()


def batch() -> DataProto:
    """Tensors of one shape a row, and columns of objects as ROLL's multimodal pipeline has them."""
    images = np.empty(ROWS, object)
    images[:] = [
        {"pixel_values": torch.full((3, row + 1), float(row)), "image_grid_thw": torch.tensor([[1, row, 2]])}
        for row in range(ROWS)
    ]
    tensors = {
        "input_ids": torch.arange(ROWS * 6).reshape(ROWS, 6),
        "response_mask": torch.arange(ROWS * 6).reshape(ROWS, 6) % 5 > 1,
        "scores": torch.arange(ROWS) / 4,
    }
    domains = np.array(["math", "code", "math", "vqa"], dtype=object)
    return DataProto.from_dict(tensors, {"multi_modal_inputs": images, "domain": domains}, {"global_step": 3})


def sent(data: DataProto) -> DataProto:
    """The batch in another process: without the values that the first one still has."""
    received: DataProto = ray.get(ray.put(data))
    return received


def values(data: DataProto) -> dict[str, Any]:
    """All columns, read as ROLL's code reads them."""
    tensors = {name: data.batch[name] for name in TENSORS}
    return {**tensors, **{name: list(data.non_tensor_batch[name]) for name in OBJECTS}}


def log_probs(data: DataProto) -> DataProto:
    """What a worker of ROLL does around its model: read ahead, and go through micro-batches of shifted tokens."""
    data.prefetch()
    parts = [part.batch["input_ids"][:, 1:] * part.batch["response_mask"][:, 1:] for part in data.make_iterator(2, 1)]
    return DataProto.from_dict({"log_probs": -torch.cat(parts).float()})


@ray.remote
def worked(data: DataProto) -> tuple[dict[str, Any], DataProto]:
    """What a worker reads of a batch, and its results, put beside the rows of that batch."""
    results = log_probs(data)
    return values(data), DataProto.to_remote(results, ref_data=data)


def test_a_worker_reads_a_batch_and_puts_its_results_beside_it() -> None:
    remote = DataProto.to_remote(batch())
    read, results = ray.get(worked.remote(remote))
    assert same(values(batch()), read)
    joined = sent(remote.union(results))
    assert same(log_probs(batch()).batch["log_probs"], joined.batch["log_probs"])
    assert same(values(batch()), values(joined))
    assert joined.meta_info["global_step"] == 3


@pytest.mark.parametrize("ahead", [False, True], ids=["before they are read", "after they were read"])
def test_rows_are_chosen_and_joined_as_without_a_backend(ahead: bool) -> None:
    remote = DataProto.to_remote(batch())

    def received() -> DataProto:
        data = sent(remote)
        if ahead:
            data.prefetch()
        return data

    assert same(values(batch().select_idxs([2, 0])), values(received().select_idxs([2, 0])))
    assert same(values(batch().repeat(2)), values(received().repeat(2)))
    assert same(values(batch()), values(DataProto.concat(received().chunk(2))))
    groups = {name: values(rows) for name, rows in batch().group_by("domain").items()}
    assert same(groups, {name: values(rows) for name, rows in received().group_by("domain").items()})


def test_a_batch_that_was_dropped_is_gone() -> None:
    remote = DataProto.to_remote(batch())
    DataProto.drop(remote)
    with pytest.raises(NotFound, match="not found in table"):
        sent(remote).prefetch()
