# ruff: noqa: E402  (imports after a check that they are there)
"""The drop-in's controller without Ray: who waits, who is told, who ends what."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

import transferqueue as tq
from transferqueue.adapters.transfer_queue import controller
from transferqueue.adapters.transfer_queue import deployment as service
from transferqueue.adapters.transfer_queue import sampler as samplers
from transferqueue.adapters.transfer_queue.metadata import BatchMeta
from transferqueue.adapters.transfer_queue.sampler import BaseSampler
from transferqueue.adapters.transfer_queue.samples import ready_samples
from transferqueue.adapters.transfer_queue.samples.ready_samples import AHEAD, ReadySamples
from transferqueue.adapters.transfer_queue.samples.sample_shapes import SampleShapes
from transferqueue.errors import Disconnected, NotFound, SchemaError, Unreachable, UsageError

DEADLINE_S = 50.0
TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack


@pytest.fixture
def server() -> Iterator[service.DropInServer]:
    found = service.DropInServer({})
    yield found
    found.shutdown()


@pytest.fixture
def client(server: service.DropInServer) -> Iterator[Any]:
    attached = attach(server)
    yield attached.client
    attached.close()


def attach(server: service.DropInServer) -> service.DropInConnection:
    return service.DropInConnection(lambda name, *arguments: getattr(server, name)(*arguments), None)


def test_a_process_of_another_machine_is_told_what_to_do() -> None:
    terms = service.ServiceTerms("ipc:///nowhere/q.sock", {}, "", 1, 0.0, "another machine")
    with pytest.raises(Unreachable, match=r"of another machine, .* call init.. when all nodes have joined"):
        service.DropInConnection(lambda name: terms, None)


def put(client: Any, *names: str, rows: int = 2) -> Any:
    return client.put(TensorDict({name: torch.arange(rows) for name in names}, batch_size=[rows]), partition_id="p")


def test_an_early_reader_stops_nobody(client: Any) -> None:
    made = put(client, "early")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(client.get_meta, ["late"], 2, "p", "fetch", task) for task in ("one", "two")]
        for _ in range(5):
            other = put(client, "early")
            assert client.get_meta(["early"], 2, "p", task_name="other").global_indexes
            assert client.get_production_status(["late"], "p")[1].sum() == 0
            client.clear_samples(other)
        assert not any(wait.done() for wait in waits)
        client.put(TensorDict({"late": torch.ones(2)}, batch_size=[2]), metadata=made)
        assert [wait.result(DEADLINE_S).global_indexes for wait in waits] == [made.global_indexes] * 2


def test_no_notification_is_lost(client: Any) -> None:
    """Readers and writers race; each sample comes to each task once, and no reader waits for what is there."""
    rounds, readers = 20, 2
    put(client, "x", rows=1)
    client.get_meta(["x"], 1, "p", task_name="first")

    def read(task: str) -> list[int]:
        return [index for _ in range(rounds) for index in client.get_meta(["x"], 2, "p", task_name=task).global_indexes]

    def write() -> list[int]:
        return [index for _ in range(rounds) for index in put(client, "x", rows=readers).global_indexes]

    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read, task) for task in ("shared", "shared", "alone")]
        writes = [pool.submit(write) for _ in range(2)]
        written = [0, *(index for one in writes for index in one.result(DEADLINE_S))]
        shared = [index for one in reads[:2] for index in one.result(DEADLINE_S)]
        alone = reads[2].result(DEADLINE_S)
    assert len(shared) == len(set(shared)) == 2 * 2 * rounds
    assert set(shared) <= set(written)
    assert len(alone) == len(set(alone)) == 2 * rounds


def test_a_guest_that_closes_detaches(server: service.DropInServer) -> None:
    host, guest = attach(server), attach(server)
    made = put(guest.client, "x")
    guest.close()
    with pytest.raises(Disconnected):
        guest.client.get_data(made)
    assert host.client.get_data(made)["x"].tolist() == [0, 1]
    assert host.client.get_meta(["x"], 2, "p", task_name="t").global_indexes == made.global_indexes
    host.close()


def test_a_guest_that_closes_leaves_waiting_readers_alone(server: service.DropInServer) -> None:
    host, guest = attach(server), attach(server)
    begun = threading.Event()

    def read() -> Any:
        begun.set()
        return host.client.get_meta(["x"], 2, "p", task_name="t")

    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(read)
        assert begun.wait(DEADLINE_S)
        made = put(guest.client, "x")
        guest.close()
        assert wait.result(DEADLINE_S).global_indexes == made.global_indexes
    host.close()


def test_a_wait_ends_by_its_deadline(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "WAIT_S", 0.05)
    with pytest.raises(
        TimeoutError, match=r"no batch of 2 samples with \['x'\] became ready in partition 'p' for task 't'"
    ):
        client.get_meta(["x"], 2, "p", task_name="t")


def test_fields_of_an_empty_partition_may_be_of_other_types(client: Any) -> None:
    """As a stack does that names its fields by a put of placeholders, which it clears at once."""
    client.kv_put(["placeholder"], "p", TensorDict({"x": torch.zeros(1)}, batch_size=[1]), None)
    with pytest.raises(SchemaError):
        client.kv_put(["a"], "p", TensorDict({"x": torch.arange(1)}, batch_size=[1]), None)
    assert list(client.kv_list("p")["p"]) == ["placeholder"]
    client.kv_clear(["placeholder"], "p")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(client.get_meta, ["x"], 1, "p", "fetch", "task")
        client.kv_put(["a"], "p", TensorDict({"x": torch.arange(1)}, batch_size=[1]), None)
        assert client.get_data(early.result(DEADLINE_S))["x"].tolist() == [0]
    assert client.kv_get(["a"], "p", ["x"])["x"].dtype == torch.int64


class WithReplacement(BaseSampler):
    """Chooses the last sample twice and then the first, and consumes nothing."""

    def sample(self, ready_indexes: list[int], batch_size: int, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return [ready_indexes[-1], ready_indexes[-1], ready_indexes[0]], []


def test_a_sampler_may_choose_with_replacement() -> None:
    server = service.DropInServer({"controller": {"sampler": WithReplacement}})
    attached = attach(server)
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(5)], layout=torch.jagged)
    data = TensorDict({"x": torch.tensor([7, 8]), "y": ragged, "z": NonTensorStack("a", "b")}, batch_size=[2])
    try:
        attached.client.put(data, partition_id="p")
        for _ in range(2):
            meta = attached.client.get_meta(["x", "y", "z"], 3, "p", task_name="t")
            assert meta.global_indexes == [1, 1, 0]
            read = attached.client.get_data(meta)
            assert read["x"].tolist() == [8, 8, 7]
            assert [each.tolist() for each in read["y"].unbind()] == [[0, 1, 2, 3, 4]] * 2 + [[0, 1]]
            assert read["z"] == ["b", "b", "a"]
        assert attached.client.get_consumption_status("t", "p")[1].tolist() == [0, 0]
    finally:
        attached.close()
        server.shutdown()


def test_fields_that_others_added_are_described(client: Any) -> None:
    """The controller opened the partition before it had fields."""
    meta = client.get_meta([], 2, "p", mode="insert")
    client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), metadata=meta)
    found = client.get_meta(["x"], 2, "p", task_name="t")
    assert found.field_names == ["x"]
    assert client.get_data(found)["x"].tolist() == [0, 1]


def features(client: Any, length: int, samples: int = 2) -> Any:
    return client.put(TensorDict({"x": torch.ones(samples, length, 3)}, batch_size=[samples]), partition_id="p")


def everything(client: Any) -> Any:
    return client.get_meta(["x"], 0, "p", mode="force_fetch")


def test_shapes_of_ragged_samples_are_kept_as_arrays_through_a_put_a_question_and_a_concat(client: Any) -> None:
    """A tuple for each sample and field was most of the cost of a question about 32 fields."""
    parts = [torch.ones(length, 3) for length in (2, 1, 4)]
    data = TensorDict({"x": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}, batch_size=[3])
    made = client.put(data, partition_id="p")
    found = client.get_meta(["x"], 3, "p", task_name="t")
    both = BatchMeta.concat([found, client.put(data, partition_id="q")])
    for meta, shapes in ((made, [(2, 3), (1, 3), (4, 3)]), (both, [(2, 3), (1, 3), (4, 3)] * 2)):
        assert isinstance(meta._schema["x"]["per_sample_shapes"], SampleShapes)
        assert meta.get_shapes("x") == shapes
        assert isinstance(meta.select_samples([2, 0])._schema["x"]["per_sample_shapes"], SampleShapes)
        assert meta.select_samples([2, 0]).get_shapes("x") == [shapes[2], shapes[0]]
    held = found.field_schema["x"]["per_sample_shapes"]
    assert isinstance(held, list)
    assert json.loads(json.dumps(held + made.field_schema["x"]["per_sample_shapes"])) == [[2, 3], [1, 3], [4, 3]] * 2
    assert BatchMeta.concat([both, found]).get_shapes("x") == held * 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2), (2, 1), (0, 1, 2)])
def test_parts_of_one_shape_and_ragged_ones_are_joined_with_the_shape_of_each_sample(order: tuple[int, ...]) -> None:
    ragged = torch.nested.as_nested_tensor([torch.ones(1, 3), torch.ones(4, 3)], layout=torch.jagged)
    parts = [(ragged, [(1, 3), (4, 3)]), (torch.ones(1, 2, 3), [(2, 3)]), (torch.ones(1, 5, 3), [(5, 3)])]
    metas = []
    for at, (value, _) in enumerate(parts):
        meta = BatchMeta(list(range(len(value.unbind()))), [str(at)] * len(value.unbind()))
        metas.append(meta.add_fields({"x": value}))
    joined = BatchMeta.concat([metas[at] for at in order])
    assert joined.get_shapes("x") == [shape for at in order for shape in parts[at][1]]
    schema = joined.field_schema["x"]
    assert (schema["is_nested"], schema["shape"]) == (True, None)


def test_is_nested_tells_whether_shapes_differ(client: Any) -> None:
    features(client, 4)
    assert client.get_meta([], 0, "p", mode="force_fetch").field_schema == {}
    schema = everything(client).field_schema["x"]
    assert (schema["is_nested"], schema["shape"], "per_sample_shapes" in schema) == (False, (4, 3), False)
    features(client, 6)
    every = everything(client)
    assert (every.field_schema["x"]["is_nested"], every.field_schema["x"]["shape"]) == (True, None)
    assert every.get_shapes("x") == [(4, 3), (4, 3), (6, 3), (6, 3)]
    alike = client.get_meta(["x"], 2, "p", task_name="t")
    assert (alike.field_schema["x"]["is_nested"], alike.get_shapes("x")) == (False, [(4, 3)] * 2)
    assert client.get_data(alike)["x"].is_nested


def test_is_nested_where_some_samples_lack_the_field(client: Any) -> None:
    features(client, 4)
    client.get_meta([], 2, "p", mode="insert")
    meta = everything(client)
    assert meta.production_status.tolist() == [1, 1, 0, 0]
    assert (meta.field_schema["x"]["is_nested"], meta.field_schema["x"]["shape"]) == (False, (4, 3))
    features(client, 6)
    assert everything(client).get_shapes("x") == [(4, 3), (4, 3), None, None, (6, 3), (6, 3)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_shapes_of_samples_of_several_varying_dimensions(client: Any) -> None:
    images = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(1, 5)])
    client.put(TensorDict({"x": images}, batch_size=[2]), partition_id="p")
    assert everything(client).get_shapes("x") == [(2, 3), (1, 5)]


def test_metadata_by_key_tells_shapes(client: Any) -> None:
    for key, length in (("a", 2), ("b", 2), ("c", 5)):
        client.kv_put([key], "p", TensorDict({"x": torch.ones(1, length)}, batch_size=[1]), [{"key": key}])
    assert client.kv_retrieve_meta(["a", "b"], "p").field_schema["x"]["shape"] == (2,)
    meta = client.kv_retrieve_meta(["c", "a"], "p")
    assert meta.get_shapes("x") == [(5,), (2,)]
    assert (meta.custom_meta, meta.is_ready) == ([{"key": "c"}, {"key": "a"}], True)
    empty = client.kv_retrieve_meta(["new"], "p", create=True)
    assert (empty.field_names, empty.production_status.tolist()) == ([], [0])


def leases(server: service.DropInServer) -> int:
    """How often the controller has leased samples of partition p."""
    with tq.connect(server.hello()[0]) as queue:
        return sum(event.what == "leased" for event in queue.events("p.p", after=0).events)


def test_a_batch_reads_a_few_samples_of_a_backlog(server: service.DropInServer, client: Any) -> None:
    """The backlog of a partition is not read for a batch of a few, whoever asks; a question about all reads all."""
    put(client, "x", rows=5000)
    for turn in range(3):
        assert client.get_meta(["x"], 64, "p", task_name=f"task {turn}").global_indexes == list(range(64))
    assert client.get_meta(["x"], 64, "p", task_name="task 0").global_indexes == list(range(64, 128))
    ready = server.controller._partitions["p"].ready(["x"])
    assert len(ready.rows) == AHEAD
    client.reset_consumption("p", "task 0")
    assert client.get_meta(["x"], 64, "p", task_name="task 0").global_indexes == list(range(64))
    assert client.get_meta(["x"], 4000, "p", task_name="many").global_indexes == list(range(4000))
    assert client.get_production_status(["x"], "p")[1].sum() == 5000
    assert len(ready.rows) == 5000


def test_the_table_is_asked_again_when_something_became_ready(server: service.DropInServer, client: Any) -> None:
    made = put(client, "x", rows=100)
    for turn in range(3):
        assert len(client.get_meta(["x"], 20, "p", task_name=f"task {turn}")) == 20
    asked = leases(server)
    put(client, "y", rows=100)  # nothing of what was asked for
    assert client.get_meta(["x"], 80, "p", task_name="task 0").global_indexes == made.global_indexes[20:]
    assert leases(server) == asked
    later = put(client, "x", rows=3)
    assert client.get_meta(["x"], 3, "p", task_name="task 0").global_indexes == later.global_indexes
    assert leases(server) == asked + 1


def test_a_controller_whose_server_is_in_another_process_asks_it_each_time() -> None:
    server = service.DropInServer({"controller": {"polling_mode": True}})
    server.controller._times_ready = None  # as where TRANSFERQUEUE_ADDRESS names a server
    attached = attach(server)
    try:
        for rows in (3, 4):
            made = put(attached.client, "x", rows=rows)
            assert attached.client.get_meta(["x"], rows, "p", task_name="t").global_indexes == made.global_indexes
        asked = leases(server)
        made = put(attached.client, "x", rows=5)
        for task in ("one", "two"):
            assert len(attached.client.get_meta(["x"], 12, "p", task_name=task)) == 12
        assert not len(attached.client.get_meta(["x"], 1, "p", task_name="one"))
        assert leases(server) == asked + 1
    finally:
        attached.close()
        server.shutdown()


def test_samples_come_in_the_order_of_their_indexes_whichever_was_ready_first(client: Any) -> None:
    made = client.get_meta([], 40, "p", mode="insert").global_indexes

    def produce(part: slice) -> None:
        rows = made[part]
        meta = client.get_meta([], 0, "p", mode="force_fetch").select_samples(rows)
        client.put(TensorDict({"x": torch.tensor(rows)}, batch_size=[len(rows)]), metadata=meta)

    produce(slice(20, 30))
    assert client.get_meta(["x"], 4, "p", task_name="t").global_indexes == made[20:24]
    produce(slice(5, 10))
    assert client.get_meta(["x"], 3, "p", task_name="t").global_indexes == made[5:8]
    assert client.get_meta(["x"], 8, "p", task_name="other").global_indexes == [*made[5:10], *made[20:23]]
    produce(slice(0, 5))
    assert client.get_meta(["x"], 8, "p", task_name="t").global_indexes == [*made[0:5], *made[8:10], made[24]]


@pytest.mark.parametrize(
    ("sampler", "config"),
    [
        ("GRPOGroupNSampler", {}),
        ("RankAwareSampler", {"dp_rank": 1, "batch_index": 0}),
        ("SeqlenBalancedSampler", {"dp_rank": 0, "batch_index": 0}),
    ],
)
def test_built_in_samplers_find_their_batch_behind_what_they_cannot_use(sampler: str, config: dict[str, int]) -> None:
    kinds = {
        "GRPOGroupNSampler": samplers.GRPOGroupNSampler(2),
        "SeqlenBalancedSampler": samplers.SeqlenBalancedSampler(2, 1),
    }
    server = service.DropInServer({"controller": {"sampler": kinds.get(sampler, sampler), "polling_mode": True}})
    attached = attach(server)
    try:
        client = attached.client
        made = put(client, "x", rows=3000)
        client.clear_samples(
            made.select_samples([*range(4), 6, *range(11, 2900)])
        )  # 4 5, 7 8, 9 10 are left, and a hundred
        wanted = [4, 5, 7, 8]
        for task in ("one", "two"):
            meta = client.get_meta(["x"], 4, "p", task_name=task, sampling_config=config)
            assert meta.global_indexes == wanted
        assert not len(client.get_meta(["x"], 200, "p", task_name="one", sampling_config={**config, "batch_index": 1}))
    finally:
        attached.close()
        server.shutdown()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"data_fields": "x"}, r"data_fields='x'; give a list of names"),
        ({"data_fields": None}, r"data_fields=None; give a list of names"),
        ({"data_fields": [1]}, r"data_fields=\[1\]; give a list of names"),
        ({"batch_size": 2.0}, r"batch_size=2.0 is float; give a whole number"),
        ({"batch_size": None}, r"batch_size=None is NoneType"),
        ({"partition_id": None}, r"partition_id=None is NoneType; give a str"),
        ({"task_name": ["t"]}, r"task_name=\['t'\] is list; give a str"),
        ({"sampling_config": [1]}, r"sampling_config is list; give a dict"),
    ],
)
def test_arguments_of_another_type_are_refused(client: Any, wrong: dict[str, Any], why: str) -> None:
    made = put(client, "x")
    asked = {"data_fields": ["x"], "batch_size": 2, "partition_id": "p", "task_name": "t"}
    with pytest.raises(TypeError, match=why):
        client.get_meta(**{**asked, **wrong})
    assert client.get_partition_list() == ["p"]
    assert client.get_meta(**{**asked, "batch_size": np.int64(2)}).global_indexes == made.global_indexes


@pytest.mark.parametrize("samples", [0, -4, 1 << 40])
def test_a_number_of_samples_that_cannot_be_inserted_is_refused(client: Any, samples: int) -> None:
    with pytest.raises(ValueError, match="one call inserts 1 to 65,536 samples"):
        client.get_meta([], samples, "p", mode="insert")


def test_too_many_sets_of_fields_are_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "FIELD_SETS_MAX", 2)
    put(client, "x", "y")
    assert len(client.get_meta(["x"], 1, "p", task_name="t")) == len(client.get_meta(["y"], 1, "p", task_name="o")) == 1
    with pytest.raises(UsageError, match=r"\['x', 'y'\]: partition 'p' was asked for 2 other sets of fields"):
        client.get_meta(["y", "x"], 1, "p", task_name="t")
    assert len(client.get_meta(["x"], 1, "p", task_name="t")) == 1


def leased_by_a_waiting_reader(server: service.DropInServer, pool: ThreadPoolExecutor) -> tuple[Any, list[int], Any]:
    """A reader that waits for a sample of partition p, and one that it has just leased. The caller holds the guard, so
    it is not added."""
    reader, writer = attach(server).client, attach(server).client
    waiting = pool.submit(reader.get_meta, ["x"], 1, "p", "fetch", "t")
    with tq.connect(server.hello()[0]) as queue:
        while not queue.doctor().waiting:
            assert not waiting.done()
        server.controller._guard.acquire()
        made = put(writer, "x", rows=1).global_indexes
        while not leases(server):
            assert not waiting.done()
    return waiting, made, writer


def test_a_sample_is_deleted_though_a_reader_has_just_leased_it(server: service.DropInServer) -> None:
    """It was refused, since the sample was leased: a reader has a sample for a moment before it counts as consumed."""
    with ThreadPoolExecutor(1) as pool:
        waiting, made, writer = leased_by_a_waiting_reader(server, pool)
        server.controller.clear_samples(made, "p")
        server.controller._guard.release()
        assert not len(writer.get_meta([], 0, "p", mode="force_fetch"))
        later = put(writer, "x", rows=1).global_indexes
        assert waiting.result(DEADLINE_S).global_indexes in (made, later)


def test_a_field_that_is_deleted_after_a_reader_has_leased_its_sample_is_waited_for(
    server: service.DropInServer,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting, made, writer = leased_by_a_waiting_reader(server, pool)
        server.controller.clear_fields(made, ["x"], "p")
        server.controller._guard.release()
        assert writer.get_production_status(["x"], "p")[1].tolist() == [0]
        writer.put(TensorDict({"x": torch.tensor([7])}, batch_size=[1]), metadata=everything_of(writer))
        meta = waiting.result(DEADLINE_S)
        assert meta.global_indexes == made
        assert writer.get_data(meta)["x"].tolist() == [7]


def everything_of(client: Any) -> Any:
    return client.get_meta([], 0, "p", mode="force_fetch")


def in_the_window(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Let `act` happen once, after a question has looked its partition up, and before it asks for samples."""
    asked = controller.Controller._ready
    left = [act]

    def late(self: Any, partition: Any, *arguments: Any) -> Any:
        if left:
            ThreadPoolExecutor(1).submit(left.pop()).result(DEADLINE_S)
        return asked(self, partition, *arguments)

    monkeypatch.setattr(controller.Controller, "_ready", late)


