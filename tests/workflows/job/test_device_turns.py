"""An engine and a trainer of one process use a device in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job import jobs
from transferqueue.adapters.weights import ChannelWeights
from transferqueue.errors import Disconnected
from transferqueue.workflows.flow.events import SWAP, Event, TimeSpan
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import create_table
from transferqueue.workflows.job.stages.device_turns import DeviceTurns
from transferqueue.workflows.job.stages.policy_weights import HandedWeights, policy_weights

WAIT_S = 20


class Engine:
    """Says in which order it slept, woke and took weights, and from where."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def update_weights(self, source: Any, version: int) -> None:
        self.log.append((version, "channel" if isinstance(source, ChannelWeights) else source))


class SleepingEngine(Engine):
    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")


class Colocated:
    """The generating side of a job, which waits for the first weights in a thread; and the turns that the trainer
    uses."""

    def __init__(self, queue: tq.Queue, engine: Engine, kind: str) -> None:
        self.job = jobs.job("grpo", "pacing.mode=colocated", f"engine.0.kind={kind}")
        self.events: list[Event] = []
        self.turns = DeviceTurns()
        self.channel = queue.weights(names.POLICY, keep=2)
        self.context = Context(
            queue=queue, table=create_table(queue, self.job), emit=self.events.append, shared=self.turns
        )
        self._threads, self._stack = ThreadPoolExecutor(), ExitStack()
        self.weights = self._threads.submit(lambda: self._stack.enter_context(self._weights(engine)))

    def _weights(self, engine: Any) -> Any:
        return policy_weights(self.context, engine, self.job)

    def hand(self, version: int, source: Any = ()) -> None:
        """Publish a version and hand it over, as the trainer does."""
        self.channel.publish(version, {"w": np.zeros(2, np.float32)})
        self.turns.hand(version, source)

    def at(self, version: int) -> threading.Event:
        """Set once a row of that version may begin."""
        begun = threading.Event()

        def begin() -> None:
            with self.weights.result(WAIT_S).at(version):
                begun.set()

        self.ended = self._threads.submit(begin)
        return begun

    def close(self) -> None:
        self.turns.failed(Disconnected("the test is over"))
        self._threads.shutdown()
        self._stack.close()


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.fixture
def colocated(queue: tq.Queue, request: pytest.FixtureRequest) -> Iterator[Colocated]:
    engine, kind = request.param
    side = Colocated(queue, engine, kind)
    yield side
    side.close()


@pytest.mark.parametrize("colocated", [(engine := SleepingEngine(), "vllm")], indirect=True)
def test_an_engine_sleeps_for_the_passes_and_wakes_for_the_weights_of_the_channel(
    colocated: Colocated,
) -> None:
    turns = colocated.turns
    turns.to_trainer()
    for version in (0, 1):
        turns.to_trainer()  # as for each part of a step: once is enough
        colocated.hand(version)
        assert isinstance(colocated.weights.result(WAIT_S), HandedWeights)
        turns.to_trainer()
    assert engine.log == ["sleep", "wake", (0, "channel"), "sleep", "wake", (1, "channel"), "sleep"]
    spans = [event for event in colocated.events if isinstance(event, TimeSpan)]
    assert [(span.name, span.version) for span in spans] == [(SWAP, 0), (SWAP, 1)]


@pytest.mark.parametrize("colocated", [(local := Engine(), "transformers")], indirect=True)
def test_an_engine_of_this_process_takes_the_trainers_own_tensors_once(colocated: Colocated) -> None:
    source: Any = object()
    colocated.hand(0, source)
    colocated.turns.hand(0, source)
    assert local.log == [(0, source)]


@pytest.mark.parametrize("colocated", [(Engine(), "transformers")], indirect=True)
def test_a_row_begins_once_the_engine_has_the_version_of_the_clock(colocated: Colocated) -> None:
    colocated.hand(0)
    assert colocated.at(0).wait(WAIT_S)
    begun = colocated.at(1)
    assert not begun.is_set()
    colocated.hand(1)
    assert begun.wait(WAIT_S)


@pytest.mark.parametrize("colocated", [(Engine(), "transformers")], indirect=True)
def test_waits_of_both_sides_end_with_the_failure_of_one(colocated: Colocated) -> None:
    colocated.hand(0)
    colocated.at(1)
    colocated.turns.failed(Disconnected("the engine died"))
    with pytest.raises(Disconnected, match="the engine died"):
        colocated.ended.result(WAIT_S)
    with pytest.raises(Disconnected, match="the engine died"):
        colocated.turns.to_trainer()
