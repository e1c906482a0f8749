"""`transferqueue keys`: made, listed, revoked, and their tokens; what is refused leaves the file as it is."""

import os

import pytest

from transferqueue.cli import main
from transferqueue.cli.connection import address_of
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keys import read_token


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSFERQUEUE_KEYS", str(tmp_path / "keys"))
    return tmp_path / "keys"


def test_a_key_from_its_making_to_its_end(keys, capsys):
    assert main(["keys", "new", "rollout", "--role", "producer"]) == 0
    assert main(["keys", "new", "dash", "--role", "observer"]) == 0
    assert capsys.readouterr().out == "made key rollout, role producer\nmade key dash, role observer\n"
    assert main(["keys", "token", "dash", "tcp://10.0.0.7:7777"]) == 0
    token = read_token(capsys.readouterr().out)
    assert (token.name, token.role, token.address) == ("dash", "observer", "tcp://10.0.0.7:7777")
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split("\t")[:3] for line in listed.splitlines()] == [
        [one.name, one.role, one.pair.public] for one in keyring.load(keys).clients
    ]
    assert token.keys.own.secret not in listed
    assert main(["keys", "revoke", "dash"]) == 0
    assert [one.name for one in keyring.load(keys).clients] == ["rollout"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["keys", "list"], "make keys with: transferqueue keys new"),
        (["keys", "revoke", "x"], "make keys with: transferqueue keys new"),
        (["keys", "new", "x", "--role", "boss"], "role 'boss' of key 'x' is unknown"),
        (["keys", "new", "x y"], "key name 'x y' has characters"),
        (["keys", "token", "x", "tcp://h:1"], "make keys with: transferqueue keys new"),
    ],
)
def test_a_wrong_call_says_so(keys, capsys, words, says):
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert not (keys / "keys.json").exists()


def test_a_token_for_no_tcp_address_is_refused(keys, capsys):
    main(["keys", "new", "a"])
    for address in ("ipc:///tmp/x.sock", "10.0.0.7:7777", "tcp://*:7777", "tcp://10.0.0.7:0"):
        assert main(["keys", "token", "a", address]) == 2
        assert "address" in capsys.readouterr().err


def test_an_address_that_is_a_token_is_not_shown(keys, capsys, monkeypatch):
    main(["keys", "new", "a"])
    capsys.readouterr()
    main(["keys", "token", "a", "tcp://10.0.0.7:7777"])
    token = capsys.readouterr().out.strip()
    monkeypatch.delenv("TRANSFERQUEUE_TOKEN", raising=False)
    monkeypatch.delenv("TRANSFERQUEUE_ADDRESS", raising=False)
    assert address_of(token) == "tcp://10.0.0.7:7777"
    assert os.environ.pop("TRANSFERQUEUE_TOKEN") == token
    monkeypatch.setenv("TRANSFERQUEUE_TOKEN", token)
    assert address_of(None) == "tcp://10.0.0.7:7777"
