"""Join tokens and the key file: what is read back, what is refused, and who may see it."""

import base64
import hashlib
import os
import stat

import msgspec
import pytest

from transferqueue.errors import AlreadyExists, NotFound, UsageError
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keyring import Keyring
from transferqueue.transport.security.keys import ClientKeys, JoinToken, KeyPair, read_token, write_token

ADDRESS = "tcp://10.0.0.7:7777"


def token(address=ADDRESS):
    return JoinToken(address, ClientKeys(KeyPair.new().public, KeyPair.new()), "w1", "producer")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_read_back_as_it_was():
    given = token()
    text = write_token(given)
    assert text.startswith("tqjoin_")
    assert " " not in text
    assert read_token(f"  {text}\n") == given


def test_nothing_prints_a_secret():
    given = token()
    assert given.keys.own.secret not in repr(given)
    with pytest.raises(UsageError) as refused:
        read_token(write_token(given)[:-1])
    assert write_token(given)[13:40] not in str(refused.value)


@pytest.mark.parametrize("cut", range(0, 140, 7))
def test_a_token_that_was_cut_or_changed_is_refused(cut):
    text = write_token(token())
    with pytest.raises(UsageError, match=r"join token '?tqjoin_|cannot be read|begin with tqjoin_"):
        read_token(text[:cut])
    changed = text[:cut] + ("A" if text[cut] != "A" else "B") + text[cut + 1 :]
    with pytest.raises(UsageError):
        read_token(changed)


@pytest.mark.parametrize(
    "text", ["", "tqjoin_", "tqjoin_====", "tqjoin_é", "tqjoin_" + "A" * 2000, None, 7, b"tqjoin_"]
)
def test_what_is_no_token_is_refused(text):
    with pytest.raises(UsageError, match="join token"):
        read_token(text)


def test_a_token_leads_to_tcp_only():
    with pytest.raises(UsageError, match="only tcp needs one"):
        read_token(write_token(token("ipc:///tmp/x.sock")))


def test_a_pair_that_is_none_is_refused():
    with pytest.raises(UsageError, match="does not belong"):
        KeyPair(KeyPair.new().public, KeyPair.new().secret)
    with pytest.raises(UsageError, match="40 characters"):
        KeyPair("x", "y")


def test_keys_are_made_listed_and_revoked(tmp_path):
    directory = tmp_path / "keys"
    keyring.add(directory, "a", "producer")
    keyring.add(directory, "b", "observer")
    assert [(one.name, one.role) for one in keyring.load(directory).clients] == [("a", "producer"), ("b", "observer")]
    joined = keyring.token_of(directory, "b", ADDRESS)
    assert (joined.role, joined.keys.server) == ("observer", keyring.load(directory).server.public)
    keyring.revoke(directory, "a")
    assert [one.name for one in keyring.load(directory).clients] == ["b"]


def test_files_are_private_whatever_the_umask_says(tmp_path):
    before = os.umask(0)
    try:
        keyring.add(tmp_path / "keys", "a", "producer")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == 0o700
    assert [(path.name, mode(path)) for path in (tmp_path / "keys").iterdir()] == [("keys.json", 0o600)]


def test_bad_keys_are_refused_and_nothing_changes(tmp_path):
    keyring.add(tmp_path / "keys", "a", "producer")
    before = (tmp_path / "keys" / "keys.json").read_bytes()
    for error, match, change in [
        (AlreadyExists, "key 'a' exists; revoke it first", lambda d: keyring.add(d, "a", "admin")),
        (UsageError, "role 'boss' of key 'b' is unknown; give one of admin", lambda d: keyring.add(d, "b", "boss")),
        (UsageError, "key name 'a b' has characters", lambda d: keyring.add(d, "a b", "admin")),
        (NotFound, "key 'z' does not exist; there are a", lambda d: keyring.revoke(d, "z")),
        (NotFound, "key 'z' does not exist; there are a", lambda d: keyring.token_of(d, "z", ADDRESS)),
    ]:
        with pytest.raises(error, match=match):
            change(tmp_path / "keys")
    assert (tmp_path / "keys" / "keys.json").read_bytes() == before


def test_no_keys_is_said(tmp_path):
    with pytest.raises(UsageError, match="does not exist; make keys with: transferqueue keys new"):
        Keyring(tmp_path / "none")


def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    keyring.add(tmp_path / "keys", "a", "producer")
    (tmp_path / "keys" / "keys.json").chmod(0o644)
    with pytest.raises(UsageError, match=r"has mode 644.*chmod 600"):
        keyring.load(tmp_path / "keys")
    (tmp_path / "keys" / "keys.json").chmod(0o600)
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(UsageError, match=r"key directory .* has mode 755.*chmod 700"):
        keyring.load(tmp_path / "keys")


def test_a_key_file_that_is_a_link_is_refused(tmp_path):
    keyring.add(tmp_path / "keys", "a", "producer")
    (tmp_path / "keys" / "keys.json").rename(tmp_path / "real.json")
    (tmp_path / "keys" / "keys.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(UsageError, match="cannot be read"):
        keyring.load(tmp_path / "keys")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server": {"public": "x", "secret": "y"}}', "\xff", "[" * 10_000])
def test_a_key_file_that_is_none_is_refused(tmp_path, text):
    keyring.add(tmp_path / "keys", "a", "producer")
    (tmp_path / "keys" / "keys.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="cannot be decoded"):
        keyring.load(tmp_path / "keys")


def test_a_keyring_follows_its_file(tmp_path):
    directory = tmp_path / "keys"
    made = keyring.add(directory, "a", "producer")
    ring = Keyring(directory)
    assert ring.owner(made.pair.public) == made
    assert not ring.refresh()
    other = keyring.add(directory, "b", "admin")
    assert ring.refresh()
    assert ring.owner(other.pair.public).role == "admin"
    keyring.revoke(directory, "a")
    assert ring.refresh()
    assert ring.owner(made.pair.public) is None
    assert ring.owner(other.pair.public) == other


def test_a_key_file_that_is_gone_lets_nobody_in(tmp_path):
    made = keyring.add(tmp_path / "keys", "a", "producer")
    ring = Keyring(tmp_path / "keys")
    (tmp_path / "keys" / "keys.json").unlink()
    assert ring.refresh()
    assert ring.owner(made.pair.public) is None


def test_a_token_of_a_later_format_says_so():
    packed = msgspec.msgpack.encode([2, {"address": ADDRESS}])
    check = hashlib.blake2b(packed, digest_size=4).digest()
    text = "tqjoin_" + base64.urlsafe_b64encode(check + packed).rstrip(b"=").decode()
    with pytest.raises(UsageError, match="has format 2, and this package reads format 1: upgrade this package"):
        read_token(text)
