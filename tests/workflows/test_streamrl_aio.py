"""The stream generation service in an event loop: the same streams, awaited."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch", exc_type=ImportError)

import transferqueue as tq
from tests.workflows.stream_engine import SAMPLING, Countdown, answer, count_down
from tests.workflows.test_streamrl import WAIT_S, places, prompts
from transferqueue.adapters.protocols import Completion
from transferqueue.errors import DeadlineExceeded, SchemaError
from transferqueue.workflows.service import AsyncCompletionStream, AsyncService, SamplesLost, serve, stream_engines
from transferqueue.workflows.service.samples import completions


def generate_all(address: str) -> None:
    with tq.connect(address) as queue:
        serve(queue, Countdown(), SAMPLING, stall_s=WAIT_S)


def test_streams_are_taken_closed_and_gone_on_with_while_others_are_generated() -> None:
    async def run(queue: tq.AsyncQueue) -> None:
        service = await AsyncService.init_engines(queue, stream_engines(batch_rows=8, max_staleness=None, groups=True))
        assert await service.update(count_down(2)) == 0
        generating = asyncio.create_task(asyncio.to_thread(generate_all, queue.address))
        taken: list[Completion] = []
        async with await service.generate(prompts([30, 40], samples=4), timeout_s=WAIT_S) as stream:
            async for one in stream:
                taken.append(one)
                if len(taken) == 5:
                    break
        del taken[4:]  # a group is handed back whole
        assert [one async for one in stream] == []
        elsewhere = await AsyncService.join(queue)
        taken += [one async for one in await elsewhere.resume(stream.request, timeout_s=WAIT_S)]
        assert places(taken) == [(prompt, sample) for prompt in range(2) for sample in range(4)]
        assert taken[0].ids.tolist() in [answer(one.ids, count_down(2)["next"]) for one in prompts([30, 40])]

        assert await service.update(count_down(1)) == 1
        rows = 0
        async for batch in (await service.generate(prompts([3, 4], samples=4))).batches(8, at_least=4):
            async with batch:
                assert {one.spans[0][0] for one in completions(batch)} == {1}
                rows += len(batch)
        assert rows == 8
        await service.seal()
        await generating

    asyncio.run(with_queue(run))


async def use_none(stream: AsyncCompletionStream) -> None:
    """The first cannot be used."""
    async with stream:
        await anext(stream)
        raise ZeroDivisionError


def test_what_could_not_be_used_comes_again_and_a_cancelled_rest_is_dropped() -> None:
    async def run(queue: tq.AsyncQueue) -> None:
        service = await AsyncService.init_engines(queue, stream_engines())
        await service.update(count_down(1))
        stream = await service.generate(prompts([5, 6]), timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
        await service.seal()
        await asyncio.to_thread(generate_all, queue.address)
        with pytest.raises(ZeroDivisionError):
            await use_none(stream)
        again = await service.resume(stream.request)
        first = await anext(again)
        assert first.prompt == 0
        lost = await service.resume(stream.request)
        assert await again.cancel() == 1
        with pytest.raises(SamplesLost, match="2 samples were still to come, and 0 are left"):
            await anext(lost)
        assert (await service.table.audit()).dropped == {"cancelled": 1}

        await queue.create_table("other", tasks=[tq.Task("train")])
        with pytest.raises(SchemaError, match="declare the job with stream_engines"):
            await (await AsyncService.join(queue, name="other")).resume(0)

    asyncio.run(with_queue(run))


async def with_queue(run) -> None:  # type: ignore[no-untyped-def]
    async with tq.aconnect() as queue:
        await run(queue)
