"""The service interface as Python calls, sync and async: the calls over HTTP are tested where HTTP is."""

import asyncio
import threading

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors import (
    AlreadyExists,
    DeadlineExceeded,
    EndOfTable,
    Impossible,
    SchemaError,
    Sealed,
    UsageError,
)
from transferqueue.workflows.service import (
    AsyncService,
    ColumnSpec,
    Engines,
    EngineStage,
    GroupSpec,
    PacingSpec,
    Service,
    notice_of,
)

ROLLOUT = EngineStage(name="rollout", needs=["prompt"], gives=["ids"])
TRAIN = EngineStage(name="train", needs=["ids"], groups=GroupSpec(incomplete="refill", deadline_s=60))


def job(**pace):
    return Engines(
        stages=[ROLLOUT, TRAIN],
        columns=[ColumnSpec(name="ids", dtype="int32", shape=[None])],
        pace=PacingSpec(stage="train", batch_rows=4, **pace),
    )


@pytest.fixture
def queue():
    with tq.connect() as queue:
        yield queue


def test_the_terms_are_those_that_were_told(queue):
    service = Service.init_engines(queue, job(depth=2, max_staleness=1, on_stale="requeue", requeue_to="rollout"))
    table = service.table
    assert (service.name, service.stages) == ("experience", ["rollout", "train"])
    assert table.tasks["train"].groups == tq.Complete(deadline_s=60, incomplete=tq.Refill())
    assert table.pacing == tq.Pacing(
        "train", batch_rows=4, depth=2, max_staleness=1, on_stale=tq.Requeue("rollout"), channel="experience"
    )
    assert table.fields["ids"] == tq.Field("ids", "int32", (None,))


@pytest.mark.parametrize(
    ("told", "policy"), [("drop", tq.DropStale()), ("keep", tq.KeepStale()), ("wait", tq.HoldClock())]
)
def test_what_happens_to_stale_rows(told, policy):
    assert job(max_staleness=1, on_stale=told).terms()["pacing"].on_stale == policy


@pytest.mark.parametrize("pace", [{"on_stale": "requeue"}, {"requeue_to": "rollout"}])
def test_a_requeue_to_nobody_is_refused(queue, pace):
    with pytest.raises(UsageError, match="on_stale=requeue names the stage"):
        Service.init_engines(queue, job(**pace))
    assert queue.tables() == []


def test_any_process_may_declare_it_again_in_the_same_words(queue):
    Service.init_engines(queue, job())
    Service.init_engines(queue, job())
    with pytest.raises(AlreadyExists):
        Service.init_engines(queue, job(depth=3))
    assert Service.join(queue).stages == ["rollout", "train"]


def test_prompts_are_groups_of_samples_stored_once_each(queue):
    service = Service.init_engines(queue, job())
    rows = service.put_prompts_data({"prompt": ["a", "b"]}, samples=2, ordinal=[7, 8], key=["x", "y"])
    batch = service.get_experience_data("rollout", None, 4)[0]
    assert batch.rows.tolist() == rows.tolist()
    assert batch["prompt"].list() == ["a", "a", "b", "b"]
    assert batch.ordinal.tolist() == [7, 7, 8, 8]
    assert batch.keys == ["x/0", "x/1", "y/0", "y/1"]
    assert len(set(batch.group_id.tolist())) == 2
    with pytest.raises(AlreadyExists):
        service.put_prompts_data({"prompt": ["c"]}, samples=2, key=["x"])
    batch.ack(ids=[[1]] * 4)
    with service.get_experience_data("train", groups=2)[0]:
        pass
    assert service.status().rows_done == 4
    assert service.status().outstanding == 0


@pytest.mark.parametrize(
    ("columns", "facts", "error", "text"),
    [
        ({}, {}, UsageError, "prompts without a column"),
        (["a"], {}, UsageError, "columns are list"),
        ({"prompt": "a"}, {}, SchemaError, "is a single value"),
        ({"prompt": ["a"], "x": [1, 2]}, {}, SchemaError, "columns of 1, 2 prompts"),
        ({"prompt": ["a"]}, {"samples": 0}, UsageError, "samples=0"),
        ({"prompt": ["a"]}, {"samples": 2, "key": ["x", "y"]}, SchemaError, "key has 2 values for 1 prompts"),
        ({"prompt": ["a"]}, {"prioritty": 1.0}, UsageError, "fact prioritty is unknown"),
        ({"prompt": ["a"], "tokens": [1]}, {}, UsageError, "column tokens is named as a fact"),
        ({"prompt": list("abcdefghi")}, {}, Impossible, "9"),
    ],
)
def test_prompts_that_are_none_are_refused_and_nothing_is_put(queue, columns, facts, error, text):
    service = Service.init_engines(queue, job())
    with pytest.raises(error, match=text):
        service.put_prompts_data(columns, **facts)
    assert service.status().rows_put == service.status().reserved == 0


def test_prompts_wait_for_room_until_their_deadline(queue):
    service = Service.init_engines(queue, job(depth=0))
    service.put_prompts_data({"prompt": list("abcd")})
    with pytest.raises(DeadlineExceeded):
        service.put_prompts_data({"prompt": ["e"]}, timeout_s=0.05)
    assert service.status().rows_put == 4


