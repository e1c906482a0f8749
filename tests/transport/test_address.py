import pytest

from transferqueue.errors import UsageError
from transferqueue.transport import InprocAddress, IpcAddress, TcpAddress, dial, parse_address


@pytest.mark.parametrize(
    "text",
    ["ipc:///run/tq/control.sock", "tcp://127.0.0.1:7070", "tcp://[::1]:1", "tcp://node-1.example:0", "inproc:1-2"],
)
def test_an_address_survives_being_read_and_written(text):
    assert str(parse_address(text)) == text


def test_an_address_has_its_parts():
    assert parse_address("tcp://[::1]:65535") == TcpAddress("[::1]", 65535)
    assert parse_address("inproc:1-2") == InprocAddress("1-2")
    place = parse_address("ipc:///a/b.sock")
    assert isinstance(place, IpcAddress)
    assert str(place.lock_path) == "/a/b.sock.lock"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has an unknown form; give ipc:///"),
        ("udp://a:1", "has an unknown form"),
        ("ipc://relative/x.sock", "no absolute path"),
        ("ipc:///ends/", "no absolute path"),
        ("ipc://@abstract", "any user may open"),
        ("ipc:///" + "x" * 200, "201 bytes; the kernel allows 107"),
        ("tcp://host", "no host and port"),
        ("tcp://:7", "no host and port"),
        ("tcp://host:x", "port 'x'; a port is a number"),
        ("tcp://host:70000", "port '70000'"),
        ("tcp://ho st:7", "no host and port"),
        ("inproc:", "names no embedded server"),
        ("inproc:../x", "names no embedded server"),
        ("ipc:///a\x00b", "zero byte"),
        (7, "is int; an address is text"),
        (None, "is NoneType"),
    ],
)
def test_a_bad_address_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        parse_address(text)


@pytest.mark.parametrize("text", ["tcp://*:7070", "tcp://127.0.0.1:0"])
def test_an_address_to_listen_at_is_not_one_to_dial(text):
    with pytest.raises(UsageError, match="is only for listening"):
        dial(text)
