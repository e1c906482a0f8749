"""Which weights a row is generated with, and when an engine changes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job.policies import context_of
from transferqueue.adapters.protocols import Pause, Unsupported
from transferqueue.errors import DeadlineExceeded, SchemaError, UsageError
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.job import (
    AlgorithmSettings,
    DataSettings,
    EngineKind,
    EngineSettings,
    Job,
    ModelSettings,
    PacingSettings,
    TrainerSettings,
    WeightsSettings,
)
from transferqueue.workflows.job.stages.policy_weights import ExactWeights, FixedWeights, VersionGate, policy_weights

WAIT_S = 20


class Engine:
    """Takes weights, and says in which order what happened."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.changed = threading.Condition()
        self.go_on = threading.Event()
        self.go_on.set()

    def _note(self, what: Any) -> None:
        with self.changed:
            self.log.append(what)
            self.changed.notify_all()

    def update_weights(self, source: Any, version: int) -> None:
        self.go_on.wait(WAIT_S)
        self._note(version)

    def pause(self, mode: Pause, *, timeout_s: float) -> None:
        self._note(mode.value)

    def resume(self) -> None:
        self._note("resume")

    def wait_for(self, what: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what in self.log, WAIT_S), self.log


class Endpoint(Engine):
    def update_weights(self, source: Any, version: int) -> None:
        raise Unsupported("an endpoint takes no weights")


def job(
    mode: Any = "async",
    *,
    in_flight: bool = True,
    staleness: int = 1,
    reproducible: bool = False,
    kind: EngineKind = "transformers",
) -> Job:
    return Job(
        engine=(EngineSettings(kind=kind),),
        model=ModelSettings(path="m"),
        data=DataSettings(path="d"),
        algorithm=AlgorithmSettings(kind="grpo"),
        trainer=TrainerSettings(prompts_per_step=4),
        reproducible=reproducible,
        pacing=PacingSettings(mode=mode, max_staleness=staleness),
        weights=WeightsSettings(in_flight=in_flight),
    )


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as opened:
        yield opened


@pytest.fixture
def channel(queue: tq.Queue) -> tq.WeightChannel:
    return queue.weights(names.POLICY, keep=4)


def publish(channel: tq.WeightChannel, version: int) -> None:
    channel.publish(version, {"w": np.full(4, version, np.float32)})


def opened(queue: tq.Queue, engine: Any, settings: Job) -> Any:
    return policy_weights(context_of(queue, None, settings, []), engine, settings)  # type: ignore[arg-type]


class Rows(list[int]):
    """A batch of rows of these groups, leased at a clock."""

    def __init__(self, groups: list[int], version: int) -> None:
        super().__init__(groups)
        self.group_id, self.version = np.array(groups), version


# ---------------------------------------------------------------- a gate of versions


def test_rows_of_a_newer_version_wait_for_those_inside() -> None:
    loaded: list[int] = []

    def load(version: int) -> int:
        loaded.append(version)
        return version

    gate, order = VersionGate(load, 0), list[str]()
    with ThreadPoolExecutor(1) as threads:
        with gate.at(0, WAIT_S):

            def newer() -> None:
                with gate.at(1, WAIT_S):
                    order.append("newer")

            waiting = threads.submit(newer)
            with gate.at(0, WAIT_S):
                order.append("older")
            assert loaded == []
        waiting.result(WAIT_S)
    assert (order, loaded) == (["older", "newer"], [1])


def test_rows_that_an_older_version_would_do_go_in_with_the_newer_one() -> None:
    gate = VersionGate(lambda version: version, 5)
    with gate.at(3, WAIT_S), gate.at(5, WAIT_S):
        pass


def test_a_wait_at_the_gate_ends_with_who_is_inside() -> None:
    gate = VersionGate(lambda version: version, 0)
    with (
        gate.at(0, WAIT_S),
        pytest.raises(DeadlineExceeded, match=r"rows of version 1 waited 0\.01 s for rows of version 0"),
        gate.at(1, 0.01),
    ):
        pass


