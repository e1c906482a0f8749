"""Turns: at most so many replicas change weights at once, and a dead one blocks nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import transferqueue as tq

_TAKES_A_TURN = """
import sys, transferqueue as tq
queue = tq.connect(sys.argv[1])
with queue.weights("policy").turn(length_s=3600):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        found.weights("policy").publish(0, {"w": np.ones(4)})
        yield found


def test_one_after_another(queue: tq.Queue) -> None:
    inside, most = [0], [0]
    guard = threading.Lock()

    def replica() -> None:
        with tq.connect(queue.address) as mine:
            channel = mine.weights("policy")
            for _ in range(5):
                with channel.turn(at_once=2, timeout_s=30):
                    with guard:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    channel.pull().release()
                    with guard:
                        inside[0] -= 1

    with ThreadPoolExecutor(5) as pool:
        for one in [pool.submit(replica) for _ in range(5)]:
            one.result(timeout=60)
    assert 1 <= most[0] <= 2
    assert queue.stats().channels["policy"].turns == {}


def test_a_turn_that_is_not_given_says_who_has_it(queue: tq.Queue) -> None:
    with tq.connect(queue.address) as other, other.weights("policy").turn():
        with pytest.raises(tq.DeadlineExceeded, match=r"lets 1 update at once, and session \d+ do"):
            queue.weights("policy").turn(timeout_s=0).__enter__()
        assert len(queue.stats().channels["policy"].turns) == 1
    with queue.weights("policy").turn(timeout_s=0):
        pass


def test_an_expired_turn_blocks_nobody(queue: tq.Queue) -> None:
    mine = queue.weights("policy").turn(timeout_s=30)
    with tq.connect(queue.address) as slow, slow.weights("policy").turn(length_s=0.05), mine:
        pass  # the other has not ended its turn: it expired


def test_a_dead_replica_blocks_nobody(queue: tq.Queue) -> None:
    command = [sys.executable, "-c", _TAKES_A_TURN, queue.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as replica:
        assert replica.stdout is not None
        assert replica.stdout.readline() == b"mine\n"
        with ThreadPoolExecutor(1) as pool:

            def take() -> None:
                with queue.weights("policy").turn(timeout_s=60):
                    pass

            waiting = pool.submit(take)
            replica.kill()
            waiting.result(timeout=60)


@pytest.mark.parametrize(
    ("terms", "match"), [({"at_once": 0}, "at_once"), ({"length_s": -1}, "length_s"), ({"timeout_s": -1}, "timeout_s")]
)
def test_bad_terms_are_refused(queue: tq.Queue, terms: dict[str, int], match: str) -> None:
    with pytest.raises(tq.UsageError, match=match):
        queue.weights("policy").turn(**terms).__enter__()


def test_a_turn_needs_a_channel(queue: tq.Queue) -> None:
    with pytest.raises(tq.NotFound, match='channel "none" does not exist; there are policy'):
        queue.weights("none").turn().__enter__()


def test_turns_in_an_event_loop() -> None:
    async def run() -> None:
        async with tq.aconnect() as queue:
            channel = queue.weights("policy")
            await channel.publish(0, {"w": np.ones(4)})
            async with channel.turn(timeout_s=20):
                await channel.applied(0)

    asyncio.run(run())
