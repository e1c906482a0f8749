# ruff: noqa: E402  (imports after a check that they are there)
"""The ``async_`` twins take no thread of the event loop's, and do what the calls do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

from transferqueue.adapters import transfer_queue as shim

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
TensorDict = tensordict.TensorDict
WAITING = 12


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    shim.init()
    yield
    shim.close()


def samples(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(float(count))}, batch_size=[count])


def test_waiting_questions_do_not_stop_a_put() -> None:
    """All threads of the loop are taken; twelve calls wait for samples, which another call then puts."""

    async def program() -> list[int]:
        loop, client, ended = asyncio.get_running_loop(), shim.get_client(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocked = loop.run_in_executor(None, ended.wait, 120)
        waiting = [
            asyncio.create_task(client.async_get_meta(["x"], 1, "p", task_name=f"task {number}"))
            for number in range(WAITING)
        ]
        await asyncio.sleep(0)
        await client.async_put(samples(1), partition_id="p")
        metas = await asyncio.gather(*waiting)
        values = [float((await client.async_get_data(meta))["x"][0]) for meta in metas]
        ended.set()
        assert await blocked
        return [int(value) for value in values]

    assert asyncio.run(program()) == [0] * WAITING


def test_every_call_has_a_twin_that_gives_the_same() -> None:
    async def program() -> None:
        await shim.async_kv_put("a", "q", {"x": torch.tensor(1.0)}, tag={"n": (1, 2)})
        assert await shim.async_kv_list("q") == shim.kv_list("q") == {"q": {"a": {"n": (1, 2)}}}
        meta = await shim.async_kv_batch_put(["a", "b"], "q", samples(2))
        assert (await shim.async_kv_batch_get_by_meta(meta))["x"].tolist() == [0.0, 1.0]
        await shim.async_kv_update("b", "q", {"x": torch.tensor(3.0)}, torch.add)
        assert (await shim.async_kv_batch_get(["b"], "q"))["x"].tolist() == [4.0]
        await shim.async_kv_clear("a", "q")
        assert list((await shim.async_kv_list("q"))["q"]) == ["b"]
        client = shim.get_client()
        assert await client.async_get_partition_list() == client.get_partition_list() == ["q"]
        assert await client.async_check_production_status(["x"], "q")
        with pytest.raises(ValueError, match="not found"):
            await client.async_kv_retrieve_meta(["none"], "q")

    asyncio.run(program())


def test_a_cancelled_question_leaves_the_client_usable() -> None:
    async def program() -> None:
        client = shim.get_client()
        waiting = asyncio.create_task(client.async_get_meta(["x"], 1, "r", task_name="t"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.async_put(samples(2), partition_id="r")
        assert await client.async_get_partition_list() == ["r"]

    asyncio.run(program())