def test_a_version_that_cannot_be_loaded_lets_the_next_try() -> None:
    tries: list[int] = []

    def load(version: int) -> int:
        tries.append(version)
        if len(tries) == 1:
            raise SchemaError("does not fit")
        return version

    gate = VersionGate(load, 0)
    with pytest.raises(SchemaError), gate.at(1, WAIT_S):
        pass
    with gate.at(1, WAIT_S):
        pass
    assert tries == [1, 1]


def test_an_exact_gate_goes_back_to_an_older_version_and_lets_its_rows_go_first() -> None:
    loaded: list[int] = []

    def load(version: int) -> int:
        loaded.append(version)
        return version

    gate, order = VersionGate(load, 5, exact=True), list[str]()

    def enter(version: int, name: str) -> None:
        with gate.at(version, WAIT_S):
            order.append(name)

    with ThreadPoolExecutor(2) as threads:
        with gate.at(5, WAIT_S):
            older = threads.submit(enter, 4, "older")
            while not gate._waiting:
                pass
            same = threads.submit(enter, 5, "same")
            while len(gate._waiting) < 2:
                pass
            assert (order, loaded) == ([], [])
        older.result(WAIT_S)
        same.result(WAIT_S)
    assert (order, loaded) == (["older", "same"], [4, 5])


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("mode", "clock", "expected"),
    [
        ("sync", 3, [(3, [0, 1, 2])]),
        ("delayed", 0, [(0, [0, 1, 2])]),
        ("delayed", 1, [(0, [0, 1]), (1, [2])]),
        ("delayed", 5, [(4, [0, 1, 2])]),
    ],
)
def test_the_version_of_a_row_is_that_of_its_step(
    queue: tq.Queue, channel: tq.WeightChannel, mode: str, clock: int, expected: Any
) -> None:
    publish(channel, 0)
    groups = [0, 5, 9] if clock == 1 else [0, 0, 0]
    with opened(queue, Engine(), job(mode)) as weights:
        assert isinstance(weights, ExactWeights)
        assert weights.turns(Rows(groups, clock)) == expected  # type: ignore[arg-type]


def test_an_exact_version_is_loaded_once_when_its_rows_come(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job("delayed")) as weights:
        for version in (1, 2):
            publish(channel, version)
        for version in (0, 1, 1, 2):
            with weights.at(version):
                pass
    assert engine.log == [0, 1, 2]


def test_a_version_that_is_no_longer_kept_is_replaced_by_the_newest(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job("delayed")) as weights:
        for version in range(1, 9):
            publish(channel, version)
        with weights.at(2):
            pass
        with weights.at(7):
            pass
    assert engine.log == [0, 8]


@pytest.mark.parametrize("mode", ["delayed", "async"])
def test_in_the_order_of_the_data_a_row_has_the_version_of_its_step_at_any_clock(
    queue: tq.Queue, channel: tq.WeightChannel, mode: str
) -> None:
    """Also when it is leased again, after the death of a generator or of the trainer."""
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job(mode, reproducible=True)) as weights:
        assert isinstance(weights, ExactWeights)
        for version in (1, 2, 3):
            publish(channel, version)
        for clock in (0, 1, 7):
            turns = weights.turns(Rows([9, 0, 5, 8, 15], clock))  # type: ignore[arg-type]
            assert turns == [(0, [1, 2]), (1, [0, 3]), (2, [4])]
        for version in (0, 2, 1, 2):
            with weights.at(version):
                pass
    assert engine.log == [0, 2, 1, 2]


def test_a_row_whose_version_is_not_published_does_not_hold_up_those_of_older_ones(
    queue: tq.Queue, channel: tq.WeightChannel
) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job(reproducible=True)) as weights, ThreadPoolExecutor(1) as threads:

        def early() -> list[Any]:
            with weights.at(2):
                return [*engine.log]

        waiting = threads.submit(early)
        publish(channel, 1)
        with weights.at(1):
            assert engine.log == [0, 1]
        publish(channel, 2)
        assert waiting.result(WAIT_S) == [0, 1, 2]


def test_in_the_order_of_the_data_no_other_version_takes_the_place_of_one_that_is_gone(
    queue: tq.Queue, channel: tq.WeightChannel
) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job(reproducible=True)) as weights:
        for version in range(1, 9):
            publish(channel, version)
        with pytest.raises(StageFailedInProcess, match=r"version 2 .* is gone"), weights.at(2):
            pass
    assert engine.log == [0]


