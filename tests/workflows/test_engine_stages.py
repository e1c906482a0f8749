"""Stages with a real engine: weights that change beside its work, and an end that meets no update."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.workflows.grpo.job import POLICY
from transferqueue.workflows.grpo.stages.engine_stages import _following


class SlowEngine:
    """Keeps what it was given; an update lasts until `go_on`."""

    def __init__(self) -> None:
        self.began, self.go_on, self.versions = threading.Event(), threading.Event(), list[int]()

    def update_weights(self, source: Any, version: int) -> None:
        """One version."""
        self.began.set()
        self.go_on.wait(20)
        self.versions.append(version)


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        yield found


def context_of(queue: tq.Queue) -> Any:
    return SimpleNamespace(queue=queue, span=lambda *_: nullcontext())


def test_an_update_that_has_begun_ends_before_its_engine_does(queue: tq.Queue) -> None:
    """A thread that is in an engine's C++ when Python ends aborts the process, and the stage would be started again for nothing."""
    engine, channel = SlowEngine(), queue.weights(POLICY)
    with _following(context_of(queue), engine, 0):  # type: ignore[arg-type]
        channel.publish(1, {"w": np.ones(4)})
        assert engine.began.wait(20)
        threading.Timer(0.1, engine.go_on.set).start()
    assert engine.versions == [1]


def test_a_version_that_comes_when_the_stage_is_over_is_not_given_to_the_engine(queue: tq.Queue) -> None:
    engine, channel = SlowEngine(), queue.weights(POLICY)
    engine.go_on.set()
    with _following(context_of(queue), engine, 0) as check:  # type: ignore[arg-type]
        channel.publish(1, {"w": np.ones(4)})
        assert engine.began.wait(20)
    before = {thread for thread in threading.enumerate() if thread.name == "weights"}
    channel.publish(2, {"w": np.ones(4)})
    for thread in before:
        thread.join(20)
        assert not thread.is_alive()
    check()
    assert engine.versions == [1]
