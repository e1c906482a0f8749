"""Versions through two relays to an engine, while publishers, relays and readers die, come late and are slow, in any
order: each bit that is read is one that was published."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import transferqueue as tq
from tests.scale import examples, sizes
from tests.weights.relays import GENEROUS_S
from tests.weights.test_deltas import Model, figures, model, same, stepped
from transferqueue.weights import WeightRelay
from transferqueue.wire import messages as m

SHARES = st.sampled_from([0.0, 0.001, 0.02, 0.02, 0.3, 0.9])
HOSTS = st.integers(0, 2)
LIVES = st.one_of(st.none(), st.none(), st.integers(0, 11))
"""At which request a session dies: before it is sent (even), or when it was answered (odd). None: it lives on."""


class Died(BaseException):
    """The process of a session was killed."""


def doom(queue: tq.Queue, life: int | None) -> None:
    """Have the session end at one of its next requests, after which it sends nothing."""
    if life is None:
        return
    connection: Any = queue._client.connection
    real, left = connection.call, itertools.count(life // 2, -1)

    def call(*args: Any, **terms: Any) -> Any:
        now = next(left)
        if now > 0:
            return real(*args, **terms)
        connection.post = lambda request: None
        if now == 0 and life % 2:
            real(*args, **terms)
        raise Died

    connection.call = call


class Versions(RuleBasedStateMachine):
    """A publisher, two relays, an engine, and readers on each of three hosts."""

    @initialize()
    def begin(self) -> None:
        self.opened = ExitStack()
        self.hosts = [self.opened.enter_context(tq.connect(arena_bytes="16MiB")) for _ in range(3)]
        self.sent: list[Model] = []
        self.trainer, self.rank = self.session(0), self.session(0)
        self.relays: list[tuple[WeightRelay, tq.Queue, tq.Queue] | None] = [None, None]
        self.following = [host.weights("policy").subscribe() for host in self.hosts]
        self.engine = Engine(self.session(2))
        self.publish(0.0, 4, None, in_parts=False)

    def session(self, host: int) -> tq.Queue:
        return tq.connect(self.hosts[host].address)

    def weights(self, host: int) -> tq.WeightChannel:
        return self.hosts[host].weights("policy")

    def check(self, weights: tq.Weights) -> None:
        assert same(weights, self.sent[weights.version])

    @rule(share=SHARES, deltas=st.integers(1, 6), life=LIVES, in_parts=st.booleans())
    def publish(self, share: float, deltas: int, life: int | None, in_parts: bool) -> None:
        version = len(self.sent)
        self.sent.append(stepped(self.sent[-1], version, share) if self.sent else model())
        sent = dict(self.sent[-1])
        doom(self.trainer, life)
        try:
            channel, pending = self.trainer.weights("policy", deltas=deltas), 0
            if in_parts:
                pending = channel.begin(version, parts=2)
                whole = sent["embed"]
                sent["embed"] = tq.WeightSlice(whole[200:], 200, 512)  # type: ignore[assignment]
                first = {"embed": tq.WeightSlice(whole[:200], 0, 512)}
                self.rank.weights("policy", deltas=deltas).publish(version, first, pending=pending, part=1)
            channel.publish(version, sent, pending=pending, timeout_s=GENEROUS_S)
        except Died:
            pass
        if life is not None:
            self.trainer.close()
            self.trainer = self.session(0)

    @rule(share=SHARES)
    def be_refused(self, share: float) -> None:
        """The publisher lives on after a publication that failed."""
        with pytest.raises(tq.UsageError):
            self.trainer.weights("policy").publish(0, stepped(self.sent[-1], 0, share))

    @rule(number=st.integers(0, 1), life=LIVES, at_source=st.booleans(), part_bytes=st.sampled_from([1, 1 << 16]))
    def carry(self, number: int, life: int | None, at_source: bool, part_bytes: int) -> None:
        with suppress(Died, tq.DeadlineExceeded):
            if self.relays[number] is None:
                source, here = self.session(number), self.session(number + 1)
                self.relays[number] = WeightRelay(source, here, "policy", part_bytes=part_bytes), source, here
            relay, source, here = self.relays[number]
            doom(source if at_source else here, life)
            with self.ends(number, life):
                relay.carry(wait_s=0, timeout_s=GENEROUS_S)

    @contextmanager
    def ends(self, number: int, life: int | None) -> Iterator[None]:
        """The process of the relay ends after the block, if it has a last request: another one comes then."""
        try:
            yield
        finally:
            if life is not None:
                _, source, here = self.relays[number] or ()
                self.relays[number] = None
                for queue in (source, here):
                    queue._client.connection.post = lambda request: None
                    queue.close()

    @rule(host=HOSTS)
    def follow(self, host: int) -> None:
        """Of a host whose reader is called seldom: a slow one."""
        with suppress(tq.DeadlineExceeded):
            self.check(self.following[host].pull(timeout_s=0))

    @rule(host=HOSTS)
    def come_late(self, host: int) -> None:
        with suppress(tq.DeadlineExceeded), self.weights(host).pull(timeout_s=0) as weights:
            self.check(weights)

    @rule(host=HOSTS, first=st.integers(0, 3))
    def read_part(self, host: int, first: int) -> None:
        rows = range(128 * first, 128 * first + 128)
        with (
            suppress(tq.DeadlineExceeded),
            self.weights(host).pull(only={"embed": rows}, timeout_s=0) as weights,
        ):
            wanted = self.sent[weights.version]["embed"][rows.start : rows.stop]
            assert weights.numpy()["embed"].tobytes() == wanted.tobytes()

    @rule(dies=st.booleans())
    def generate(self, dies: bool) -> None:
        if dies:
            self.engine.queue.close()
            self.engine = Engine(self.session(2))
        if self.engine.follow():
            assert self.engine.has(self.sent[self.engine.version])

    @rule(host=HOSTS)
    def lack_memory(self, host: int) -> None:
        self.hosts[host]._client.connection.call(m.DropDeltas("policy"))

    def teardown(self) -> None:
        if not hasattr(self, "opened"):
            return
        with self.opened:
            self.publish(0.02, 4, None, in_parts=False)
            for number in (0, 1):
                self.carry(number, None, at_source=True, part_bytes=1)
            for host in range(3):
                self.follow(host)
                assert self.following[host].version == len(self.sent) - 1
                self.come_late(host)
                self.following[host].close()
            self.generate(dies=False)
            assert self.engine.version == len(self.sent) - 1
            assert [figures(host).deltas_refused for host in self.hosts] == [0, 0, 0]
            for found in self.relays:
                for queue in found[1:] if found else ():
                    queue.close()
            for queue in (self.engine.queue, self.trainer, self.rank):
                queue.close()


class Engine:
    """A module that follows the channel, as engines do."""

    def __init__(self, queue: tq.Queue) -> None:
        import torch

        from transferqueue.adapters.weights import WeightUpdater, copy_weights

        self.queue, self.module = queue, torch.nn.Module()
        for name, value in model().items():
            self.module.register_buffer(name, torch.zeros(value.shape, dtype=torch.int16))
        self._updater = WeightUpdater(queue, "policy", lambda source, version: copy_weights(source, self.module))

    @property
    def version(self) -> int:
        return self._updater.version

    def follow(self) -> bool:
        return self._updater.follow()

    def has(self, sent: Model) -> bool:
        found = self.module.state_dict()
        return all(found[name].numpy().tobytes() == value.tobytes() for name, value in sent.items())


@pytest.mark.slow
@pytest.mark.parametrize("steps", sizes(25, 700))
def test_what_is_read_is_what_was_published_in_any_order(steps: int) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    terms = settings(max_examples=examples(8), stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Versions, settings=terms)