def test_weights_follow_in_flight(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job()) as weights, weights.at(0):
        publish(channel, 1)
        engine.wait_for(1)
    assert engine.log == [0, 1]


def test_tokens_that_an_update_has_read_again_are_reported(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    class Counting(Engine):
        prefilled_again = 0

        def update_weights(self, source: Any, version: int) -> None:
            self.prefilled_again += 100 * version
            super().update_weights(source, version)

    engine, events = Counting(), list[Any]()
    publish(channel, 0)
    with policy_weights(context_of(queue, None, job(), events), engine, job()):  # type: ignore[arg-type]
        for version in (1, 2):
            publish(channel, version)
            engine.wait_for(version)
    told = [event.values for event in events if getattr(event, "kind", "") == names.PREFILLED]
    assert told == [{"tokens": 100}, {"tokens": 200}]


def test_weights_follow_between_requests(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job(in_flight=False)):
        publish(channel, 1)
        engine.wait_for("resume")
    assert engine.log == [0, "wait", 1, "resume"]


def test_between_requests_the_engine_gets_the_version_that_is_newest_then(
    queue: tq.Queue, channel: tq.WeightChannel
) -> None:
    """The trainer publishes more versions than the channel keeps while the requests that run are finished."""

    class Busy(Engine):
        def pause(self, mode: Any, *, timeout_s: float = 60) -> None:
            if not self.log[1:]:
                for version in range(2, 8):
                    publish(channel, version)
            super().pause(mode, timeout_s=timeout_s)

    engine = Busy()
    publish(channel, 0)
    with opened(queue, engine, job(in_flight=False)):
        publish(channel, 1)
        engine.wait_for("resume")
    assert engine.log == [0, "wait", 7, "resume"]


def test_a_row_waits_for_weights_that_it_may_be_trained_with(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job(staleness=0)) as weights, ThreadPoolExecutor(1) as threads:
        [(version, rows)] = weights.turns(Rows([0, 0], 1))  # type: ignore[arg-type]
        assert (version, rows) == (1, [0, 1])

        def generate() -> list[Any]:
            with weights.at(version):
                return [*engine.log]

        generating = threads.submit(generate)
        publish(channel, 1)
        assert generating.result(WAIT_S) == [0, 1]


def test_an_update_that_fails_is_raised_where_rows_are_generated(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    class Broken(Engine):
        def update_weights(self, source: Any, version: int) -> None:
            if version:
                raise SchemaError("tensor w does not fit")
            super().update_weights(source, version)

    publish(channel, 0)
    with opened(queue, Broken(), job(staleness=0)) as weights:
        publish(channel, 1)
        with pytest.raises(SchemaError, match="does not fit"), weights.at(1):
            pass


def test_an_update_that_has_begun_ends_before_its_engine_does(queue: tq.Queue, channel: tq.WeightChannel) -> None:
    engine = Engine()
    publish(channel, 0)
    with opened(queue, engine, job()):
        engine.go_on.clear()
        publish(channel, 1)
        threading.Timer(0.05, engine.go_on.set).start()
        engine.wait_for(1)
    assert engine.log == [0, 1]


@pytest.mark.parametrize("kind", ["vllm_server", "sglang_server", "vllm", "transformers"])
def test_an_engine_that_takes_weights_does_not_go_on_with_its_own(
    queue: tq.Queue, channel: tq.WeightChannel, kind: EngineKind
) -> None:
    publish(channel, 0)
    with (
        pytest.raises(UsageError, match=f'engine.kind="{kind}" of generating process 0 did not take .*checkpoint'),
        opened(queue, Endpoint(), job(kind=kind)),
    ):
        pass


@pytest.mark.parametrize("kind", ["openai", "factory"])
def test_an_endpoint_keeps_its_weights(queue: tq.Queue, channel: tq.WeightChannel, kind: EngineKind) -> None:
    publish(channel, 0)
    with opened(queue, Endpoint(), job(kind=kind)) as weights:
        assert isinstance(weights, FixedWeights)
        [(version, rows)] = weights.turns(Rows([0, 0, 1], 4))  # type: ignore[arg-type]
        with weights.at(version):
            assert rows == [0, 1, 2]
