"""Any sequence of requests gives what the reference model of plain dicts gives, and keeps the promises.

After every step: the audit balances, no row is in two leases of a task, no group is handed out incomplete, no row
over the staleness bound is ready for the pacing task, and an extent is freed exactly when nothing needs it.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.ledger.driver import Given, World
from tests.ledger.model import INLINE, ROW_ORDERS, Model, Refused, Row
from tests.scale import examples
from transferqueue.errors import TransferQueueError
from transferqueue.ledger import Ledger
from transferqueue.ledger.tasks.group_task import FORMING, OUT, OVER, QUEUED, GroupTaskState
from transferqueue.ledger.tasks.task_state import STATES
from transferqueue.limits import Limits
from transferqueue.policies import (
    Acked,
    AckedColumns,
    Complete,
    DeliverPartial,
    DropGroup,
    DropStale,
    HoldClock,
    KeepStale,
    Manual,
    Pacing,
    Refill,
    Requeue,
    Retry,
    Task,
    VersionBetween,
)
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_fields

ROWS_MAX = 24
UNITS = {FORMING: "forming", QUEUED: "queued", OUT: "out", OVER: "over"}

selectors = st.sampled_from(ROW_ORDERS)
group_rules = st.sampled_from(
    [
        None,
        Complete(),
        Complete(incomplete=DropGroup(), deadline_s=7),
        Complete(incomplete=DeliverPartial(), min_size=2, deadline_s=9),
        Complete(incomplete=DeliverPartial(), min_size=2),
        Complete(incomplete=Refill(), deadline_s=8),
        Complete(incomplete=Refill()),
    ]
)
stale_rules = st.sampled_from([None, DropStale(), KeepStale(), HoldClock(), Requeue("grade")])


WEIGHTS = {
    "put": 8, "lease": 8, "ack": 6, "ack_leases": 3, "update": 5, "release": 2, "pass_time": 2, "advance": 2,
    "reserve": 2, "drop": 1,
    "delete": 1, "renew": 1, "unreserve": 1, "unpin": 2, "fail_all": 2, "retry_dropped": 1, "die": 1, "seal": 1,
    "reborn": 2, "checkpointed": 1, "rollback": 1, "lose": 1, "lose_shard": 1,
}  # fmt: skip
MOVES = [move for move, weight in WEIGHTS.items() for _ in range(weight)]


class LedgerMachine(RuleBasedStateMachine):
    """One table of three tasks, three sessions, and every request."""

    @initialize(
        selector=selectors,
        train_selector=selectors,
        groups=group_rules,
        grade_groups=st.sampled_from([None, None, None, Complete(incomplete=DeliverPartial(), min_size=1)]),
        on_stale=stale_rules,
        retention=st.sampled_from([Acked(), Manual(), AckedColumns()]),
        retry=st.sampled_from(
            [
                Retry(),
                Retry(first_s=2, attempts=1),
                Retry(first_s=0.5, attempts=2),
                Retry(first_s=3, factor=1, max_s=3, attempts=2),
            ]
        ),
        replicas=st.sampled_from([1, 1, 2]),
    )
    def begin(
        self,
        selector: Any,
        train_selector: Any,
        groups: Complete | None,
        grade_groups: Complete | None,
        on_stale: Any,
        retention: Any,
        retry: Retry,
        replicas: int,
    ) -> None:
        tasks = [
            Task("grade", ["a"], ["score"], selector, grade_groups, lease_s=10, retry=retry),
            Task("log", [], [], lease_s=13),
            Task("train", ["a", "score"], [], train_selector, groups, lease_s=11, retry=Retry(attempts=2)),
        ]
        bound = None if on_stale is None else 1
        pacing = Pacing("train", 5, 3, bound, on_stale or DropStale())
        self.world = World()
        self.replicas = replicas
        self.drivers = {}
        self.model = Model(tasks, ROWS_MAX, pacing, retention)
        for _ in range(3):
            self._connect()
        self.any.create(
            tasks=tasks, limits=Limits(rows=ROWS_MAX), pacing=pacing, retention=retention, replicas=replicas
        )
        self.table = self.world.ledger.state.tables["t"]
        self.given: dict[int, Given] = {}
        self.commit_of_extent: dict[int, int] = {}
        self.pinned: dict[int, list[int]] = {}

    def _connect(self) -> None:
        driver = self.world.client()
        driver.shard = driver.session % 2
        driver.copies = [1 - driver.shard][: self.replicas - 1]
        self.drivers[driver.session] = driver
        self.pinned_of: dict[int, list[int]] = getattr(self, "pinned_of", {})
        self.pinned_of[driver.session] = []

    @property
    def any(self) -> Any:
        return next(iter(self.drivers.values()))

    def _driver(self, data: st.DataObject) -> Any:
        return self.drivers[data.draw(st.sampled_from(sorted(self.drivers)))]

    # ------------------------------------------------------------ both worlds

    def both(self, act: Any, expect: Any) -> tuple[Any, Any]:
        """Do it in both; a refusal must be of the same class, and change nothing. Returns both results."""
        before = self._fingerprint()
        self.model.tick(self.world.now)
        try:
            wanted, refusal = expect(), ""
        except Refused as refused:
            wanted, refusal = None, refused.args[0]
        if not refusal:
            return act(), wanted
        with pytest.raises(TransferQueueError) as error:
            act()
        assert type(error.value).__name__ == refusal, error.value
        assert self._fingerprint() == before
        return None, None

    def _fingerprint(self) -> Any:
        stats = self.world.stats().plain()
        return {**stats, "extents": None, "age_s": None, "oldest_row_s": None, "tasks": {
            name: [value for key, value in sorted(one.items()) if not key.endswith("_s")]
            for name, one in stats["tasks"].items()
        }}  # fmt: skip

    def _columns(self, driver: Any, rows: int, fields: set[str], **facts: Any) -> tuple[m.Columns, int]:
        """Columns for the fields, and the commit number that the model gives them."""
        big = [name for name in sorted(fields) if name not in INLINE]
        self.model.commit += 1
        columns = driver.columns(rows, big, dict.fromkeys(fields & INLINE, 1.0), **facts)
        for block in columns.blocks:
            for place in (block, *block.copies):
                self.commit_of_extent[place.extent] = self.model.commit
        return columns, self.model.commit

    def _undo_grant(self, driver: Any, columns: m.Columns) -> None:
        """A refused commit leaves its grant open; give it back, as a client does."""
        for place in [place for block in columns.blocks for place in (block, *block.copies)]:
            extent = self.world.ledger.state.core.blocks.extents.get(place.extent)
            if extent is not None and extent.session == driver.session:
                driver.apply(m.ReturnGrant(place.extent))

    # ------------------------------------------------------------ rows

    def put(self, data: st.DataObject) -> None:
        fields = data.draw(
            st.sampled_from([{"a"}, {"a", "score"}, {"a", "b"}, {"a", "b", "score"}, {"a", "score"}, {"a"}, set()]),
            "fields",
        )
        grouping = data.draw(st.sampled_from(["none", "whole", "whole", "part"]), "grouping")
        version_lag = data.draw(st.integers(-1, 3), "version_lag")
        reserved = data.draw(st.booleans(), "reserved")
        driver, count = self._driver(data), data.draw(st.sampled_from([3, 1, 2, 4]), "rows")
        version = -1 if version_lag < 0 else max(0, self.model.clock - version_lag)
        group = data.draw(st.integers(0, 3), "group")
        size = {"none": 1, "whole": count, "part": count + 1}[grouping]
        if grouping != "none":
            size = self.model.sizes.get(group, size) if data.draw(st.booleans(), "same size") else size
        tokens = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count), "tokens")
        one = (
            next((x.id for x in self.model.reservations.values() if x.session == driver.session), 0) if reserved else 0
        )
        facts: dict[str, Any] = {
            "policy_version": version,
            "tokens": tokens,
            "priority": [float(x % 3) for x in tokens],
        }
        if grouping != "none":
            facts |= {"group_id": group, "group_size": size}
        ordinal = data.draw(st.integers(-1, 6), "ordinal")
        facts["ordinal"] = [ordinal + at if ordinal >= 0 else -1 for at in range(count)]
        columns, commit = self._columns(driver, count, fields, **facts)
        rows = [
            Row(-1, group if grouping != "none" else -1, size, version, number, float(number % 3)) for number in tokens
        ]
        for row, number in zip(rows, facts["ordinal"], strict=True):
            row.ordinal = number
        put = m.PutRequest("t", count, columns, one)
        parents, continued = self._parents(data, count, fields)
        if parents is not None:
            ids = np.asarray(parents, "<i8").tobytes()
            put = m.ContinueRequest("t", count, columns, one, 0.0, ids, sorted(continued))
        reply, wanted = self.both(
            lambda: driver.apply(put),
            lambda: self.model.put(driver.session, rows, fields, one, commit, parents, continued),
        )
        if reply is not None:
            assert list(range(reply.first, reply.first + reply.rows)) == wanted
            assert driver.apply(put, call=driver.call) == reply  # sent again
        self._undo_grant(driver, columns)

    def _parents(self, data: st.DataObject, count: int, fields: set[str]) -> tuple[list[int] | None, set[str]]:
        """The rows that new ones continue, and in which fields; None: none."""
        if "a" not in fields or not data.draw(st.booleans(), "continues"):
            return None, set()
        known = [*self.model.rows, -1] if data.draw(st.integers(0, 9), "odd parent") else [self.model.next_row]
        parents = data.draw(st.lists(st.sampled_from(known), min_size=count, max_size=count), "parents")
        return parents, data.draw(st.sampled_from([{"a"}, fields - INLINE]), "continued")

    def _some_rows(self, data: st.DataObject) -> list[int]:
        known = sorted(self.model.rows)
        most = self.model.next_row
        if not known or data.draw(st.integers(0, 9), "odd") == 0:
            return [data.draw(st.integers(0, most), "row")]
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True), "rows")

    def update(self, data: st.DataObject) -> None:
        if not self.model.next_row:
            return
        fields = data.draw(st.sampled_from([{"score"}, {"score"}, {"a"}, {"b"}, {"a", "b"}, set()]), "fields")
        overwrite = data.draw(st.booleans(), "overwrite")
        version_lag = data.draw(st.none() | st.integers(0, 3), "version_lag")
        driver, rows = self._driver(data), self._some_rows(data)
        version = None if version_lag is None else max(0, self.model.clock - version_lag)
        facts = {} if version is None else {"policy_version": version}
        columns, commit = self._columns(driver, len(rows), fields, **facts)
        self.both(
            lambda: driver.apply(m.Update("t", np.asarray(rows, "<i8").tobytes(), columns, overwrite)),
            lambda: self.model.update(rows, fields, overwrite, version, commit),
        )
        self._undo_grant(driver, columns)

    def drop(self, data: st.DataObject) -> None:
        if not self.model.next_row:
            return
        rows = self._some_rows(data)
        self.both(lambda: self.any.drop(rows), lambda: self.model.user_drop(rows))

    def lose(self, data: st.DataObject) -> None:
        alive = sorted(self.model.commits_alive())
        if not alive or data.draw(st.booleans(), "spared"):
            return
        commit = data.draw(st.sampled_from(alive), "commit")
        blocks = self.world.ledger.state.core.blocks.blocks
        gone = [number for number, one in blocks.items() if self.commit_of_extent[one.at.extent] == commit]
        self.model.tick(self.world.now)
        lost = self.world.ledger.blocks_lost(gone, self.world.now)
        self.world.collect()
        assert lost.get("t", []) == sorted(self.model.lose({commit}))

    def lose_shard(self, data: st.DataObject) -> None:
        shard = data.draw(st.integers(0, 3), "shard")
        commits: dict[bool, set[int]] = {True: set(), False: set()}
        for extent in self.world.taken:
            commits[self.world.shard_of[extent] == shard].add(self.commit_of_extent[extent])
        gone = commits[True] - commits[False]
        self.model.tick(self.world.now)
        lost = self.world.lose_shard(shard)
        assert lost.get("t", []) == sorted(self.model.lose(gone))

    def delete(self, data: st.DataObject) -> None:
        if not self.model.next_row:
            return
        rows = self._some_rows(data)
        self.both(lambda: self.any.delete(rows), lambda: self.model.delete(rows))

    # ------------------------------------------------------------ leases

    def lease(self, data: st.DataObject) -> None:
        ready = [name for name in ("train", "grade", "log") if self.model.ready_units(name)]
        task = data.draw(st.sampled_from([*ready, *ready, *ready, "train", "grade", "log"]), "task")
        number = data.draw(st.sampled_from([4, 1, 2, 3, 5]), "number")
        by_groups = data.draw(st.booleans(), "by_groups")
        loose = data.draw(st.sampled_from([True, True, False]), "loose")
        low = data.draw(st.none() | st.none() | st.integers(0, 4), "low")
        driver = self._driver(data)
        by_groups = by_groups and self.model.tasks[task].groups is not None
        terms = {"groups" if by_groups else "rows": number, "at_least": 1 if loose else 0}
        where = [] if low is None else [VersionBetween(low=low)]
        reply, wanted = self.both(
            lambda: driver.lease(task, where=where, **terms),
            lambda: self.model.lease(
                driver.session, task, rows=0 if by_groups else number, groups=number if by_groups else 0,
                at_least=terms["at_least"], low=low,
            ),
        )  # fmt: skip
        if reply is None:
            return
        assert reply.rows == wanted.rows
        assert (reply.lease, reply.token) == (wanted.id, wanted.id)
        self.given[reply.lease] = reply
        self._check_content(reply, task)
        self.pinned_of[driver.session] += reply.blocks()

    def _check_content(self, reply: Given, task: str) -> None:
        """The places of the task's fields are those of the last commit that wrote them."""
        blocks = self.world.ledger.state.core.blocks.blocks
        for part in reply.reply.content.parts:
            at = codec.decode_constant(part.block_of_row, "<i4", part.values(len(reply.rows)))
            found = [self.commit_of_extent[blocks[part.blocks[one].block].at.extent] for one in at]
            chains = [{commit} for commit in found]
            if isinstance(part, m.ReplyTree):
                for node, above in enumerate(np.frombuffer(part.parents, "<i4").tolist()):
                    chains[node] |= chains[above] if above >= 0 else set()
                nodes = np.frombuffer(part.node_of_row, "<i4").tolist()
                found, chains = [found[node] for node in nodes], [chains[node] for node in nodes]
            for name in part.fields:
                assert found == [self.model.rows[row].fields[name] for row in reply.rows]
                assert chains == [self.model.read(self.model.rows[row], name) for row in reply.rows]
        named = {field.name for field in decode_fields(reply.reply.content.definitions)}
        assert named == set(self.model.tasks[task].needs)

    def _some_lease(self, data: st.DataObject) -> tuple[Any, Given, list[int] | None]:
        held = sorted(self.model.leases) if data.draw(st.integers(0, 5), "ended") else []
        given = self.given[data.draw(st.sampled_from((held or sorted(self.given))[-4:]), "lease")]
        lease = self.model.leases.get(given.lease)
        driver = self.drivers.get(lease.session) if lease else None
        if driver is None or data.draw(st.integers(0, 9), "foreign") == 0:
            driver = self._driver(data)
        rows = None
        if not data.draw(st.integers(0, 2), "partly"):
            rows = data.draw(st.lists(st.sampled_from(given.rows), min_size=1, unique=True), "rows")
        return driver, given, rows

    def ack(self, data: st.DataObject) -> None:
        if not self.given:
            return
        result = data.draw(st.booleans(), "result")
        drop = data.draw(st.integers(0, 5), "drop")
        version_lag = data.draw(st.none() | st.integers(0, 2), "version_lag")
        driver, given, rows = self._some_lease(data)
        lease = self.model.leases.get(given.lease)
        fields = {"score"} if result and lease and lease.task == "grade" else {"b"} if result else set()
        version = None if version_lag is None else max(0, self.model.clock - version_lag)
        count = len(rows) if rows is not None else len(lease.open) if lease else len(given.rows)
        facts = {} if version is None else {"policy_version": version}
        columns, commit = self._columns(driver, count, fields, **facts)
        reason = "bad" if not drop else ""
        step = data.draw(st.sampled_from([-1, -1, 0, 1, 2, 3, 4, 5]), "step")
        reply, wanted = self.both(
            lambda: driver.ack(given, rows, columns=columns, drop=reason, step=step),
            lambda: self.model.ack(driver.session, given.lease, rows, fields, version, reason, commit, step),
        )
        if reply is not None:
            assert reply.rows == wanted
        self._undo_grant(driver, columns)

    def ack_leases(self, data: st.DataObject) -> None:
        if not self.given:
            return
        driver, first, _ = self._some_lease(data)
        given = [first]
        if lease := self.model.leases.get(first.lease):
            of_task = [one.id for one in self.model.leases.values() if one.task == lease.task and one is not lease]
            given += [self.given[number] for number in of_task[: data.draw(st.integers(0, 3), "more")]]
        if data.draw(st.integers(0, 4), "odd") == 0:
            given.append(self._some_lease(data)[1])
        step = data.draw(st.sampled_from([-1, -1, 0, 1, 2, 3, 4, 5]), "step")
        reply, wanted = self.both(
            lambda: driver.ack_leases(given, step),
            lambda: self.model.ack_leases(driver.session, [one.lease for one in given], step),
        )
        if reply is not None:
            assert reply.rows == wanted

    def checkpointed(self, data: st.DataObject) -> None:
        task, step = (
            data.draw(st.sampled_from(["train", "train", "grade", "log"]), "task"),
            data.draw(st.integers(0, 5)),
        )
        reply, wanted = self.both(
            lambda: self.any.checkpointed(step, task), lambda: self.model.checkpointed(task, step)
        )
        assert reply.rows == wanted

    def rollback(self, data: st.DataObject) -> None:
        task, step = (
            data.draw(st.sampled_from(["train", "train", "grade", "log"]), "task"),
            data.draw(st.integers(-1, 4)),
        )
        back = data.draw(st.integers(-2, 3), "back")
        version = -1 if back == 3 else self.model.clock - back
        reply, wanted = self.both(
            lambda: self.any.rollback(step, task, version=version), lambda: self.model.rollback(task, step, version)
        )
        if reply is not None:
            assert reply.rows == wanted

    def release(self, data: st.DataObject) -> None:
        if not self.given:
            return
        failed = data.draw(st.booleans(), "failed")
        fields = data.draw(st.sampled_from([set(), set(), {"b"}, {"a", "score"}]), "progress")
        version_lag = data.draw(st.none() | st.integers(0, 2), "version_lag")
        driver, given, rows = self._some_lease(data)
        lease = self.model.leases.get(given.lease)
        version = None if version_lag is None else max(0, self.model.clock - version_lag)
        count = len(rows) if rows is not None else len(lease.open) if lease else len(given.rows)
        facts = {} if version is None else {"policy_version": version}
        columns, commit = self._columns(driver, count, fields, **facts)
        reply, wanted = self.both(
            lambda: driver.release(given, rows, failed=failed, columns=columns),
            lambda: self.model.release(driver.session, given.lease, rows, failed, fields, version, commit),
        )
        if reply is not None:
            assert reply.rows == wanted
        self._undo_grant(driver, columns)

    def fail_all(self, data: st.DataObject) -> None:
        """An outage: each open lease of a task fails."""
        task = data.draw(st.sampled_from(["train", "grade", "log"]), "task")
        for lease in [one for one in self.model.leases.values() if one.task == task]:
            if lease.id in self.model.leases:
                driver, given = self.drivers[lease.session], self.given[lease.id]
                self.both(
                    lambda driver=driver, given=given: driver.release(given, failed=True),
                    lambda lease=lease: self.model.release(lease.session, lease.id, None, True, set(), None, 0),
                )

    def retry_dropped(self, data: st.DataObject) -> None:
        dropped = sorted(self.model.failed)
        listed = self.any.apply(m.ListDropped("t")).rows
        assert sorted(row.row for row in listed) == dropped
        rows = [0] if not dropped else data.draw(st.lists(st.sampled_from(dropped), min_size=1, max_size=3), "rows")
        request = m.RetryRows("t", np.asarray(sorted(set(rows)), "<i8").tobytes())
        self.both(lambda: self.any.apply(request), lambda: self.model.retry(rows))

    def renew(self, data: st.DataObject) -> None:
        if not self.given:
            return
        length = data.draw(st.sampled_from([0.0, 4.0]), "length")
        driver, given, _ = self._some_lease(data)

        def expect() -> None:
            lease = self.model.leases.get(given.lease)
            if lease is None or lease.session != driver.session:
                raise Refused("LeaseExpired")
            lease.length = length or lease.length
            self.model.at(self.model.now + lease.length, lease)

        self.both(lambda: driver.renew(given, length), expect)

    # ------------------------------------------------------------ time, flow, the end

    def pass_time(self, data: st.DataObject) -> None:
        seconds = data.draw(st.integers(1, 6), "seconds")
        due = self.world.ledger.next_deadline()
        wanted = [one[0] for one in self.model.due if one[2].deadline == one[0]]
        assert due == min(wanted, default=None)
        self.world.pass_time(seconds)
        self.model.tick(self.world.now)

    def advance(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(-1, 2), "step")
        version = max(0, self.model.clock + step)
        self.both(lambda: self.any.advance(version), lambda: self.model.advance(version))

    def reserve(self, data: st.DataObject) -> None:
        rows = data.draw(st.integers(1, 6), "rows")
        lag = data.draw(st.integers(-1, 2), "lag")
        driver, version = self._driver(data), -1 if lag < 0 else max(0, self.model.clock - lag)
        reply, wanted = self.both(
            lambda: driver.reserve(rows, version), lambda: self.model.reserve(driver.session, rows, version)
        )
        if reply is not None:
            assert (reply.reservation, reply.rows, dict(reply.refills)) == (wanted.id, wanted.left, wanted.refills)

    def unreserve(self, data: st.DataObject) -> None:
        if not self.model.reservations:
            return
        rows = data.draw(st.integers(0, 3), "rows")
        driver, number = self._driver(data), data.draw(st.sampled_from(sorted(self.model.reservations)))
        self.both(
            lambda: driver.apply(m.Unreserve("t", number, rows)),
            lambda: self.model.unreserve(driver.session, number, rows),
        )

    def seal(self, data: st.DataObject) -> None:
        chance = data.draw(st.integers(0, 3), "chance")
        if chance == 0:
            self.both(lambda: self.any.seal(), self.model.seal)

    def unpin(self, data: st.DataObject) -> None:
        driver = self._driver(data)
        held = self.pinned_of[driver.session]
        if held:
            taken = data.draw(st.integers(1, len(held)))
            driver.unpin(held[:taken])
            self.pinned_of[driver.session] = held[taken:]

    def die(self, data: st.DataObject) -> None:
        linger = data.draw(st.booleans(), "linger")
        driver = self._driver(data)
        self.model.tick(self.world.now)
        driver.close(pins=not linger)
        self.model.close_session(driver.session)
        if not linger:
            self.pinned_of.pop(driver.session)
        del self.drivers[driver.session]
        self._connect()

    def reborn(self, data: st.DataObject) -> None:
        """From here on with a ledger made from an image: nobody may see a difference."""
        self.world.ledger = Ledger.from_image(self.world.ledger.image())
        self.table = self.world.ledger.state.tables["t"]

    @rule(data=st.data(), move=st.sampled_from(MOVES))
    def step(self, data: st.DataObject, move: str) -> None:
        """One request. One rule draws them all, by weight: separate rules are switched off too often together."""
        getattr(self, move)(data)

    # ------------------------------------------------------------ after every step

    @invariant()
    def same_rows(self) -> None:
        table, model = self.table, self.model
        assert sorted(model.rows) == table.rows.pages.resident_rows().tolist()
        at = table.rows.pages.index(np.array(sorted(model.rows), np.int64))
        for place, number in zip(at.tolist(), sorted(model.rows), strict=True):
            row = model.rows[number]
            has = {
                name for name in table.rows.fields if table.rows.has_all(np.array([place]), table.rows.mask((name,)))[0]
            }
            assert has == set(row.fields), number
            assert table.rows.version.a[place] == row.version
            for name, task in table.tasks.items():
                assert STATES[task.state.a[place]] == row.state[name], (number, name)
                assert task.attempts.a[place] == row.attempts.get(name, 0)

    @invariant()
    def same_counts(self) -> None:
        table, model = self.table, self.model
        assert (table.rows_put, table.rows_done, table.rows_dropped) == (
            model.put_count,
            model.done_count,
            model.dropped,
        )
        audit = self.world.audit()
        assert audit.balanced
        assert audit.tables["t"].rows_live == len(model.live())
        assert (table.clock, table.sealed) == (model.clock, model.sealed)
        assert table.flow.reserved == model.reserved()
        assert table.flow.refills == model.owed
        assert {one.id: one.left for one in table.flow.reservations.values()} == {
            one.id: one.left for one in model.reservations.values()
        }
        assert table.outstanding == model.outstanding()
        for name, task in table.tasks.items():
            for state in ("pending", "held", "retrying", "ready", "leased", "stepped"):
                assert task.counts[STATES.index(state)] == model.count(name, state), (name, state)

    @invariant()
    def same_circuits(self) -> None:
        for name, task in self.table.tasks.items():
            one, other = task.circuit, self.model.circuits[name]
            assert (one.failures, one.opened, one.trials, set(one.trial), one.due, one.deadline) == (
                other.failures,
                other.opened,
                other.trials,
                other.trial,
                other.due,
                other.deadline,
            )

    @invariant()
    def same_cursor(self) -> None:
        for start in (0, 3):
            assert self.any.cursor(start) == self.model.cursor(start)

    @invariant()
    def same_queues(self) -> None:
        for name, task in self.table.tasks.items():
            wanted = self.model.ready_units(name)
            assert task.ready.first(99).tolist() == [
                rows[0].unit if task.task.groups else rows[0].id for rows in wanted
            ]
            if not isinstance(task, GroupTaskState):
                continue
            units = {unit: UNITS[one.state] for unit, one in task.forming.items()}
            assert units == {unit: one.state for unit, one in self.model.units[name].items()}
            for unit, one in task.forming.items():
                other = self.model.units[name][unit]
                assert one.deadline == other.deadline
                assert one.state == OVER or (one.lost, one.late) == (other.lost, other.late)
                if one.state in (FORMING, QUEUED):
                    members = self.model.members(unit)
                    assert one.ready == sum(row.state[name] in ("held", "ready") for row in members)

    @invariant()
    def one_lease_a_row(self) -> None:
        leases = self.world.ledger.state.core.leases.by_id
        assert {number: (one.rows.tolist(), one.deadline) for number, one in leases.items()} == {
            number: (one.rows, one.deadline) for number, one in self.model.leases.items()
        }
        for name in self.table.tasks:
            held = [row for one in leases.values() if one.task == name for row in one.rows[one.held].tolist()]
            assert len(held) == len(set(held)) == self.model.count(name, "leased")

    @invariant()
    def nothing_stale_is_ready(self) -> None:
        for row in self.model.live():
            if row.state["train"] in ("pending", "held", "retrying", "ready"):
                assert not self.model.stale(row)

    @invariant()
    def extents_live_as_long_as_needed(self) -> None:
        """Freed exactly when no resident row reads there, no pin is left and the grant is returned."""
        blocks = self.world.ledger.state.core.blocks
        pinned = {number for held in self.pinned_of.values() for number in held}
        needed = self.model.commits_alive()
        for extent in self.world.taken:
            mine = [one for one in blocks.blocks.values() if any(place.id == extent for place in one.extents)]
            read = self.commit_of_extent[extent] in needed
            assert read or any(one.at.block in pinned for one in mine), extent
        assert needed <= {self.commit_of_extent[extent] for extent in self.world.taken}
        assert pinned <= set(blocks.blocks)
        live = [one for one in blocks.blocks.values() if one.refs]
        assert self.table.usage.bytes == sum(one.nbytes for one in live)

    def teardown(self) -> None:
        """Whatever happened: when all clients are gone and all rows dropped, every byte is free again."""
        if not hasattr(self, "table"):
            return
        self.any.apply(m.DropTable("t"))
        for session in list(self.pinned_of):
            self.world.ledger.close_session(session, self.world.now)
        self.world.collect()
        assert not self.world.taken
        assert self.world.ledger.next_deadline() is None


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestLedgerMachine = pytest.mark.slow(TestLedgerMachine)