def test_a_question_into_which_a_partition_is_cleared_and_made_again_takes_no_sample_twice(
    server: service.DropInServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, "x", rows=3)
    assert len(client.get_meta(["x"], 3, "p", task_name="t")) == 3

    def begin_anew() -> None:
        client.clear_partition("p")
        put(client, "x", rows=4)
        assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == [0, 1]

    in_the_window(monkeypatch, begin_anew)
    assert client.get_meta(["x"], 1, "p", task_name="t").global_indexes == [2]
    assert client.get_meta(["x"], 1, "p", task_name="t").global_indexes == [3]
    assert server.controller.consumed_counts() == {"p": {"t": 4}}


def test_a_question_into_which_a_partition_is_cleared_adds_no_task_to_the_next_one(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, "x", "y", rows=3)
    assert len(client.get_meta(["x"], 3, "p", task_name="t")) == 3

    def begin_anew() -> None:
        client.clear_partition("p")
        put(client, "x", "y", rows=4)

    in_the_window(monkeypatch, begin_anew)
    assert client.get_meta(["x", "y"], 4, "p", task_name="t").global_indexes == [0, 1, 2, 3]
    for fields in (["x"], ["y"], ["y", "x"]):
        assert client.get_meta(fields, 4, "p", task_name=f"of {fields}").global_indexes == [0, 1, 2, 3]


