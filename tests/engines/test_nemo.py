"""NeMo-RL's data plane on the queue, against its own interface and by its own tests. `make test-nemo` runs it.

Its tests lie in its source, not here. They run twice: on our client, which takes the place of its in-memory client and
of what its factory builds; and on its own adapter, unchanged, with the drop-in under it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

if importlib.util.find_spec("nemo_rl") is None:
    pytest.skip("make test-nemo fetches NeMo-RL", allow_module_level=True)

import numpy as np
import torch
from nemo_rl.data_plane import DataPlaneClient, KVBatchMeta, build_data_plane_client, factory
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.registry import load
from transferqueue.adapters.trainers import nemo_rl
from transferqueue.errors import DeadlineExceeded, Impossible, SchemaError, UsageError
from transferqueue.wire.answers.stats import TableStats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DEADLINE_S = 60.0
IDS = ["a", "b", "c", "d"]
CONFIG = {"enabled": True, "impl": "transfer_queue", "backend": "simple", "storage_capacity": 1024}

OURS = """
import sys, types

import pytest

import transferqueue as tq
from transferqueue.adapters.trainers import nemo_rl

nemo_rl.activate()
made = []


class NoOpDataPlaneClient(nemo_rl.QueueDataPlaneClient):
    def __init__(self):
        super().__init__(tq.connect())
        made.append(self)


module = sys.modules["nemo_rl.data_plane.adapters.noop"] = types.ModuleType("noop")
module.NoOpDataPlaneClient = NoOpDataPlaneClient


@pytest.fixture(autouse=True)
def ended():
    yield
    while made:
        made.pop().close()
"""
DROP_IN = """
from transferqueue.adapters.transfer_queue_hook import activate

