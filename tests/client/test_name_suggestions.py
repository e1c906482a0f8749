"""A keyword that was probably meant for a parameter or another field is refused, with the name that was meant."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import transferqueue as tq
from tests.client.deployments import LoopThread
from transferqueue.client.operations import name_suggestions as slips

CANONICAL = [
    "input_ids",
    "attention_mask",
    "position_ids",
    "prompt_ids",
    "response_ids",
    "response_mask",
    "loss_mask",
    "old_logprobs",
    "ref_logprobs",
    "logprobs",
    "rollout_log_probs",
    "ref_log_probs",
    "old_log_probs",
    "advantages",
    "returns",
    "values",
    "rewards",
    "token_level_scores",
    "token_level_rewards",
    "rm_scores",
    "entropys",
    "entropy",
    "teacher_ids",
    "teacher_logprobs",
    "prompt",
    "response",
    "answer",
    "question",
    "solution",
    "target",
    "ground_truth",
    "data_source",
    "uid",
    "index",
    "image",
    "images_seqlens",
    "pixel_values",
    "multi_modal_inputs",
    "sample_mask",
    "generation_logprobs",
    "text",
    "body",
    "note",
    "reward_model",
    "extra_info",
    "turns",
    "raw_prompt_ids",
    "output_ids",
    "chosen_ids",
    "rejected_ids",
    "chosen_mask",
    "rejected_mask",
    "x1",
    "x2",
    "x_in",
    "x_on",
    "f0",
    "f1",
    "f2",
    "a",
    "b",
    "x",
    "y",
    "z",
    "score",
    "loss",
    "late",
    "trace",
    "digests",
    "so_far",
    "sent",
    "said",
    "who",
    "kind",
    "state",
    "step",
    "number",
    "source",
    "stop",
    "start",
    "length",
    "temperature",
]
"""Columns of the frameworks that the adapters serve, and of the tests: tables have many of these at once."""


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.fixture
def table(queue: tq.Queue, name: str) -> tq.Table:
    found = queue.create_table(
        name,
        tasks=[
            tq.Task("reward", needs=["response_ids"], gives=["rewards"]),
            tq.Task("train", needs=["response_ids", "rewards"]),
        ],
    )
    found.put(response_ids=[[1], [2]], x1=[1, 2])
    return found


@pytest.mark.parametrize(
    ("call", "front"),
    [(call, front) for call in ("put", "update") for front in (tq.Table, tq.AsyncTable)]
    + [(call, front) for call in ("ack", "release") for front in (tq.Batch, tq.AsyncBatch)],
)
def test_the_parameters_are_those_of_the_calls(call: str, front: type[Any]) -> None:
    signature = inspect.signature(getattr(front, call)).parameters.values()
    named = {one.name for one in signature if one.kind is not one.VAR_KEYWORD and one.name != "self"}
    assert set(slips.PARAMETERS[call]) == named - {"table"}


MEANT = {
    "polcy_version": "policy_version",
    "policy_versions": "policy_version",
    "policyVersion": "policy_version",
    "Policy_Version": "policy_version",
    "version": "policy_version",
    "timeout": "timeout_s",
    "timeouts": "timeout_s",
    "timeout_S": "timeout_s",
    "timeout_seconds": "timeout_s",
    "group": "group_id",
    "group_ids": "group_id",
    "groupid": "group_id",
    "grup_size": "group_size",
    "group_sise": "group_size",
    "group_szie": "group_size",
    "priorty": "priority",
    "priorities": "priority",
    "prio": "priority",
    "keys": "key",
    "kye": "key",
    "tag": "tags",
    "reservaton": "reservation",
    "reward": "rewards",
    "rewrds": "rewards",
    "rewadrs": "rewards",
    "respnse_ids": "response_ids",
    "response_id": "response_ids",
    "responseIds": "response_ids",
}


@pytest.mark.parametrize("slip", MEANT)
def test_a_put_with_a_slip_is_refused_and_changes_nothing(table: tq.Table, slip: str) -> None:
    given = {"x1": [3], slip: [0]} if MEANT[slip] == "response_ids" else {"response_ids": [[3]], slip: [0]}
    before = (table.audit(), table.fields)
    with pytest.raises(
        tq.UsageError, match=rf"did you mean '?{MEANT[slip]}'?\?.*declare it: table.add_fields"
    ) as raised:
        table.put(**given)
    assert type(raised.value) is tq.UsageError
    assert (table.audit(), table.fields) == before


def test_so_are_update_ack_and_release(table: tq.Table) -> None:
    with pytest.raises(tq.UsageError, match="update has no parameter 'over_write'; did you mean overwrite"):
        table.update([0], over_write=True)
    with table.lease("reward", rows=2) as batch:
        with pytest.raises(tq.UsageError, match=r"ack has a column 'reward'.*did you mean 'rewards'"):
            batch.ack(reward=[1.0, 2.0])
        with pytest.raises(tq.UsageError, match="ack has no parameter 'steps'; did you mean step"):
            batch.ack(rewards=[1.0, 2.0], steps=3)
        with pytest.raises(tq.UsageError, match="ack has no parameter 'stpe'; did you mean step"):
            batch.ack(rewards=[1.0, 2.0], stpe=3)
        with pytest.raises(tq.UsageError, match="ack takes no timeout_s"):
            batch.ack(rewards=[1.0, 2.0], timeout_s=3)
        with pytest.raises(tq.UsageError, match="release has no parameter 'reasons'; did you mean reason"):
            batch.release(reasons="busy")
        with pytest.raises(tq.UsageError, match="release takes no key"):
            batch.release(key=["a", "b"])
        batch.ack(rewards=[1.0, 2.0])


def test_the_async_front_refuses_the_same() -> None:
    with LoopThread() as loop, loop.connect(address=None) as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["rewards"])])
        with pytest.raises(tq.UsageError, match="did you mean 'rewards'"):
            table.put(rewrds=[1.0])
        with pytest.raises(tq.UsageError, match="did you mean timeout_s"):
            table.put(x=[1], timeout=5)


def test_names_that_are_both_given_are_both_meant(table: tq.Table) -> None:
    table.put(
        response_ids=[[1]], value=[1.0], values=[[1.0]], rewards=[0.0], reward=[1.0], x2=[1], tokens=[1], token=["a"]
    )
    table.put(response_ids=[[1]], value=[1.0], policy_version=3, version=[3])


def test_a_declared_name_is_meant(queue: tq.Queue, name: str, table: tq.Table) -> None:
    table.add_fields([tq.Field("reward", "float32"), tq.Field("timeout", "float32")])
    table.put(response_ids=[[1]], reward=[1.0], timeout=[2.0])
    fields = [tq.Field("rewards", "float32"), tq.Field("reward", "float32")]
    both = queue.create_table(f"{name}_both", fields=fields, tasks=[tq.Task("train", needs=["rewards"])])
    both.put(reward=[1.0])


def test_no_two_usual_columns_are_near() -> None:
    near = {(one, other) for one, other in itertools.combinations(sorted(CANONICAL), 2) if slips.nearest(one, [other])}
    assert near == {  # one column, as two frameworks write it: both in one table is a mistake
        ("entropy", "entropys"),
        ("old_log_probs", "old_logprobs"),
        ("ref_log_probs", "ref_logprobs"),
    }
    for name in CANONICAL:
        for call, parameters in slips.PARAMETERS.items():
            if (call, name) != ("ack", "step"):
                assert slips.nearest_parameter(name, parameters) is None, (name, call)


@pytest.mark.parametrize("name", slips.FACTS)
def test_a_field_that_no_put_could_bring_is_refused(queue: tq.Queue, table: tq.Table, name: str) -> None:
    with pytest.raises(tq.UsageError, match=f"{name!r} is named as a field.*give the field another name"):
        queue.create_table("reserved", fields=[tq.Field(name, "int64")])
    with pytest.raises(tq.UsageError, match="another name"):
        queue.create_table("reserved", tasks=[tq.Task("train", needs=[name])])
    with pytest.raises(tq.UsageError, match="another name"):
        table.add_task(tq.Task("late", needs=[name]))
    with pytest.raises(tq.UsageError, match="another name"):
        table.add_fields([tq.Field(name, "int64")])
    assert "reserved" not in queue.tables()


def test_a_task_that_needs_a_misspelt_result_is_refused(queue: tq.Queue, table: tq.Table) -> None:
    with pytest.raises(tq.UsageError, match=r"needs 'reward', and no field has that name.*did you mean 'rewards'"):
        queue.create_table("t", tasks=[tq.Task("reward", gives=["rewards"]), tq.Task("train", needs=["reward"])])
    with pytest.raises(tq.UsageError, match="did you mean 'response_ids'"):
        table.add_task(tq.Task("late", needs=["respons_ids"]))


def test_a_table_with_declared_fields_takes_no_others(queue: tq.Queue, name: str) -> None:
    tasks = [tq.Task("reward", needs=["text"], gives=["rewards"])]
    table = queue.create_table(name, fields=[tq.Field("uid", "int64")], tasks=tasks)
    rows = table.put(text=["a"], uid=[1])
    refused: list[Callable[[], object]] = [
        lambda: table.put(text=["a"], other=[1]),
        lambda: table.update(rows, other=[1]),
        lambda: queue.table(name).put(text=["a"], other=["on another handle"]),
    ]
    before = table.audit()
    for call in refused:
        with pytest.raises(
            tq.SchemaError, match=r'"other" is not in table.*takes only.*rewards, text, uid; .*extra_fields=True'
        ):
            call()
    assert table.audit() == before
    with table.lease("reward", rows=1) as batch:
        with pytest.raises(tq.SchemaError, match="takes only"):
            batch.ack(other=[1])
        batch.ack(rewards=[1.0])
    table.add_fields([tq.Field("other", "int64")])
    table.put(text=["a"], other=[1])
    assert queue.create_table(name, fields=[tq.Field("uid", "int64")], tasks=tasks, exist_ok=True).name == name
    with pytest.raises(tq.AlreadyExists, match="with other terms"):
        queue.create_table(name, fields=[tq.Field("uid", "int64")], tasks=tasks, exist_ok=True, extra_fields=True)


def test_a_table_with_extra_fields_takes_every_name_as_it_comes(queue: tq.Queue, name: str) -> None:
    tasks = [tq.Task("train", needs=["rewards"])]
    table = queue.create_table(name, fields=[tq.Field("uid", "int64")], tasks=tasks, extra_fields=True)
    table.put(uid=[1], reward=[1.0], timeout=[3])
    assert set(table.fields) == {"uid", "reward", "timeout"}
    with pytest.raises(tq.UsageError, match="extra_fields='no' is str"):
        queue.create_table(f"{name}_other", extra_fields="no")  # type: ignore[arg-type]
    sealed = queue.create_table(f"{name}_none", tasks=[tq.Task("train", needs=["x"])], extra_fields=False)
    with pytest.raises(tq.SchemaError, match="takes only"):
        sealed.put(y=[1])


def test_it_stays_so_in_a_snapshot(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path))
    with tq.connect() as queue:
        queue.create_table("closed", fields=[tq.Field("uid", "int64")]).put(uid=[1])
        queue.create_table("open", fields=[tq.Field("uid", "int64")], extra_fields=True).put(uid=[1])
        queue.create_table("plain").put(uid=[1])
        (path,) = queue.snapshot("s")
    with tq.connect() as queue:
        queue.restore(path)
        with pytest.raises(tq.SchemaError, match="takes only"):
            queue.table("closed").put(uid=[2], more=[1])
        queue.table("open").put(uid=[2], uids=[1])
        queue.table("plain").put(uid=[2], more=[1])
        with pytest.raises(tq.UsageError, match="did you mean 'more'"):
            queue.table("plain").put(mores=[1])


def test_a_parameter_of_another_call_is_named_with_the_calls_that_take_it(table: tq.Table) -> None:
    with pytest.raises(
        tq.UsageError,
        match=r"put takes no row, and 'row' is near rows, a parameter of ack, release, update; leave it out",
    ):
        table.put(x=[1], row=[0])
    with pytest.raises(
        tq.UsageError,
        match=r"update takes no timeout, and 'timeout' is near timeout_s, a parameter of put; leave it out",
    ):
        table.update([0], x=[1], timeout=5)
    with pytest.raises(
        tq.UsageError,
        match=r"put takes no rows, and 'rows' cannot be a column, since it is a parameter of ack, release",
    ):
        table.put(x=[1], rows=[0])
