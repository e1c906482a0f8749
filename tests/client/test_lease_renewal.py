"""Which lease is renewed when: the rules of `lease_renewal`, without a connection."""

from __future__ import annotations

import pytest

from transferqueue.client.session.lease_renewal import LeaseRenewer, RenewedLease


def kept(
    renewer: LeaseRenewer, lease: int = 1, *, lease_s: float = 30.0, limit_s: float = 100.0, now: float = 0.0
) -> RenewedLease:
    found = RenewedLease("t", lease, lease, lease_s, limit_s)
    found.begin(now, lease_s)
    renewer.renew(found)
    return found


def test_a_lease_is_renewed_at_each_third_one_renewal_at_a_time() -> None:
    renewer = LeaseRenewer()
    one = kept(renewer)
    assert renewer.next_due() == 10.0
    assert renewer.renewals(9.9) == []
    assert renewer.renewals(10.0) == [(one, 30.0)]
    assert renewer.next_due() is None, "it is on its way"
    renewer.renewed(one, 30.0, 11.0)
    assert renewer.next_due() == 21.0


def test_the_last_renewal_ends_at_the_time_limit() -> None:
    renewer = LeaseRenewer()
    one = kept(renewer)
    now, asked = 0.0, []
    while (due := renewer.next_due()) is not None:
        now = due
        for held, lease_s in renewer.renewals(now):
            asked.append((now, lease_s))
            renewer.renewed(held, lease_s, now)
    assert asked[-1] == (70.0, 30.0)
    assert max(at + lease_s for at, lease_s in asked) == one.until == 100.0


def test_a_holder_that_shows_that_it_lives_has_its_time_limit_again() -> None:
    renewer = LeaseRenewer()
    one = kept(renewer, limit_s=30.0)
    assert renewer.renewals(10.0) == [], "the lease ends with the limit as it is"
    assert renewer.next_due() is None
    assert one.restart(25.0), "no renewal was to come: one is due now"
    renewer.renew(one)
    assert renewer.renewals(25.0) == [(one, 30.0)]
    assert one.until == 55.0


def test_restarting_does_not_put_a_renewal_off() -> None:
    renewer = LeaseRenewer()
    one = kept(renewer)
    for now in range(1, 10):
        assert not one.restart(float(now))
    assert renewer.next_due() == 10.0
    assert one.until == 109.0


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_what_is_over_is_not_renewed(how: str) -> None:
    renewer = LeaseRenewer()
    one = kept(renewer)
    other = kept(renewer, 2, now=1.0)
    setattr(one, how, True)
    assert renewer.next_due() == 11.0
    assert renewer.renewals(50.0) == [(other, 30.0)]
    assert not one.restart(60.0)


def test_ended_leases_are_swept_out() -> None:
    renewer = LeaseRenewer()
    for number in range(10_000):
        kept(renewer, number).end()
        renewer.next_due()
    assert len(renewer._heap) <= 257