def test_a_reader_that_waits_for_samples_of_a_cleared_partition_takes_none_of_the_next_one(
    server: service.DropInServer, client: Any
) -> None:
    put(client, "x", rows=3)
    assert len(client.get_meta(["x"], 3, "p", task_name="t")) == 3
    before = server.controller._partitions["p"].ready(["x"])
    client.clear_partition("p")
    put(client, "x", "y", rows=3)
    assert client.get_meta(["y"], 3, "p", task_name="t").global_indexes == [0, 1, 2]
    put(client, "x", "y", rows=2)
    with pytest.raises(NotFound, match="was cleared"):
        before.wait(before.changes, 5.0)
    assert client.get_meta(["y"], 5, "p", task_name="other").global_indexes == [0, 1, 2, 3, 4]


def test_a_partition_that_is_cleared_while_the_server_does_not_answer_is_over(
    server: service.DropInServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, "x", "y", rows=3)
    for fields in (["x"], ["y"]):
        assert len(client.get_meta(fields, 3, "p", task_name=f"of {fields}")) == 3
    partition = server.controller._partitions["p"]

    def fail(_: Any) -> None:
        raise Unreachable("the server did not answer")

    with monkeypatch.context() as broken:
        broken.setattr(ReadySamples, "settle", fail)
        with pytest.raises(Unreachable):
            client.clear_partition("p")
    for fields in (["x"], ["y"]):
        ready = partition.ready(fields)
        with pytest.raises(NotFound, match="was cleared"):
            ready.wait(ready.changes, 5.0)
    client.clear_partition("p")
    put(client, "x", rows=2)
    assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == [0, 1]


