"""Any damage of a state directory ends in the answers that were given, in rows that are told as lost, or in
`Corruption`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.damage import state
from tests.scale import examples
from transferqueue.errors import Corruption
from transferqueue.server.durability import journal_head as head
from transferqueue.server.durability.state_directory import StateDirectory

fractions = st.floats(0, 1, exclude_max=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return state.bases(tmp_path_factory.mktemp("states"))


@settings(max_examples=examples(12))
@given(data=st.data())
def test_no_damage_is_silent(bases, data):
    base = data.draw(st.sampled_from(bases), "base")
    file, kind = data.draw(st.sampled_from(base.names())), data.draw(st.sampled_from(state.KINDS))
    state.verdict(base, state.Damage(file, kind, data.draw(fractions), data.draw(st.integers(0, 9))))


def test_the_journal_that_is_gone_cut_or_older_is_refused(bases):
    """What the issue was about: each of these was served as if nothing had happened."""
    for base in bases:
        for kind in ("removed", "empty"):
            assert state.verdict(base, state.Damage("state/journal.sqlite", kind, 0.5, 0)) == "refused", base.name
    for base in bases[::2]:  # of servers that were killed: the last commits are in the log
        for kind in ("removed", "empty", "cut", "older"):
            assert state.verdict(base, state.Damage("state/journal.sqlite-wal", kind, 0.5, 3)) == "refused", base.name


def test_a_turn_that_is_deleted_is_missed(bases):
    for base in bases[::2]:
        for turn in range(0, 12, 5):
            assert state.verdict(base, state.Damage("state/journal.sqlite", "turn", 0.0, turn)) == "refused"


def test_an_older_journal_or_arena_is_refused(bases):
    for base in bases[1::2]:  # ended in order: the journal is one file
        for name in base.files:
            if "arena-" in name or name.endswith("journal.sqlite"):
                assert state.verdict(base, state.Damage(name, "older", 0.0, 3)) == "refused", (base.name, name)


def test_about_alone_is_not_needed(bases):
    for base in bases:
        assert state.verdict(base, state.Damage("state/about.json", "removed", 0.0, 0)) == "as answered"


def test_a_damage_that_is_not_found_would_be_seen(bases, monkeypatch):
    """The test of the test: without the check of the head, commits are gone without a word."""
    monkeypatch.setattr(head, "check", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="the state is another one"):
        state.verdict(bases[0], state.Damage("state/journal.sqlite-wal", "cut", 0.9, 0))
    monkeypatch.setattr(StateDirectory, "_examine", _changes_first)
    with pytest.raises(AssertionError, match="files were changed"):
        state.verdict(bases[0], state.Damage("state/journal.sqlite", "empty", 0.0, 0))


def _changes_first(self, accept_loss):
    (self.path / "about.json").unlink()
    raise Corruption("too late")


def test_chance_meets_every_file_and_kind(bases):
    dice = random.Random(0)
    drawn = [state.some(bases[0], dice) for _ in range(400)]
    assert {one.file for one in drawn} == set(bases[0].names())
    assert {one.kind for one in drawn} == set(state.KINDS)
