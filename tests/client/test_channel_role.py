"""Who may use the channel of a session: the role is given back once, by whoever does it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from transferqueue.client.session import channel_role
from transferqueue.client.session.calls import PendingCall
from transferqueue.client.session.channel_role import ChannelRole, RoleClaim
from transferqueue.transport import Wakeup
from transferqueue.transport.address import IpcAddress
from transferqueue.transport.control.unix_socket import UnixChannel
from transferqueue.wire import messages as m


@pytest.fixture
def role(tmp_path: Path) -> Iterator[ChannelRole]:
    channel, wakeup = UnixChannel(IpcAddress(tmp_path / "s")), Wakeup()
    yield ChannelRole(channel, wakeup)
    channel.close()
    wakeup.close()


def test_a_hold_stands_until_it_is_released(role: ChannelRole) -> None:
    first, second = RoleClaim(role), RoleClaim(role)
    assert not first.stands
    assert first.take()
    assert not second.take()
    second.give_up()
    assert first.stands
    first.release()
    assert second.take()
    first.release()
    first.give_up()
    assert second.stands
    assert not first.stands


def test_what_was_given_back_is_not_revoked(role: ChannelRole) -> None:
    claim = RoleClaim(role)
    assert claim.take()
    claim.release()
    role.driver = driver = PendingCall(m.Heartbeat())  # of whoever has the role now
    role.revoke_own()
    assert role.driver is driver


def test_a_driver_in_the_same_thread_loses_the_role(role: ChannelRole) -> None:
    outer = RoleClaim(role)
    assert outer.take()
    role.revoke_own()
    assert role.suspect
    assert not outer.stands
    assert RoleClaim(role).take()


def test_what_the_io_thread_took_from_a_dead_driver_is_given_back_by_it_alone(
    role: ChannelRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_role, "ORPHAN_S", 0.01)
    orphan, call = RoleClaim(role), PendingCall(m.Heartbeat())
    assert orphan.take()
    role.driver = call
    role.take([call])
    orphan.give_up()
    role.revoke_own()
    assert role.lock.locked(), "the I/O thread has it"
    role.lock.release()
    assert RoleClaim(role).take()
