"""Two ends that speak different protocols: one clear error at each, and nothing is carried out.

The frames of protocol 0 were recorded from the last package that spoke it.
"""

from __future__ import annotations

import msgspec
import pytest

from transferqueue.errors import ProtocolError, VersionMismatch, from_wire
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.versions import PROTOCOL, mismatch_of, refusal_of

OLD_HELLO = bytes.fromhex(
    "9400010099a548656c6c6fc410000102030405060708090a0b0c0d0e0fcd1267a66120686f7374a0a5302e312e30a36f6c64c2c0"
)
OLD_WELCOME = bytes.fromhex(
    "9305019ba757656c636f6d650705a5302e312e30a42f72756e8100aa2f6465762f73686d2f61ce0400000000c2c2930101a0"
)
OLD_REFUSAL = bytes.fromhex(
    "93cf000001a201578b7e0093a64661696c6564ad50726f746f636f6c4572726f72d943343220627974657320617265206e6f742061206d6573736167653a20457870656374656420606172726179602c20676f742060696e7460202d2061742060245b335d60"
)
"""What that package's server answered to a `Hello` of protocol 1."""
HELLO = m.CallFrame(0, 7, 0, m.Hello(bytes(16), version="3.4"))


def of_protocol(number: int, frame: bytes) -> bytes:
    return frame[:1] + bytes([number]) + frame[2:]


def test_the_first_two_bytes_of_a_frame_tell_its_protocol() -> None:
    assert codec.encode_call(HELLO)[:2] == bytes([0x95, PROTOCOL])
    assert codec.encode_answer(m.AnswerFrame(1, 2, m.DoneReply()))[:2] == bytes([0x94, PROTOCOL])


def test_a_client_of_protocol_0_is_refused_in_a_frame_that_it_can_read() -> None:
    with pytest.raises(ProtocolError):
        codec.decode_call(OLD_HELLO)
    answer = refusal_of(OLD_HELLO, epoch=9, package="2.0")
    assert answer is not None
    epoch, call, (tag, error, text) = msgspec.msgpack.decode(answer)
    assert (epoch, call, tag, error) == (9, 1, "Failed", "ProtocolError")
    assert text.startswith(
        f"the client speaks protocol 0 (package 0.1.0) and this server speaks protocol {PROTOCOL} (package 2.0): "
        "upgrade the client, or install asyncflow-transferqueue 2.0 where the client runs"
    )


def test_a_client_of_a_later_protocol_is_refused_in_a_frame_of_this_one() -> None:
    later = of_protocol(PROTOCOL + 1, codec.encode_call(HELLO))
    with pytest.raises(ProtocolError):
        codec.decode_call(later)
    answer = refusal_of(later, epoch=9, package="2.0")
    assert answer is not None
    refused = codec.decode_answer(answer)
    assert (refused.epoch, refused.id) == (9, 7)
    assert isinstance(refused.reply, m.Failed)
    error = from_wire(refused.reply.error, refused.reply.text)
    assert isinstance(error, VersionMismatch)
    assert (
        f"protocol {PROTOCOL + 1} (package 3.4) and this server speaks protocol {PROTOCOL} (package 2.0): upgrade the "
        "server" in str(error)
    )


@pytest.mark.parametrize("frame", [OLD_WELCOME, OLD_REFUSAL])
def test_a_client_names_a_server_of_protocol_0(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_answer(frame)
    error = mismatch_of(frame, address="ipc:///x", package="2.0")
    assert str(error).startswith(
        f"the server at ipc:///x speaks protocol 0 and this client speaks protocol {PROTOCOL} (package 2.0): upgrade "
        "the server"
    )


def test_a_client_names_a_server_of_a_later_protocol_and_repeats_what_it_said() -> None:
    said = codec.encode_answer(m.AnswerFrame(1, 2, m.Failed("VersionMismatch", "this server is package 9.9")))
    error = mismatch_of(of_protocol(PROTOCOL + 1, said), address="ipc:///x", package="2.0")
    assert (
        f"protocol {PROTOCOL + 1} and this client speaks protocol {PROTOCOL} (package 2.0): upgrade the client"
        in str(error)
    )
    assert str(error).endswith("The server said: this server is package 9.9")


def test_what_a_server_of_another_protocol_said_is_shown_escaped() -> None:
    said = codec.encode_answer(m.AnswerFrame(1, 2, m.Failed("VersionMismatch", "install\n\x1b]0;9.9\x07\u202e")))
    error = mismatch_of(of_protocol(PROTOCOL + 1, said), address="ipc:///x", package="2.0")
    assert str(error).endswith("The server said: install\n\\x1b]0;9.9\\x07\\u202e")


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x94", b"\x95", b"\x94\x01\x02\x03\x04", b"\x95\x02\x01\x01\x01\x91\xc0", bytes(60)]
)
def test_garbage_is_of_no_protocol(frame: bytes) -> None:
    assert refusal_of(frame, epoch=1, package="") is None
    assert mismatch_of(frame[:3], address="", package="") is None


def test_frames_of_this_protocol_are_never_taken_for_another() -> None:
    call, answer = codec.encode_call(HELLO), codec.encode_answer(m.AnswerFrame(1, 2, m.DoneReply()))
    assert refusal_of(call, epoch=1, package="") is None
    assert mismatch_of(answer, address="", package="") is None
