"""Dispatch of a generation service with engines that take given times: classes, lessons while it runs, and an engine
that dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import transferqueue as tq
from bench.paced_engine import PacedEngine
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.errors import PeerError, UsageError
from transferqueue.workflows.dispatch.channels import live_engines
from transferqueue.workflows.service import LengthRequests, Service, serve, stream_engines
from transferqueue.workflows.service.samples import EXPECTED, Request

SLOTS, PROMPTS, STEPS_MAX, WAIT_S = 6, 40, 20, 30.0
SAMPLING = Sampling(tokens_max=1000)


def token_s(rows: int) -> float:
    return 5e-4 + 2e-5 * rows


def length_of(prompt: Prompt) -> int:
    """One prompt in eight is long; its first token says which."""
    return 200 if prompt.ids[0] == 7 else 20


class Generators:
    """Engines that serve a service from threads, each with a connection of its own."""

    def __init__(self, queue: tq.Queue, names: str) -> None:
        self.engines = {name: PacedEngine(token_s, length_of) for name in names}
        self.connections = {name: tq.connect(queue.address, label=name) for name in names}
        self.threads = [threading.Thread(target=self._serve, args=(name,), daemon=True) for name in names]
        for thread in self.threads:
            thread.start()

    def _serve(self, name: str) -> None:
        try:
            serve(
                self.connections[name],
                self.engines[name],
                SAMPLING,
                rows=1,
                slots=SLOTS,
                dispatch=name,
                stall_s=WAIT_S,
            )
        except PeerError:
            return  # killed by the test

    def end(self) -> None:
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for connection in self.connections.values():
            connection.close()


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


def prompts_of() -> list[Prompt]:
    """The long ones come last: in the given order the engines wait for them at the end."""
    kinds = np.sort(np.arange(PROMPTS) % 8)
    return [Prompt.of([int(kind), int(kind), 9]) for kind in kinds]


def test_bad_requests_are_refused(queue: tq.Queue) -> None:
    prompts = [Prompt.of([1])]
    for expected in ([1, 2], [-1], [1.5]):
        with pytest.raises(UsageError, match="give one whole number a prompt"):
            Request.of(prompts, None, expected=expected)
    assert Request.of(prompts, None, expected=[5]).columns["tokens"].tolist() == [5]
    assert "tokens" not in Request.of(prompts, None).columns
    with pytest.raises(UsageError, match='dispatch="a" with slots=0'):
        serve(queue, PacedEngine(token_s, length_of), SAMPLING, dispatch="a")


@pytest.mark.slow
def test_it_learns_plans_and_splits_while_it_runs(queue: tq.Queue) -> None:
    service = Service.init_engines(queue, stream_engines())
    service.update({"w": np.zeros(1, np.float32)})
    generators = Generators(queue, "ab")
    orders, expected = [], []
    with LengthRequests(queue, service, batch_rows=PROMPTS) as requests:
        while "longest" not in orders and len(orders) < STEPS_MAX:  # until lessons and curves suffice
            stream = requests.generate(prompts_of(), number=len(orders))
            orders.append(requests.figures()["order"])
            for batch in stream.batches(8):
                requests.learn(batch)
                expected.append(batch[EXPECTED].numpy().max())
                batch.ack()
    figures = requests.figures()
    service.seal()
    generators.end()
    assert orders[0] == "given"
    assert orders[-1] == "longest", figures
    assert figures["skilled"] is True
    assert figures["predicted_s"] < figures["given_s"]
    assert (expected[0], max(expected) > 100) == (0, True)
    assert service.table.audit().rows_done == len(orders) * PROMPTS
    assert max(engine.most for engine in generators.engines.values()) <= SLOTS


@pytest.mark.slow
def test_rows_of_a_dead_engine_go_to_the_other_and_the_next_plan_is_without_it(queue: tq.Queue) -> None:
    service = Service.init_engines(queue, stream_engines())
    service.update({"w": np.zeros(1, np.float32)})
    generators = Generators(queue, "ab")
    with ExitStack() as stack:
        requests = stack.enter_context(LengthRequests(queue, service, batch_rows=PROMPTS))
        for step in range(3):
            stream = requests.generate(prompts_of(), number=step)
            for at, batch in enumerate(stream.batches(8)):
                if step == 1 and at == 1:
                    generators.connections["a"].close()
                requests.learn(batch)
                batch.ack()
            if step == 1:
                assert [engine.name for engine in live_engines(queue, service.table.name)] == ["b"]
    service.seal()
    generators.end()
    assert service.table.audit().rows_done == 3 * PROMPTS


def test_a_generator_takes_what_it_prefers_first(queue: tq.Queue) -> None:
    service = Service.init_engines(queue, stream_engines())
    service.update({"w": np.zeros(1, np.float32)})
    prompts = prompts_of()
    stream = service.generate(prompts, expected=[length_of(prompt) for prompt in prompts])
    engine, long = PacedEngine(token_s, length_of), [tq.Compare("tokens", ">=", 100)]
    serving = threading.Thread(
        target=serve,
        args=(queue, engine, SAMPLING),
        kwargs={"rows": 1, "slots": 1, "where": long, "stall_s": WAIT_S},
    )
    serving.start()
    lengths = [len(completion.ids) for completion in stream]
    service.seal()
    serving.join(WAIT_S)
    assert lengths[:5] == [200] * 5
    assert sorted(lengths[5:]) == [20] * 35
