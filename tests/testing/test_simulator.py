"""The simulator over the production state machines: no promise broken, and the same course for the same seed."""

import itertools
import os
from collections import Counter

import pytest

from tests.cycles import none_of_a_server
from tests.scale import sizes
from tests.simulator import bounds, machine, replay_command, simulate
from tests.simulator.run import KINDS, SimRun
from tests.simulator.sweep import sweep
from tests.testing import courses
from transferqueue.server.coordinator import Coordinator


def test_a_seed_is_replayed_exactly():
    assert simulate(17) == simulate(17)


def test_a_simulation_opens_no_descriptors():
    """A simulated process was known by a small number, which the server duplicated as if it were its descriptor."""
    before = os.listdir("/proc/self/fd")
    assert not simulate(1, "crowded-disk").broken
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.slow
def test_every_use_of_a_deployment_is_simulated(monkeypatch):
    """And no promise is broken, in this process, where a debugger sees it; and servers leave no garbage while they
    live."""
    used: set[str] = set()
    durable: set[bool] = set()
    killed: list[Coordinator] = []
    begin = Coordinator.__init__
    monkeypatch.setattr(Coordinator, "__init__", lambda self, *a, **k: (killed.append(self), begin(self, *a, **k))[1])
    with none_of_a_server():
        for seed in range(20):
            run = SimRun(seed)
            run.whole()
            used.update(job.table for job in run.jobs)
            durable.add(run.durable)
    assert used == {"t", "ranks", "stepped", "kept", "columns", "policy", "copied"}
    assert durable == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(25, courses.SEEDS))
def test_seeds_take_the_courses_that_were_recorded(seeds: int):
    """The first 25 have every job of the simulator."""
    recorded = courses.recorded()
    changed = [seed for seed in range(seeds) if courses.course(seed) != recorded[seed]]
    assert not changed, f"{courses.REMEDY}: {changed}"


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(6, 300))
def test_no_promise_is_broken_where_blocks_go_to_a_disk(seeds: int):
    """A slow one, that is full, unreadable or hung at times."""
    faults: Counter[str] = Counter()
    for seed in range(seeds):
        for kind in ("disk", "backlog"):
            run = SimRun(seed, KINDS[kind])
            run.whole()
            faults += run.world.faults
    assert faults["extent spilled"] > 10 * seeds
    assert faults["spill disk hung"]
    assert faults["spill disk full"]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(4, 300))
@pytest.mark.parametrize("kind", ["full-disk", "crowded-full-disk"])
def test_no_promise_is_broken_where_memory_and_disk_are_full(kind: str, seeds: int):
    """Producers wait for memory all the time, of which each block is a quarter."""
    spilled = 0
    for seed in range(seeds):
        run = SimRun(seed, KINDS[kind])
        run.whole()
        spilled += run.world.faults["extent spilled"]
        assert not run.world.faults["spill file full"]
    assert spilled > 5 * seeds


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(6, 300))
def test_no_promise_is_broken_where_rows_share_values(seeds: int):
    """Puts, updates, acks and releases refer to values of the table, with a disk for cold blocks and without. In seed
    299 a block ends while a request waits for it and for others that are on the disk."""
    referred = 0
    for seed in (*range(seeds), 299):
        run = SimRun(seed, KINDS["interned-disk" if seed % 2 else "interned"])
        run.whole()
        referred += run.world.faults["value referred to"]
    assert referred > 5 * seeds


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(3, 300))
@pytest.mark.parametrize("kind", ["crowded-mixed", "crowded-disk", "crowded-interned-disk"])
def test_no_promise_is_broken_where_sessions_end_while_their_calls_are_due(kind: str, seeds: int):
    """Killed, by Goodbye, with their connections, with their keys, and as they do not read; all at once in some
    turns."""
    broken = [
        (result.broken, replay_command(result.seed, kind))
        for seed in range(seeds)
        if (result := simulate(seed, kind)).broken
    ]
    assert not broken


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sizes(10, 2000))
@pytest.mark.timeout(3600)
def test_no_promise_is_broken_where_the_ledger_is_interrupted(seeds: int):
    """By MemoryError, KeyboardInterrupt and RecursionError, at any of its lines. By row: the books name no ack that no
    worker sent. In seed 5 a session that ended by a defect left its wake-ups undone; in 91 memory was lent that no
    grant named."""
    faults: Counter[str] = Counter()
    for seed in {*range(seeds), 91}:
        run = SimRun(seed, KINDS["interrupted"])
        run.whole()
        faults += run.world.faults
    assert faults["ledger torn"] > seeds / 2
    assert all(
        faults[f"{error} in the ledger"] > seeds / 2 for error in ("MemoryError", "KeyboardInterrupt", "RecursionError")
    )


def test_an_event_that_does_not_end_fails_its_seed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "EVENT_S", 0.05)
    monkeypatch.setattr(Coordinator, "process_exited", lambda *_: [None for _ in itertools.count()])
    assert "did not end within" in simulate(1).broken


def test_a_server_that_never_sleeps_fails_its_seed(monkeypatch: pytest.MonkeyPatch):
    """It is due again as soon as it has done what was due."""
    monkeypatch.setattr(Coordinator, "next_deadline", lambda _: 0.0)
    assert "ticks one after the other" in simulate(1).broken
    monkeypatch.setattr(machine, "SLEEPLESS_MAX", 10**9)
    monkeypatch.setattr(bounds, "EVENTS_MAX", 1000)
    assert "something is due again and again" in simulate(1).broken


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5037, 5132])
def test_a_put_whose_rows_have_ended_is_not_repeated(seed: int):
    """The painter of these seeds does not hear of its put, and tries again when both tasks are done with its rows: no
    key holds them any more."""
    SimRun(seed).whole()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", sizes(16, 2000))
def test_no_seed_breaks_a_promise_under_a_hundred_faults_each(seeds: int):
    faults, broken = sweep(first=1000, seeds=seeds)
    assert not [(one.broken, replay_command(one.seed)) for one in broken]
    assert faults.total() >= 100 * seeds
