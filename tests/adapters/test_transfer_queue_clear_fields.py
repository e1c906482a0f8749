# ruff: noqa: E402  (imports after a check that they are there)
"""`kv_clear(fields=)` of the drop-in: fields end, their samples live on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
TensorDict = pytest.importorskip("tensordict").TensorDict
pytest.importorskip("omegaconf", reason="make test-shim has it")

from transferqueue.adapters import transfer_queue

KEYS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    transfer_queue.init({"controller": {"polling_mode": True}})
    data = TensorDict({"ids": torch.arange(12).reshape(3, 4), "score": torch.arange(3.0)}, batch_size=[3])
    transfer_queue.kv_batch_put(KEYS, "p", data, [{"n": 1}, {}, {}])
    yield
    transfer_queue.close()


def ready(*fields: str, task: str) -> list[int]:
    found: list[int] = transfer_queue.get_client().get_meta([*fields], 3, "p", task_name=task).global_indexes
    return found


def produced(*fields: str) -> list[int]:
    status: list[int] = transfer_queue.get_client().get_production_status([*fields], "p")[1].tolist()
    return status


@pytest.mark.parametrize(("fields", "error"), [([], ValueError), (3, TypeError), ([3], TypeError)])
def test_what_are_no_fields_is_refused_and_changes_nothing(fields: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        transfer_queue.kv_clear(KEYS, "p", fields=fields)
    assert produced("ids", "score") == [1, 1, 1]


def test_what_does_not_exist_is_ignored() -> None:
    transfer_queue.kv_clear(["x", "a", "a"], "p", fields=["unknown"])
    transfer_queue.kv_clear("a", "q", fields="ids")
    assert produced("ids", "score") == [1, 1, 1]


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_field_is_gone_and_the_rest_stays(asked_before: bool) -> None:
    if asked_before:
        assert ready("ids", "score", task="one") == [0, 1, 2]
    transfer_queue.kv_clear(["a", "c"], "p", fields="ids")
    transfer_queue.kv_clear(["a", "c"], "p", fields="ids")  # again: nothing
    assert transfer_queue.kv_list("p")["p"] == {"a": {"n": 1}, "b": {}, "c": {}}
    assert (produced("ids"), produced("score"), produced("ids", "score")) == ([0, 1, 0], [1, 1, 1], [0, 1, 0])
    assert list(transfer_queue.kv_batch_get(["a", "c"], "p").keys()) == ["score"]
    with pytest.raises(ValueError, match="ids"):
        transfer_queue.kv_batch_get("a", "p", "ids")
    with pytest.raises(ValueError, match="ids"):
        transfer_queue.kv_update("a", "p", {"ids": torch.arange(1)}, lambda old, new: new)
    assert ready("ids", "score", task="two") == []
    assert ready("score", task="three") == [0, 1, 2]


@pytest.mark.parametrize("field", ["ids", "score"])
def test_a_field_that_is_put_again_is_ready_again(field: str) -> None:
    assert ready("ids", "score", task="one") == [0, 1, 2]
    transfer_queue.kv_clear("b", "p", fields=[field])
    assert ready("ids", "score", task="two") == []
    transfer_queue.kv_put("b", "p", {field: torch.arange(2) if field == "ids" else torch.tensor(7.0)})
    assert ready("ids", "score", task="two") == [0, 1, 2]
    assert ready("ids", "score", task="one") == []  # what a task has consumed, it has


def test_a_reader_that_waits_gets_it_when_it_is_put_again() -> None:
    client = transfer_queue.get_client()
    transfer_queue.kv_clear(KEYS, "p", fields="ids")
    client.wait_for(["ids"], 1, "p", "t", 0.05)
    transfer_queue.kv_batch_put(KEYS, "p", TensorDict({"ids": torch.ones(3, 1, dtype=torch.int64)}, batch_size=[3]))
    assert ready("ids", task="t") == [0, 1, 2]
