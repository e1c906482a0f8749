"""Settings of the drop-in's `init`: each that is given is used, or named."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensordict")

from transferqueue.adapters.transfer_queue.settings import StorageSettings, storage_settings
from transferqueue.errors import UsageError

BY = "values go by shared memory on a node"


def settings(nodes: int = 1, backend: str = "SimpleStorage", **storage: Any) -> StorageSettings:
    return storage_settings({"backend": {"storage_backend": backend, backend: storage}}, nodes)


def test_one_node_has_one_memory_of_the_given_size() -> None:
    found = settings(total_storage_bytes="64GiB", total_storage_size=500, num_data_storage_units=None)
    assert (found.bytes_max, found.rows_max, found.is_spread, found.unused) == (64 << 30, 500, False, [])


def test_several_nodes_share_a_deployment() -> None:
    found = settings(3, total_storage_bytes=1 << 30)
    assert (found.is_spread, found.shards, found.spill_dir) == (True, "per-node", "")
    found = settings(3, num_data_storage_units=4, required_node_resource="memory_node")
    assert (found.shards, found.resources, found.unused) == (4, {"memory_node": 0.001}, [])


def test_ssd_offload_is_a_directory_for_what_memory_does_not_hold() -> None:
    found = settings(ssd_offload={"enabled": True, "path": "/disk/spill", "threshold_bytes": 4096})
    assert (found.is_spread, found.spill_dir) == (True, "/disk/spill")
    assert found.unused == ["backend.SimpleStorage.ssd_offload.threshold_bytes"]
    assert settings(ssd_offload={"enabled": False, "path": None, "threshold_bytes": 4096}).unused == []


def test_what_is_not_used_is_named() -> None:
    found = storage_settings(
        {
            "metrics": {"enabled": True, "port": 0},
            "controller": {"sampler": "SequentialSampler", "zmq_info": None, "polling_mode": True, "retries": 3},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {"num_data_storage_units": 2, "payload_transfer": {"mode": "rdma"}, "zmq_info": None},
                "MooncakeStore": {"auto_init": True},
            },
            "lock": {"enabled": True, "num_shards": 4},
            "trace": {"enabled": True},
        },
        1,
    )
    assert found.unused == [
        "controller.retries",
        "lock.num_shards",
        "trace",
        "backend.SimpleStorage.num_data_storage_units (one node has one shared memory)",
        f"backend.SimpleStorage.payload_transfer.mode ({BY}, and by one TCP stream between nodes)",
    ]
    assert settings(backend="MooncakeStore").unused == [
        "backend.storage_backend MooncakeStore (this queue stores everything itself)"
    ]


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ({"num_data_storage_units": "two"}, "num_data_storage_units is 'two'; give a number from 1"),
        ({"ssd_offload": {"enabled": True}}, "ssd_offload.enabled is true with path None on 2 Ray nodes"),
        ({"ssd_offload": 3}, "backend.SimpleStorage.ssd_offload is 3; give a section of settings"),
        ({"total_storage_bytes": "many"}, "many"),
    ],
)
def test_a_setting_of_a_wrong_kind_is_refused(storage: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(2, **storage)