def test_samples_are_not_lost_where_the_question_about_their_fields_fails(
    server: service.DropInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were leased, and a field of one was deleted meanwhile: whether it came back could not be asked."""

    def fail(*_: Any, **__: Any) -> None:
        raise Unreachable("the server did not answer")

    with ThreadPoolExecutor(1) as pool:
        waiting, made, writer = leased_by_a_waiting_reader(server, pool)
        with monkeypatch.context() as broken:
            server.controller.clear_fields(made, ["x"], "p")
            broken.setattr(ReadySamples, "_has_fields", fail)
            server.controller._guard.release()
            failed = waiting.exception(DEADLINE_S)
        assert isinstance(failed, Unreachable)
        server.controller.clear_samples(made, "p")  # nobody has it leased
        later = put(writer, "x", rows=1).global_indexes
        assert writer.get_meta(["x"], 1, "p", task_name="t").global_indexes == later


def test_samples_outlive_the_leases_by_which_they_are_known(
    server: service.DropInServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases were held for half an hour, and five that ended so dropped their samples: those of a partition that lived
    for hours."""
    monkeypatch.setattr(ready_samples, "HELD_S", 0.05)
    made = put(client, "x").global_indexes
    times_ready = server.controller._times_ready
    assert times_ready is not None
    for turn in range(7):
        assert client.get_meta(["x"], 2, "p", task_name=f"task {turn}").global_indexes == made
        before = times_ready("p.p", "ready.0")
        while times_ready("p.p", "ready.0") == before:  # until the lease has ended
            assert client.check_production_status(["x"], "p")
    assert client.get_production_status(["x"], "p")[0].tolist() == made