def test_late_columns_and_unknown_facts(queue):
    service = Service.init_engines(queue, job())
    rows = service.put_prompts_data({"prompt": ["a"]})
    with pytest.raises(UsageError, match="fact versionn is unknown"):
        service.put_experience_data({"ids": [[1]]}, rows, versionn=1)
    service.put_experience_data({"ids": [[1]]}, rows, policy_version=0)
    assert service.get_experience_data("train", None, 1)[0].policy_version.tolist() == [0]


def test_weights_wake_who_waits_for_them_and_move_the_clock(queue):
    service = Service.init_engines(queue, job())
    seen = []

    def generator():
        with service.get_weights(above=2, timeout_s=60) as weights:
            seen.append((weights.version, notice_of(weights), weights.numpy()["w"].tolist()))

    thread = threading.Thread(target=generator)
    thread.start()
    service.weight_sync_notify(3, {"w": np.arange(2.0)}, notice={"path": "there"})
    thread.join(60)
    assert seen == [(3, {"path": "there"}, [0.0, 1.0])]
    assert service.status().version == 3
    for notice, tensors, text in (
        ("x" * 5000, {}, "at most 4096"),
        (object(), {}, "be JSON"),
        (0, {"notice": 1}, "named"),
    ):
        with pytest.raises(UsageError, match=text):
            service.weight_sync_notify(4, tensors, notice=notice)
    assert service.status().version == 3


def test_weights_of_who_gives_no_notice_have_none(queue):
    service = Service.init_engines(queue, job())
    queue.weights("experience").publish(0, {"w": np.zeros(1)})
    assert notice_of(service.get_weights()) is None


def test_an_end(queue):
    service = Service.init_engines(queue, job())
    service.seal()
    with pytest.raises(Sealed):
        service.put_prompts_data({"prompt": ["a"]})
    with pytest.raises(EndOfTable):
        service.get_experience_data("rollout", None, 1)[0]


def test_the_same_for_an_event_loop():
    async def run():
        async with await tq.aconnect() as queue:
            service = await AsyncService.init_engines(queue, job())
            assert (await AsyncService.join(queue)).stages == service.stages
            rows = await service.put_prompts_data({"prompt": ["a", "b"]}, samples=2)
            batch = (await service.get_experience_data("rollout", None, 4))[0]
            await service.put_experience_data({"ids": [[1]] * 4}, batch, policy_version=0)
            await service.put_experience_data({"late": [1.0] * 4}, rows)
            await service.weight_sync_notify(0, notice="zero")
            assert notice_of(await service.get_weights()) == "zero"
            async with (await service.get_experience_data("train", groups=2))[0] as trained:
                assert len(trained) == 4
            await service.seal()
            return await service.status()

    assert asyncio.run(run()).rows_done == 4


# ---------------------------------------------------------------- indices and streams


def test_results_return_by_their_index(queue):
    service = Service.init_engines(queue, job())
    rows = service.put_prompts_data({"prompt": ["a", "b"]}, samples=2)
    batch, index = service.get_experience_data("rollout", ["prompt"], 4)
    assert batch["prompt"].list() == ["a", "a", "b", "b"]
    assert [*index] == np.asarray(index).tolist() == rows.tolist()
    service.put_experience_data({"ids": [[1], [2]]}, index, rows=rows[:2], policy_version=0)
    service.put_experience_data({"ids": [[3], [4]]}, index, policy_version=0)
    assert batch.ended
    service.put_experience_data({"note": ["x"]}, rows[:1])  # a late column, by row ids
    with service.get_experience_data("train", groups=1)[0] as taken:
        assert taken["ids"].list() == [[1], [2]]
    service.weight_sync_notify(3, notice={"path": "there"})
    with service.get_weights() as weights:
        assert (weights.version, notice_of(weights)) == (3, {"path": "there"})


def test_a_stream_gives_batches_whose_results_return_in_any_order(queue):
    service = Service.init_engines(queue, job())
    service.put_prompts_data({"prompt": list("abcd")})
    service.seal()
    with service.create_stream_data_loader(experience_consumer_stage="rollout", experience_count=2) as loader:
        (_, first), (_, second) = next(loader), next(loader)
        for index in (second, first):
            service.put_experience_data({"ids": [[0]] * 2}, index, policy_version=0)
        assert list(loader) == []
    assert service.status().tasks["rollout"].done == 4


def test_a_stream_that_is_left_gives_back_what_has_no_results(queue):
    service = Service.init_engines(queue, job())
    service.put_prompts_data({"prompt": list("abcdef")})
    with service.create_stream_data_loader(experience_consumer_stage="rollout", experience_count=2) as loader:
        (_, given), (_, kept) = next(loader), next(loader)
        service.put_experience_data({"ids": [[0]] * 2}, given, policy_version=0)
    assert kept.batch.ended
    loader.close()
    assert len(service.get_experience_data("rollout", None, 4, timeout_s=10)[0]) == 4


def test_indices_and_streams_for_an_event_loop():
    async def run():
        async with tq.aconnect() as queue:
            service = await AsyncService.init_engines(queue, job())
            await service.put_prompts_data({"prompt": list("abcd")})
            batch, index = await service.get_experience_data("rollout", experience_count=1)
            await service.put_experience_data({"ids": [[1]]}, index, policy_version=0)
            assert batch.ended
            loader = service.create_stream_data_loader(experience_consumer_stage="rollout", experience_count=1)
            async with loader:
                _, index = await anext(loader)
            assert index.batch.ended
            await service.weight_sync_notify(1)
            status = await service.status()
            assert (status.version, status.tasks["rollout"].ready) == (1, 3)

    asyncio.run(run())
