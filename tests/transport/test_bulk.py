"""The bulk protocol by itself: what is believed, in which order, and how much is on its way."""

import numpy as np
import pytest

from transferqueue.errors import Corruption, ProtocolError
from transferqueue.limits import BULK_WINDOW_FRAMES, FRAME_BYTES, KIB
from transferqueue.transport.bulk import protocol
from transferqueue.wire.versions import PROTOCOL

TAKEN = protocol.FlowAck(3, 4)
PIECES = [b"some bytes", memoryview(np.arange(100, dtype=np.uint8))]


class Kept:
    """Takes a message, and its bytes a few at a time."""

    def __init__(self):
        self.head, self.content, self._place = None, b"", memoryview(bytearray(7))

    def expect(self, head, nbytes):
        self.head, self.nbytes = protocol.to_client(head), nbytes

    def fill(self, read):
        size = read(self._place)
        self.content += self._place[:size]
        return size


def test_what_is_sent_is_read():
    head, pieces = protocol.message(TAKEN, PIECES)
    assert protocol.to_shard(head) == protocol.to_client(head) == TAKEN
    assert protocol.lengths(head) == (len(head), 110)
    protocol.check_content(head, protocol.digest(pieces))


@pytest.mark.parametrize("where", [0, 7, 8, 12, 16, 23, 24, 30])
def test_a_bit_that_changed_in_the_head_is_noticed(where):
    head, _ = protocol.message(TAKEN, PIECES)
    changed = bytearray(head)
    changed[where] ^= 4
    with pytest.raises(
        Corruption, match=r"does not match its checksum|more than any has|begins with b.*changed on the way"
    ):
        protocol.to_shard(bytes(changed))


def test_a_bit_that_changed_in_the_bytes_is_noticed_and_so_is_a_piece_that_is_missing():
    head, pieces = protocol.message(TAKEN, PIECES)
    changed = bytearray(pieces[1])
    changed[50] ^= 1
    for wrong in ([pieces[0], bytes(changed)], pieces[:1], [*pieces, b"x"], []):
        with pytest.raises(Corruption, match="does not match its checksum"):
            protocol.check_content(head, protocol.digest(wrong))


def test_a_head_of_another_protocol_is_named():
    head, _ = protocol.message(TAKEN)
    with pytest.raises(
        Corruption, match=rf"speaks protocol 9 and this end speaks protocol {PROTOCOL}: install the same package"
    ):
        protocol.to_shard(head[:3] + b"\x09" + head[4:])


@pytest.mark.parametrize("garbage", [b"", b"\x00" * 7, b"\x00" * 8, b"\xff" * 500])
def test_garbage_is_no_message(garbage):
    with pytest.raises((Corruption, ProtocolError)):
        protocol.to_shard(garbage)


@pytest.mark.parametrize(
    "value", [None, [], ["Read"], ["Taken", -1, 2], ["Taken", 1, 2, False, 0], ["Refused", 1, "a", "b"]]
)
def test_what_is_no_head_is_refused_though_its_checksum_matches(value):
    import msgspec

    encoded = msgspec.msgpack.encode(value)
    with pytest.raises(ProtocolError, match="are not a bulk message"):
        protocol.to_shard(protocol.framed(encoded))


def test_a_window_lets_so_many_frames_go_and_no_more_until_some_were_taken():
    window = protocol.SendWindow()
    for number in range(BULK_WINDOW_FRAMES):
        assert window.open
        assert window.send() == number
    assert not window.open
    window.took(1)
    assert window.open
    window.took(0)
    assert window.taken == 1
    with pytest.raises(ProtocolError, match=f"acknowledged, but only {BULK_WINDOW_FRAMES} were sent"):
        window.took(BULK_WINDOW_FRAMES + 1)


@pytest.mark.parametrize("sizes", [[FRAME_BYTES], [256 * KIB], [0], [0, FRAME_BYTES, 300 * KIB, 1]])
def test_a_window_closes_for_a_receiver_that_does_not_tell_and_stays_open_for_one_that_does(sizes):
    sender, receiver = protocol.SendWindow(), protocol.ReceiveWindow()
    for number in range(1000):
        nbytes = sizes[number % len(sizes)]
        assert sender.open
        assert sender.send(nbytes) == number
        receiver.take(number, nbytes)
        if receiver.due(last=number == 999):
            sender.took(receiver.taken)
    assert sender.taken == 1000
    while sender.open:
        sender.send(sizes[sender.sent % len(sizes)])
    assert sender.sent - sender.taken <= protocol.WINDOW_BYTES // protocol.COUNTED_BYTES_MIN
    sender.took(sender.sent)
    assert sender.open


def test_a_receiver_wants_every_frame_in_order():
    intake = protocol.ReceiveWindow()
    intake.take(0)
    intake.take(1)
    with pytest.raises(Corruption, match="frame 3 came instead of frame 2"):
        intake.take(3)
