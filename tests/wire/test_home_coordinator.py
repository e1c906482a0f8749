"""The law of several coordinators: which of them a name belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferqueue.errors import Impossible, UsageError
from transferqueue.limits import COORDINATORS_MAX
from transferqueue.wire.home_coordinator import CoordinatorIndex, home_coordinator

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-/]{0,40}", fullmatch=True)
SEATS = st.integers(1, COORDINATORS_MAX - 1)


@given(NAMES, SEATS)
def test_a_name_moves_only_to_a_seat_that_is_new(name: str, seats: int) -> None:
    before, after = home_coordinator(name, seats), home_coordinator(name, seats + 1)
    assert 1 <= before <= seats
    assert after in {before, seats + 1}


@given(NAMES, NAMES, SEATS)
def test_what_begins_alike_is_together(name: str, other: str, seats: int) -> None:
    assert home_coordinator(f"{name}/{other}", seats) == home_coordinator(name, seats)


def test_the_seat_of_a_name_never_changes() -> None:
    """Tables of durable servers are where earlier versions put them."""
    names = ["rollouts", "policy", "job/rollouts", "a", "b", "c"]
    assert [home_coordinator(name, 2) for name in names] == [1, 2, 2, 1, 1, 2]
    assert [home_coordinator(name, 5) for name in names] == [3, 3, 3, 5, 1, 2]


def test_names_spread_evenly() -> None:
    homes = [home_coordinator(f"table-{number}", 4) for number in range(4000)]
    assert all(900 < homes.count(seat) < 1100 for seat in range(1, 5))


@pytest.mark.parametrize(
    ("text", "seat"),
    [
        ("1/1", CoordinatorIndex()),
        ("2/3", CoordinatorIndex(2, 3)),
        ("rl-job:64/64", CoordinatorIndex(64, 64, "rl-job")),
    ],
)
def test_a_seat_is_written_and_read(text: str, seat: CoordinatorIndex) -> None:
    assert CoordinatorIndex.parse(text) == seat
    assert str(seat) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no seat; write its number and the number of all: 1/2, or NAME:1/2"),
        ("2", "'2' is no seat; write"),
        ("-1/2", "'-1/2' is no seat; write"),
        (None, "None is no seat; write"),
        ("0/2", "coordinator 0/2 is no seat: there may be 64, numbered from 1; with two, write 1/2 and 2/2"),
        ("3/2", "coordinator 3/2 is no seat"),
        ("1/65", "coordinator 1/65 is no seat"),
        ("9 lives:1/2", "deployment name '9 lives' has characters"),
    ],
)
def test_what_is_no_seat_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        CoordinatorIndex.parse(text)
    assert why in str(refused.value)


def test_what_belongs_elsewhere_is_refused_with_what_to_do() -> None:
    home = home_coordinator("rollouts", 3)
    CoordinatorIndex(home, 3).check("table", "rollouts")
    other = CoordinatorIndex(home % 3 + 1, 3, "rl")
    with pytest.raises(UsageError) as refused:
        other.check("table", "rollouts")
    assert str(refused.value) == (
        f'table "rollouts" belongs to coordinator {home} of 3, and this one is {other}; connect with the addresses of '
        "all 3, joined by commas"
    )
    with pytest.raises(UsageError, match='state /s has weight channel "rollouts", which belongs to coordinator'):
        other.check_kept([], ["rollouts"], "state /s")


def test_a_clock_that_would_never_move_is_refused() -> None:
    name = next(
        f"t{number}" for number in range(100) if home_coordinator(f"t{number}", 2) != home_coordinator("policy", 2)
    )
    with pytest.raises(Impossible, match=f'give both the same beginning, such as "{name}" and "{name}/policy"'):
        CoordinatorIndex(1, 2).check_together(name, "policy")
    CoordinatorIndex(1, 2).check_together(name, f"{name}/policy")
