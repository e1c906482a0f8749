# ruff: noqa: E402  (imports after a check that they are there)
"""`kv_update` of the drop-in: new values made of old ones at the caller, none of which is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

from transferqueue.adapters import transfer_queue
from transferqueue.adapters.transfer_queue.samples import merging

TensorDict, NonTensorStack = tensordict.TensorDict, tensordict.NonTensorStack
KEYS = ["a", "b"]


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    transfer_queue.init({"controller": {"polling_mode": True}})
    ragged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    matrix = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(1, 4)], layout=torch.jagged)
    data = {
        "ids": ragged,
        "score": torch.tensor([0.5, 1.5]),
        "logits": matrix,
        "info": NonTensorStack({"n": 1}, {"n": 2}),
    }
    transfer_queue.kv_batch_put(KEYS, "p", TensorDict(data, batch_size=[2]), [{"status": "new"}, {}])
    yield
    transfer_queue.close()


def concat(old: Any, new: Any) -> Any:
    return torch.cat([old, new])


def values() -> dict[str, Any]:
    found = transfer_queue.kv_batch_get(KEYS, "p")
    return {
        name: [each.tolist() if isinstance(each, torch.Tensor) else each for each in found[name]]
        for name in found.keys()  # noqa: SIM118
    }


def one(**columns: Any) -> TensorDict:
    return TensorDict({name: column.unsqueeze(0) for name, column in columns.items()}, batch_size=[1])


def fail(_old: Any, _new: Any) -> Any:
    raise RuntimeError("merge failed")


def test_a_function_in_place_is_applied_once_after_a_conflict() -> None:
    seen: list[Any] = []  # keeps what the function got, and so the pages of a view

    def add(old: Any, new: Any) -> Any:
        seen.append(old)
        if len(seen) == 2:  # somebody else writes the second sample meanwhile
            transfer_queue.kv_update("b", "p", one(logits=torch.full((1, 4), 5.0)), merge_fn=lambda _, other: other)
        return old.add_(new)

    ones = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(1, 4)], layout=torch.jagged)
    transfer_queue.kv_batch_update(KEYS, "p", TensorDict({"logits": ones}, batch_size=[2]), merge_fn=add)
    assert values()["logits"] == [[[2.0] * 4] * 2, [[6.0] * 4]]


BAD: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("no dict", lambda: transfer_queue.kv_update("a", "p", ["ids"], concat), TypeError, "fields is list"),  # type: ignore[arg-type]
    ("no field", lambda: transfer_queue.kv_update("a", "p", {}, concat), TypeError, r"names \[\]; give at least one"),
    ("a number as name", lambda: transfer_queue.kv_update("a", "p", {2: torch.ones(1)}, concat), TypeError,
    "each a str"),  # type: ignore[dict-item]
    ("no function", lambda: transfer_queue.kv_update("a", "p", {"ids": torch.ones(1)}, 3), TypeError,
    "merge_fn is int"),  # type: ignore[arg-type]
    ("no such key", lambda: transfer_queue.kv_update("z", "p", {"ids": torch.arange(1)}, concat), ValueError,
    r"keys \['z'\] not found"),
    ("no such partition", lambda: transfer_queue.kv_update("a", "q", {"ids": torch.arange(1)}, concat), ValueError,
    "partition 'q' not found"),
    ("no such field", lambda: transfer_queue.kv_update("a", "p", {"x": torch.arange(1)}, concat), ValueError,
    'field "x" is not in table'),
    ("another dtype", lambda: transfer_queue.kv_update("a", "p", {"ids": torch.ones(1)}, concat), TypeError,
    "must keep dtype torch.int64"),
    ("no tensor", lambda: transfer_queue.kv_update("a", "p", {"ids": torch.arange(1)}, lambda *_: {}), TypeError,
    "returned dict for field 'ids'"),
    ("a tensor", lambda: transfer_queue.kv_update("a", "p", {"info": {}}, lambda *_: torch.ones(1)), TypeError,
    "must remain non-tensor"),
    ("another shape",
    lambda: transfer_queue.kv_update("a", "p", {"logits": torch.ones(1, 4)}, lambda *_: torch.ones(2, 5)), ValueError,
    "logits"),
    ("it raises", lambda: transfer_queue.kv_update("a", "p", {"ids": torch.arange(1)}, fail), RuntimeError,
    "merge failed"),
    ("keys twice",
    lambda: transfer_queue.kv_batch_update(["a", "a"], "p", TensorDict({"score": torch.ones(2)}, [2]), concat),
    ValueError, "named twice"),
    ("no keys", lambda: transfer_queue.kv_batch_update([], "p", TensorDict({"score": torch.ones(0)}, [0]), concat),
    ValueError, "none"),
    ("few values", lambda: transfer_queue.kv_batch_update(KEYS, "p", TensorDict({"score": torch.ones(3)}, [3]), concat),
    ValueError, "batch size"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_and_changes_nothing(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    before = values()
    with pytest.raises(error, match=text):
        call()
    assert values() == before


def test_a_sample_that_lacks_a_field_is_refused() -> None:
    transfer_queue.kv_put("a", "p", {"late": torch.arange(2)})
    new = TensorDict({"late": torch.ones(2, 1, dtype=torch.int64)}, [2])
    with pytest.raises(ValueError, match='does not have "late"'):
        transfer_queue.kv_batch_update(KEYS, "p", new, concat)
    assert transfer_queue.kv_batch_get("a", "p", "late")["late"][0].tolist() == [0, 1]


def test_values_of_every_kind_are_merged_in_one_call() -> None:
    meta = transfer_queue.kv_batch_update(
        KEYS,
        "p",
        TensorDict(
            {
                "ids": torch.tensor([[7], [8]]),
                "score": torch.tensor([1.0, 2.0]),
                "logits": torch.zeros(2, 1, 4),
                "info": NonTensorStack({"m": 3}, {"m": 4}),
            },
            batch_size=[2],
        ),
        lambda old, new: {**old, **new} if isinstance(old, dict) else old + new if old.ndim == 0 else concat(old, new),
    )
    assert (meta.keys, sorted(meta.fields or ())) == (KEYS, ["ids", "info", "logits", "score"])
    found = values()
    assert found["ids"] == [[0, 1, 2, 7], [0, 8]]
    assert found["score"] == [1.5, 3.5]
    assert [len(each) for each in found["logits"]] == [3, 2]
    assert found["info"] == [{"n": 1, "m": 3}, {"n": 2, "m": 4}]
    assert transfer_queue.kv_list("p")["p"] == {"a": {"status": "new"}, "b": {}}


def test_the_old_value_may_be_changed_in_place() -> None:
    transfer_queue.kv_update("a", "p", {"ids": torch.tensor([5, 5, 5])}, lambda old, new: old.add_(new))
    assert values()["ids"] == [[5, 6, 7], [0]]
    with pytest.raises(RuntimeError):
        transfer_queue.kv_update("a", "p", {"ids": torch.arange(3)}, lambda old, new: fail(old.zero_(), new))
    assert values()["ids"] == [[5, 6, 7], [0]]


def test_a_change_in_place_is_seen_by_no_other_reader() -> None:
    """The function gets views, and every reader has pages of its own."""
    before, seen = transfer_queue.kv_batch_get(KEYS, "p"), []

    def spoil(old: Any, new: Any) -> Any:
        seen.append(old.zero_())
        assert [value.tolist() for value in transfer_queue.kv_batch_get(KEYS, "p")["logits"]] == [
            [[1.0] * 4] * 2,
            [[1.0] * 4],
        ]
        raise RuntimeError("spoiled")

    for name, new in {"logits": torch.ones(2, 1, 4), "score": torch.ones(2)}.items():
        with pytest.raises(RuntimeError, match="spoiled"):
            transfer_queue.kv_batch_update(KEYS, "p", TensorDict({name: new}, batch_size=[2]), spoil)
    assert len(seen) == 2
    assert transfer_queue.kv_batch_get(KEYS, "p", "score")["score"].tolist() == [0.5, 1.5]
    assert [value.tolist() for value in before["logits"]] == [[[1.0] * 4] * 2, [[1.0] * 4]]


def test_an_async_twin() -> None:
    import asyncio

    asyncio.run(transfer_queue.async_kv_update("b", "p", {"ids": torch.tensor([9])}, concat))
    assert values()["ids"][1] == [0, 9]


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_updates_at_once_none_is_lost() -> None:
    """Four threads append to one value and add to another; the function runs again where another was quicker."""

    def work(worker: int) -> None:
        for number in range(10):
            new = one(ids=torch.tensor([100 * worker + number + 1000]), score=torch.tensor(1.0))
            transfer_queue.kv_batch_update(
                ["b"], "p", new, lambda old, new: old + new if old.ndim == 0 else concat(old, new)
            )

    in_threads(work)
    found = values()
    assert sorted(found["ids"][1]) == sorted(
        [0, *(1000 + 100 * worker + number for worker in range(4) for number in range(10))]
    )
    assert found["score"][1] == 1.5 + 40


def test_tags_of_puts_at_once_are_all_merged() -> None:
    in_threads(lambda worker: [transfer_queue.kv_put("a", "p", None, {f"w{worker}.{turn}": turn}) for turn in range(5)])  # type: ignore[func-returns-value]
    wanted = {f"w{worker}.{turn}": turn for worker in range(4) for turn in range(5)}
    assert transfer_queue.kv_list("p")["p"]["a"] == {"status": "new", **wanted}


def test_it_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes the value each time that it is read: here the function itself."""
    monkeypatch.setattr(merging, "RETRY_S", 0.05)

    def interfere(old: Any, new: Any) -> Any:
        transfer_queue.kv_put("a", "p", {"ids": new})
        return new

    with pytest.raises(TimeoutError, match=r"the update of keys \['a'\] in partition 'p': each of \d+ attempts"):
        transfer_queue.kv_update("a", "p", {"ids": torch.arange(2)}, interfere)


def test_a_key_that_is_cleared_and_put_again_meanwhile_is_updated_as_it_is_now() -> None:
    calls = []

    def once(old: Any, new: Any) -> Any:
        if not calls:
            transfer_queue.kv_clear("a", "p")
            transfer_queue.kv_put("a", "p", {"ids": torch.tensor([50])})
        calls.append(old.tolist())
        return concat(old, new)

    transfer_queue.kv_update("a", "p", {"ids": torch.tensor([51])}, once)
    assert calls == [[0, 1, 2], [50]]
    assert transfer_queue.kv_batch_get("a", "p", "ids")["ids"][0].tolist() == [50, 51]
