# ruff: noqa: E402  (imports after a check that they are there)
"""Locks of keys: one holder at a time, in threads, tasks and processes; a lost one is said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

import transferqueue as tq
from transferqueue.adapters import transfer_queue as shim
from transferqueue.adapters.transfer_queue import locks


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    shim.init({"controller": {"polling_mode": True}})
    yield
    shim.close()


@pytest.mark.parametrize("lock", [shim.kv_local_lock, shim.kv_global_lock])
def test_read_and_write_under_a_lock_lose_no_update(lock: object) -> None:
    shim.kv_put("n", "p", {"x": torch.tensor(0.0)})

    def add() -> None:
        for _ in range(5):
            with lock("n", "p"):  # type: ignore[operator]
                value = shim.kv_batch_get(["n"], "p")["x"][0]
                shim.kv_put("n", "p", {"x": value + 1})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shim.kv_batch_get(["n"], "p")["x"].tolist() == [20.0]


def is_free(queue: tq.Queue, kind: str, key: str) -> bool:
    """Whether another process, which has this queue, gets the lock at once."""

    def attempt() -> None:
        try:
            with locks.locked(queue, kind, key, "p", 0.0, 30.0):
                found.append(True)
        except TimeoutError:
            found.append(False)

    found: list[bool] = []
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0]


def test_another_process_waits_for_a_global_lock_until_its_holder_ends() -> None:
    address = shim.get_client().queue.address
    with tq.connect(address) as other:
        with shim.kv_global_lock(["a", "b"], "p"):
            assert not is_free(other, locks.GLOBAL, "b")
            assert is_free(other, locks.LOCAL, "b")
        assert is_free(other, locks.GLOBAL, "b")
    with tq.connect(address) as holder:
        table = locks._table(holder, *locks._stripes(locks.GLOBAL, "b", "p")[1])
        held = table.lease(locks.GLOBAL, rows=1, timeout_s=60)
        with pytest.raises(TimeoutError), shim.kv_global_lock("b", "p", timeout=0):
            pytest.fail(f"{held} is held")
    with shim.kv_global_lock("b", "p", timeout=60):  # the end of the other session gave it back
        pass


def test_nested_locks_are_refused_and_a_global_one_comes_first() -> None:
    with shim.kv_global_lock("a", "p"), shim.kv_local_lock("a", "p"):
        with pytest.raises(RuntimeError, match="give all keys to one call"), shim.kv_local_lock("b", "p"):
            pass
        with pytest.raises(RuntimeError, match="give all keys to one call"), shim.kv_global_lock("b", "p"):
            pass
    with (
        shim.kv_local_lock("a", "p"),
        pytest.raises(RuntimeError, match="take the global one first"),
        shim.kv_global_lock("b", "p"),
    ):
        pass
    with pytest.raises(ValueError, match="name at least one"), shim.kv_local_lock([], "p"):
        pass


def test_tasks_of_an_event_loop_take_turns() -> None:
    order: list[str] = []

    async def turn(name: str) -> None:
        async with shim.async_kv_global_lock(["a", "b"], "p") as lock:
            order.append(f"{name} begins")
            await shim.async_kv_put("a", "p", {"x": torch.tensor(1.0)})
            lock.check()
            order.append(f"{name} ends")

    async def program() -> None:
        await asyncio.gather(*(turn(name) for name in "abcd"))
        with pytest.raises(RuntimeError, match="use the async_ one"), shim.kv_local_lock("a", "p"):
            pass

    asyncio.run(program())
    assert [line.split()[1] for line in order] == ["begins", "ends"] * 4
    assert all(order[at].split()[0] == order[at + 1].split()[0] for at in range(0, 8, 2))


def test_a_lost_lock_is_said() -> None:
    with shim.kv_global_lock("a", "p") as lock:
        lock.check()
        (lease,) = lock._leases
        lease.release()
        with pytest.raises(shim.LockLostError, match=r"the lock of keys \['a'\] was lost"):
            lock.check()
