"""Relays of relays that forward, as processes: a part arrives far away before the rest is near, each link carries a
version once, and relays are killed half-way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import served
from tests.weights.relays import GENEROUS_S, MIB, TENSORS, channel_bytes, model, relaying, until
from tests.weights.test_relay_processes import counted, directory, private, right

__all__ = ["directory"]

pytestmark = pytest.mark.slow

IN_PARTS = ("--part-bytes", "1MiB")
HELD = 3 * MIB + MIB // 2
"""Where the first link stops: of two transfers at a time at least one is whole, and the last has not begun."""


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


class Chain:
    """An origin, a host with a relay, and a far host with a relay that takes from it: `near` and `far` are the links
    into the two."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        origin = opened.enter_context(served(private(directory, "o")))
        self.trainer = opened.enter_context(tq.connect(origin.ipc)).weights("policy")
        between, self.near = opened.enter_context(counted(origin))
        self.host = opened.enter_context(served(private(directory, "h")))
        self.words = ("--from", between.control.address, "--into", self.host.ipc, *IN_PARTS)
        self.relay = opened.enter_context(relaying(*self.words))
        inner, self.far = opened.enter_context(counted(self.host))
        more = ("--from", between.control.address)
        self.second = opened.enter_context(
            relaying("--from", inner.control.address, *more, *IN_PARTS, served=private(directory, "f"))
        )
        self.queue = opened.enter_context(tq.connect(self.second.ipc))
        self.reader = self.queue.weights("policy").subscribe()
        opened.callback(self.reader.close)


def test_the_far_host_has_a_part_before_the_near_one_has_all(directory: Path, opened: ExitStack) -> None:
    chain = Chain(directory, opened)
    chain.near.holds_at = HELD
    chain.trainer.publish(1, model())
    assert chain.near.holding.wait(GENEROUS_S)
    until(lambda: channel_bytes(chain.queue) >= MIB)
    assert chain.near.bytes < TENSORS * MIB
    with pytest.raises(tq.DeadlineExceeded, match=r"version 1 .* is on its way"):
        chain.reader.pull(timeout_s=0)
    chain.near.let_go()
    assert right(chain.reader.pull(timeout_s=GENEROUS_S))
    for link in (chain.near, chain.far):
        assert TENSORS * MIB < link.bytes < 1.05 * TENSORS * MIB


@pytest.mark.long
def test_a_relay_that_is_killed_half_way_is_gone_round_and_what_came_stays(directory: Path, opened: ExitStack) -> None:
    chain = Chain(directory, opened)
    chain.near.holds_at = HELD
    chain.trainer.publish(1, model())
    assert chain.near.holding.wait(GENEROUS_S)
    until(lambda: channel_bytes(chain.queue) >= MIB)
    chain.relay.stop(signal.SIGKILL)
    chain.second.told("was given up before part 0 had come")
    crossed, passed = chain.far.bytes, chain.near.bytes
    chain.near.let_go()
    assert right(chain.reader.pull(timeout_s=GENEROUS_S))
    second = chain.near.bytes - passed
    assert second < (TENSORS - 1) * MIB + MIB // 2, "what came from the first relay does not cross again"
    assert TENSORS * MIB < crossed + second < (TENSORS + 1.5) * MIB


@pytest.mark.long
def test_a_relay_that_is_started_again_sends_what_the_far_host_lacks(directory: Path, opened: ExitStack) -> None:
    chain = Chain(directory, opened)
    chain.near.holds_at = HELD
    chain.trainer.publish(1, model())
    assert chain.near.holding.wait(GENEROUS_S)
    chain.relay.stop(signal.SIGKILL)
    chain.near.let_go()
    opened.enter_context(relaying(*chain.words)).told("version 1 is here")
    assert right(chain.reader.pull(timeout_s=GENEROUS_S))
    chain.trainer.publish(2, model(w0=50))
    assert right(chain.reader.pull(timeout_s=GENEROUS_S), w0=50)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_readers_across_a_link_get_a_version_when_its_relay_was_killed_half_way(
    directory: Path, opened: ExitStack, ranks: int
) -> None:
    """All of it, or the part of each tensor that one of four ranks has."""
    only = None if ranks == 1 else dict.fromkeys(model(), tq.Slice(tq.Share(1, ranks)))
    origin, host = (opened.enter_context(served(private(directory, name))) for name in "oh")
    trainer = opened.enter_context(tq.connect(origin.ipc)).weights("policy")
    between, near = opened.enter_context(counted(origin))
    inner, far = opened.enter_context(counted(host))
    words = ("--from", between.control.address, "--into", host.ipc, *IN_PARTS)
    first = opened.enter_context(relaying(*words))
    near.holds_at = HELD
    reader = opened.enter_context(tq.connect(inner.control.address, data="remote"))
    pool = opened.enter_context(ThreadPoolExecutor(1))
    pulled = pool.submit(reader.weights("policy").pull, only=only, timeout_s=GENEROUS_S)
    trainer.publish(1, model())
    assert near.holding.wait(GENEROUS_S)
    far.reached(MIB // ranks)
    first.stop(signal.SIGKILL)
    near.let_go()
    opened.enter_context(relaying(*words))
    with pulled.result(GENEROUS_S) as weights:
        size = MIB // ranks
        wanted = {name: value[size * (ranks > 1) :][:size] for name, value in model().items()}
        assert all(np.array_equal(weights.numpy()[name], value) for name, value in wanted.items())
    assert TENSORS * size < far.bytes < 1.05 * TENSORS * size
