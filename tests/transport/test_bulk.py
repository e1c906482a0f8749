"""The bulk protocol by itself: what is believed, in which order, and how much is on its way."""

import numpy as np
import pytest

from transferqueue.errors import Corruption, ProtocolError
from transferqueue.limits import BULK_WINDOW_FRAMES
from transferqueue.transport import bulk as b

TAKEN = b.Taken(3, 4)
PIECES = [b"some bytes", memoryview(np.arange(100, dtype=np.uint8))]


def test_what_is_sent_is_read():
    head, pieces = b.message(TAKEN, PIECES)
    assert b.to_shard(head, pieces) == b.to_client(head, pieces) == TAKEN


@pytest.mark.parametrize("where", [0, 7, 8, 12])
def test_a_bit_that_changed_in_the_head_is_noticed(where):
    head, pieces = b.message(TAKEN, PIECES)
    changed = bytearray(head)
    changed[where] ^= 4
    with pytest.raises(Corruption, match="does not match its checksum"):
        b.to_shard(bytes(changed), pieces)


def test_a_bit_that_changed_in_the_bytes_is_noticed_and_so_is_a_piece_that_is_missing():
    head, pieces = b.message(TAKEN, PIECES)
    changed = bytearray(pieces[1])
    changed[50] ^= 1
    for wrong in ([pieces[0], bytes(changed)], pieces[:1], [*pieces, b"x"], []):
        with pytest.raises(Corruption, match="does not match its checksum"):
            b.to_client(head, wrong)


@pytest.mark.parametrize("garbage", [b"", b"\x00" * 7, b"\x00" * 8, b"\xff" * 500])
def test_garbage_is_no_message(garbage):
    with pytest.raises((Corruption, ProtocolError)):
        b.to_shard(garbage, [])


@pytest.mark.parametrize(
    "value", [None, [], ["Read"], ["Taken", -1, 2], ["Taken", 1, 2, False, 0], ["Refused", 1, "a", "b"]]
)
def test_what_is_no_head_is_refused_though_its_checksum_matches(value):
    import msgspec

    encoded = msgspec.msgpack.encode(value)
    with pytest.raises(ProtocolError, match="is not one"):
        b.to_shard(b._digest(encoded, []) + encoded, [])


def test_a_window_lets_so_many_frames_go_and_no_more_until_some_were_taken():
    window = b.Window()
    for number in range(BULK_WINDOW_FRAMES):
        assert window.open
        assert window.send() == number
    assert not window.open
    window.took(1)
    assert window.open
    window.took(0)
    assert window.taken == 1
    with pytest.raises(ProtocolError, match=f"were taken of {BULK_WINDOW_FRAMES}"):
        window.took(BULK_WINDOW_FRAMES + 1)


def test_a_receiver_wants_every_frame_in_order_and_tells_in_time():
    intake = b.Intake()
    told = 0
    for number in range(100):
        assert number - told < BULK_WINDOW_FRAMES, "the sender's window would have closed"
        intake.take(number)
        if intake.due(last=number == 99):
            told = intake.taken
    assert told == 100
    with pytest.raises(Corruption, match="frame 101 came where 100 was due"):
        intake.take(101)
