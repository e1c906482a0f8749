"""A lone caller drives: it sends its request and waits on the socket itself, so no other thread is woken.

Python raises KeyboardInterrupt in the main thread between any two instructions. So each step here may be done twice,
and a call is settled before it is taken out of the calls; see also `channel_role`.
"""

from __future__ import annotations

from transferqueue.client.session.calls import PendingCall, outcome
from transferqueue.client.session.channel_role import RoleClaim
from transferqueue.client.session.io_thread import IoThread
from transferqueue.errors import Disconnected, PeerError, ProtocolError, TransferQueueError
from transferqueue.limits import HEARTBEAT_S, UNPIN_S
from transferqueue.transport.control.channel import DrivableChannel
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_answer


def drive_if_free(io: IoThread, pending: PendingCall, until: float | None, claim: RoleClaim) -> None:
    """Send a call and wait for its reply, unless another thread has the role.

    The caller looks afterwards whether the call was sent, and is settled; after an interrupt it gives `claim` up.

    Args:
        io: the session.
        pending: the call.
        until: when to stop waiting; None: never.
        claim: takes the role.
    """
    role, channel = io.role, io.role.drivable
    if channel is None:
        return
    role.revoke_own()  # the driver may be the code that this signal handler interrupted
    if claim.take():
        try:
            _drive(io, channel, pending, until, claim)
        finally:
            _end_driving(io, channel, pending, claim)


def send_if_free(io: IoThread, pending: PendingCall, claim: RoleClaim) -> None:
    """Send a call without waiting for its reply, unless another thread has the role or other work comes first: then the
    call has no id yet.

    It sends nothing over a lost connection: a send would count as a sign of life, and put off the check whether the
    server is gone (`ServerLiveness`). The I/O thread is not woken: it, or the event loop of the call, reads the reply
    when that comes.

    Args:
        io: the session.
        pending: the call.
        claim: as of `drive_if_free`.
    """
    role, channel = io.role, io.role.drivable
    if channel is None:
        return
    role.revoke_own()
    if not claim.take():
        return
    try:
        role.driver = pending
        if claim.stands and not io.has_other_work() and not io.channel.is_lost:
            now = io.clock()
            role.suspect = True
            if io.unpinned and now >= io.unpinned_at + UNPIN_S:
                _send_pins(io, now)
            io.channel.send(io.calls.send(pending, now))
            io.outbox.spoke_at = now
            role.suspect = role.driver is not pending
    except PeerError:
        pass  # the calls keep it: the I/O thread, which is woken, sends it again
    finally:
        if role.driver is pending:
            if role.suspect or channel.is_behind:
                io.wakeup.set()
            elif channel.peek() is not None and not (pending.by_loop and channel.leave_to_loop()):
                io.wakeup.set()  # it reads when it sends
            elif io.loop_frames is not None and not pending.by_loop:
                io.wakeup.set()  # the I/O thread reads from now on, not the loop
            role.driver = None
        claim.release()
        if io.has_work():
            io.wakeup.set()


def _drive(io: IoThread, channel: DrivableChannel, pending: PendingCall, until: float | None, claim: RoleClaim) -> None:
    """Send a call and wait for its reply in this thread, which holds the role: no other thread has to be woken for it.

    It drives only where no other call is on its way, and the connection stands. As soon as anything happens but the
    reply of this call (the wake-up, a refusal, the end of the connection), the I/O thread does the rest. An interrupt
    in the wait leaves everything as it was. Anywhere else it leaves the channel suspect: the I/O thread then connects
    again, and sends the unanswered calls. So each step here may be done twice: a call is settled before it is taken out
    of the calls.
    """
    role = io.role
    role.driver = pending
    if not claim.stands or io.calls.by_id or io.has_other_work() or not channel.begin_driving():
        return
    now = io.clock()
    role.suspect = True
    try:
        if io.unpinned and now >= io.unpinned_at + UNPIN_S:
            _send_pins(io, now)
        io.channel.send(io.calls.send(pending, now))
    except PeerError:
        return
    io.outbox.spoke_at = now
    _await_reply(io, channel, pending, until)


def _await_reply(io: IoThread, channel: DrivableChannel, pending: PendingCall, until: float | None) -> None:
    """Wait until the call is settled, its deadline passes, or something else happens. Pins that are left over are sent
    meanwhile."""
    role, left_s = io.role, HEARTBEAT_S  # by then the I/O thread has work, and reads what comes
    while True:
        if until is not None and (left_s := min(until - io.clock(), HEARTBEAT_S)) <= 0:
            break
        pins_wait = bool(io.unpinned) and left_s > UNPIN_S
        role.driver_waits, role.suspect = True, False
        has_frame = channel.wait_for_frame(UNPIN_S if pins_wait else left_s)
        if role.driver is not pending:
            return
        role.driver_waits, role.suspect = False, True
        if pins_wait and not has_frame:
            try:
                _send_pins(io, io.clock())
            except PeerError:
                return  # lost: the I/O thread connects again, and sends this call and the pins once more
        elif not has_frame or not settle_next(io, channel, pending) or pending.reply is not None:
            break
    role.suspect = False


def _send_pins(io: IoThread, now: float) -> None:
    frames = io.notices_of_pins(now)
    while frames:
        del frames[: io.channel.send_some(frames)]


def settle_next(io: IoThread, channel: DrivableChannel, own: PendingCall | None) -> bool:
    """Settle the driver's call if its reply has come, and is no refusal.

    Args:
        io: the session.
        channel: its channel.
        own: the driver's call; None: any call of the event loop that reads, also one that is refused.

    Returns:
        False if the I/O thread has to look at a frame; for an event loop also if no frame has come.
    """
    frame = channel.peek()
    if frame is None:
        return own is not None and not io.channel.is_lost
    try:
        answer = decode_answer(frame)
    except ProtocolError:
        return False
    pending = io.calls.by_id.get(answer.id) if own is None else own
    if pending is None or pending.id != answer.id or (own is None and not pending.by_loop):
        return False
    if io.calls.is_late(answer):
        return False
    reply: m.Reply | TransferQueueError = answer.reply
    if isinstance(reply, m.Failed):
        reply = outcome(reply)
        if own is not None or io.why_no_waits is not None or isinstance(reply, Disconnected):
            return False
    io.server.heard_at = io.clock()
    pending.settle(reply)
    io.calls.answered(answer)
    io.channel.recv_nowait()
    return True


def _end_driving(io: IoThread, channel: DrivableChannel, pending: PendingCall, claim: RoleClaim) -> None:
    role = io.role
    if role.driver is pending:
        if pending.reply is None or role.suspect or channel.peek() is not None:
            io.wakeup.set()  # the I/O thread does the rest
        role.driver_waits = False
        channel.end_driving()
        role.driver = None
    claim.release()
    if io.has_work():
        io.wakeup.set()