activate()
"""

_TRAINERS = "imports trainers, which need more than the data plane does"
_ADAPTER = "tests private parts of its adapter, whose place ours takes; it runs with the drop-in"
_PLAIN = "its interface has both tensors and plain values; its in-memory client alone refuses the latter"
LEFT_OUT = {
    "test_run_grpo_dispatches_both_trainers": _TRAINERS,
    "test_sync_trainer_rejects_message_level_advantage_penalties": _TRAINERS,
    "test_sync_utils_module_imports": _TRAINERS,
    "test_sync_rollout_actor_prompt_extraction_and_masks_match_grpo": _TRAINERS,
    "test_apply_dynamic_sampling": _TRAINERS,
    "test_leader_broadcast_round_trip": (
        "two processes of torch.distributed, against a short deadline; no data plane is in it"
    ),
    "test_kv_batch_put_rejects_non_tensor_leaves": _PLAIN,
    "test_double_register_partition_is_idempotent_overwrite": "looks into its in-memory client",
}
"""Tests of its data plane that are not run, by how their names begin, and why."""


# ------------------------------------------------------------ its own tests


@pytest.mark.parametrize(
    ("conftest", "files", "least"),
    [
        (OURS, ["."], 110),
        (DROP_IN, ["test_tq_lifecycle.py", "test_seqpack_equivalence.py", "test_codec_mooncake.py"], 24),
    ],
    ids=["ours", "drop-in"],
)
def test_its_tests_pass(conftest: str, files: list[str], least: int, tmp_path: Path) -> None:
    """least: how many must have passed, so that none is lost by a skip."""
    theirs = Path(factory.__file__).parents[2] / "tests" / "unit" / "data_plane"
    shutil.copytree(theirs, tmp_path / "theirs")
    (tmp_path / "conftest.py").write_text(conftest)
    unwanted = [f"not {name}" for name in LEFT_OUT]
    ignored: list[str] = []
    if conftest == OURS:
        ignored = [
            f"--ignore=theirs/{name}" for name in ("test_codec_mooncake.py", "test_local_node_ip.py")
        ]  # _ADAPTER
        unwanted.append("not test_promote_1d and not test_register_partition_uses_unique_schema_warmup_key")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", " and ".join(unwanted), *ignored]
        + [f"theirs/{file}" for file in files],
        cwd=tmp_path,
        env={**os.environ, "TRANSFERQUEUE_SHIM_LOCAL": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert passed is not None
    assert int(passed[1]) >= least, run.stdout[-2000:]


# ------------------------------------------------------------ its interface


def test_every_method_is_called_as_its_interface_says() -> None:
    """A method or an argument that it gains, loses or renames fails here."""
    assert load("nemo-rl") is nemo_rl.QueueDataPlaneClient
    names = DataPlaneClient.__abstractmethods__
    assert {
        name for name, value in vars(nemo_rl.QueueDataPlaneClient).items() if callable(value) and name[0] != "_"
    } == names
    for name in names:
        theirs, ours = (
            inspect.signature(getattr(cls, name)) for cls in (DataPlaneClient, nemo_rl.QueueDataPlaneClient)
        )
        assert [(one.name, one.kind, one.default) for one in theirs.parameters.values()] == [
            (one.name, one.kind, one.default) for one in ours.parameters.values()
        ], name


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        yield found


@pytest.fixture
def client(queue: tq.Queue) -> Iterator[nemo_rl.QueueDataPlaneClient]:
    with_address = nemo_rl.build({**CONFIG, "controller_address": queue.address})
    with_address.register_partition("train", ["x"], 4, ["logprob", "train"])
    yield with_address
    with_address.close()


def columns(**values: Any) -> TensorDict:
    return TensorDict(values, batch_size=[len(next(iter(values.values())))])


def test_bad_calls_are_refused_and_change_nothing(client: nemo_rl.QueueDataPlaneClient, queue: tq.Queue) -> None:
    client.put_samples(IDS, "train", columns(x=torch.arange(4)), [{"input_lengths": 3}] * 4)
    before = queue.stats().tables
    for call, error, text in [
        (lambda: client.register_partition("val", [], 1025, []), Impossible, "storage_capacity is 1024; raise it"),
        (
            lambda: client.claim_meta("val", "train", ["x"], 1),
            KeyError,
            "'val' is not there; register_partition makes it",
        ),
        (lambda: client.claim_meta("train", "trian", ["x"], 1), KeyError, "'trian' is not registered as a consumer"),
        (lambda: client.claim_meta("train", "train", ["x"], 0), UsageError, "claims 0 samples"),
        (lambda: client.check_consumption_status("val", ["train"]), KeyError, "'val' is not there"),
        (
            lambda: client.put_samples(["a"], "train", columns(x=torch.arange(4))),
            UsageError,
            "fields of 4 samples for 1",
        ),
        (lambda: client.put_samples(["a"], "train", None, [{}, {}]), UsageError, "tags of 2 samples for 1"),
        (lambda: client.put_samples(IDS, "train", columns(x=torch.rand(4))), SchemaError, '"x" is int64'),
        (lambda: client.put_samples(["a"], "train", columns(o=objects(object()))), SchemaError, '"o"'),
        (lambda: client.get_samples(["a", "z"], "train", ["x"]), KeyError, r"\['z'\] not found"),
        (lambda: client.get_samples(["a"], "val", ["x"]), KeyError, "'val' not found"),
        (lambda: client.get_samples(["a"], "train", ["x", "y"]), KeyError, r"\['y'\] of partition 'train'"),
        (lambda: client.get_data(KVBatchMeta("train", None, ["a"])), ValueError, "names no fields"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert _timeless(queue.stats().tables) == _timeless(before)


def _timeless(tables: dict[str, TableStats]) -> dict[str, TableStats]:
    return {name: msgspec.structs.replace(table, age_s=None) for name, table in tables.items()}


def objects(*values: Any) -> Any:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def test_a_field_that_some_samples_lack_is_refused(client: nemo_rl.QueueDataPlaneClient) -> None:
    client.put_samples(IDS, "train", columns(x=torch.arange(4)))
    client.put_samples(["a"], "train", columns(y=torch.ones(1, 2)))
    assert client.get_samples(["a"], "train", ["y"])["y"].tolist() == [[1, 1]]
    with pytest.raises(KeyError):
        client.get_samples(["a", "b"], "train", ["y"])


def test_a_claim_is_for_one_task_and_once(client: nemo_rl.QueueDataPlaneClient) -> None:
    client.put_samples(IDS, "train", columns(x=torch.arange(4)), [{"input_lengths": n, "std": 0.5} for n in range(4)])
    client.register_partition("train", ["x", "y"], 4, ["train", "late"])  # again: nothing is lost
    first = client.claim_meta("train", "train", ["x"], 3)
    assert (first.sample_ids, first.sequence_lengths, first.fields) == (IDS[:3], [0, 1, 2], ["x"])
    assert first.tags is not None
    assert first.tags[2] == {"input_lengths": 2, "std": 0.5}
    with pytest.raises(UsageError, match=r"claims by other fields than \['x', 'y'\]"):
        client.claim_meta("train", "train", ["x", "y"], 1)
    with pytest.raises(DeadlineExceeded, match="waits for 2 rows"):
        client.claim_meta("train", "train", ["x"], 2, timeout_s=0.05)
    assert not client.check_consumption_status("train", ["train"])
    assert client.claim_meta("train", "train", ["x"], 8, blocking=False).sample_ids == IDS[3:]
    assert client.claim_meta("train", "train", ["x"], 8, blocking=False).sample_ids == []
    assert client.check_consumption_status("train", ["train"])
    assert not client.check_consumption_status("train", ["train", "late"])
    assert client.claim_meta("train", "late", ["x"], 4).sample_ids == IDS
    assert client.get_data(first)["x"].tolist() == [0, 1, 2]


def test_claims_wait_for_what_others_put_and_share_it(client: nemo_rl.QueueDataPlaneClient, queue: tq.Queue) -> None:
    with ThreadPoolExecutor(3) as pool:
        worker = nemo_rl.build({**CONFIG, "controller_address": queue.address}, bootstrap=False)
        waiting = [
            pool.submit(one.claim_meta, "train", "train", ["x", "y"], 2, timeout_s=DEADLINE_S)
            for one in (client, worker)
        ]
        worker.put_samples(IDS, "train", columns(x=torch.arange(4)))
        client.put_samples(IDS, "train", columns(y=torch.arange(4)))
        claimed = [each.result(DEADLINE_S).sample_ids for each in waiting]
        assert sorted(claimed[0] + claimed[1]) == IDS
        worker.close()
    assert client.check_consumption_status("train", ["train"])


def test_values_come_back_as_their_readers_expect(client: nemo_rl.QueueDataPlaneClient) -> None:
    ragged = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 1, 2, 2)], layout=torch.jagged)
    logs = objects(*[{"role": "user", "content": name, "turns": [1, 2]} for name in IDS])
    wide = torch.randn(4, 3, 2, dtype=torch.bfloat16)
    client.put_samples(IDS, "train", columns(s=torch.rand(4), w=wide, r=ragged, o=logs))
    found = client.get_samples(["d", "a"], "train", ["w", "r", "s", "o"])
    assert torch.equal(found["w"], wide[[3, 0]])
    assert [row.tolist() for row in found["r"].unbind()] == [[0, 1], [0, 1, 2]]
    assert found["s"].shape == (2,)
    assert found.get("o").tolist() == [logs[3], logs[0]]
    same = client.get_samples(["c", "d"], "train", ["r"])["r"]
    assert not same.is_nested
    assert same.tolist() == [[0, 1], [0, 1]]
    assert client.get_samples([], "train", ["r"]).batch_size == (0,)


def test_clearing(client: nemo_rl.QueueDataPlaneClient) -> None:
    client.put_samples(IDS, "train", columns(x=torch.arange(4)))
    client.claim_meta("train", "train", ["x"], 4)
    client.clear_samples(["a", "a", "unknown"], "train")
    with pytest.raises(KeyError):
        client.get_samples(["a"], "train", ["x"])
    client.clear_samples(None, "train")
    with pytest.warns(RuntimeWarning, match="'train' has no samples to clear"):
        client.clear_samples(None, "train")
    assert not client.check_consumption_status("train", ["train"])
    client.put_samples(IDS, "train", columns(x=torch.arange(4)))  # the next step
    assert client.claim_meta("train", "train", ["x"], 4).size == 4


# ------------------------------------------------------------ how it comes by one


def test_its_factory_builds_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, nemo_rl.PLACE, None)  # as it was comes back after the test
    nemo_rl.activate()
    seen: list[dict[str, Any]] = []
    observed = {**CONFIG, "observability": {"enabled": True, "callback": seen.append}}
    built = build_data_plane_client(observed)
    built.register_partition("p", ["x"], 4, ["read"])
    built.put_samples(IDS, "p", columns(x=torch.arange(4)))
    built.close()
    built.close()
    assert len(seen) >= 2
    with pytest.raises(UsageError, match="neither controller_address nor Ray"):
        build_data_plane_client(CONFIG, bootstrap=False)


RAY = """
import ray, torch
from tensordict import TensorDict
from nemo_rl.data_plane import build_data_plane_client
from transferqueue.adapters.trainers import nemo_rl

HOOK = "transferqueue.adapters.trainers.nemo_rl.activate"
CONFIG = {"enabled": True, "impl": "transfer_queue", "backend": "simple", "storage_capacity": 64}
nemo_rl.activate()
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"worker_process_setup_hook": HOOK})
driver = build_data_plane_client(CONFIG)
driver.register_partition("train", ["x"], 2, ["train"])


@ray.remote
def rollout():
    worker = build_data_plane_client(CONFIG, bootstrap=False)
    worker.put_samples(["a", "b"], "train", TensorDict({"x": torch.arange(2)}, batch_size=[2]))
    worker.close()
    return type(worker).__name__


task = rollout.remote()
meta = driver.claim_meta("train", "train", ["x"], 2, timeout_s=120)
print(ray.get(task), driver.get_data(meta)["x"].tolist())
driver.close()
ray.shutdown()
"""


def test_driver_and_workers_on_ray() -> None:
    run = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.strip().splitlines()[-1:] == ["QueueDataPlaneClient [0, 1]"], run.stderr[-3000:]
