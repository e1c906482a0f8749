"""CURVE keys, and the join token that carries them to a client.

See docs/decisions/keys-and-limits.md.

- A server has one key pair. Each client has its own key pair, with a name and a role in the server's key file
  (`keyring`).
- A client must know the server's public key before it connects, and the server accepts only public keys in its key
  file. All traffic between them is encrypted. A peer without a known key gets no answer.
- A *join token* is one text with the address, the server's public key and the client's secret key. Its holder can act
  as that client, so treat it as a password. No function here prints a secret; `repr` omits it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final

import msgspec
import zmq

from transferqueue.errors import UsageError
from transferqueue.limits import check_name
from transferqueue.transport.address import TcpAddress, parse_address
from transferqueue.wire.roles import Role

TOKEN_PREFIX: Final = "tqjoin_"  # noqa: S105  (a mark, no secret)
TOKEN_FORMAT: Final = 1
"""The version of the token format. A token of format 1 begins with the address; later formats begin with their
number."""
TOKEN_CHARS_MAX: Final = 1024
_KEY_BYTES: Final = 32
_CHECK_BYTES: Final = 4


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key and its secret key, each as Z85 text of 40 characters."""

    public: str
    secret: str

    def __post_init__(self) -> None:
        if public_of(self.secret) != self.public:
            raise UsageError(f"key {self.public!r} does not belong to the secret key beside it; make a new pair")

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"

    @classmethod
    def new(cls) -> KeyPair:
        """Make a random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class ClientKeys(msgspec.Struct, frozen=True):
    """A client's key pair (`own`), and the public key of the only server that it accepts."""

    server: str
    own: KeyPair


class JoinToken(msgspec.Struct, frozen=True):
    """The facts that a client needs to connect: the server's address and public key, and the client's own key pair,
    name and role."""

    address: str
    keys: ClientKeys
    name: str
    role: Role


def secure(socket: zmq.Socket[bytes], keys: ClientKeys | None) -> None:
    """Make `socket`, before it connects, accept only the server of `keys`. None: change nothing."""
    if keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)


def public_of(secret: str) -> str:
    """The public key of a secret key; `UsageError` if the text is not a key."""
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError) as error:
        raise UsageError(
            f"a secret key of {len(secret)} characters is invalid; keys are 40 characters of Z85"
        ) from error


def is_token(text: object) -> bool:
    """Whether this text begins as a join token."""
    return isinstance(text, str) and text.strip().startswith(TOKEN_PREFIX)


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    address: str
    server: bytes
    secret: bytes
    name: str
    role: Role


_decoder: Final = msgspec.msgpack.Decoder(_Packed)
_items: Final = msgspec.msgpack.Decoder(list[object])


def write_token(token: JoinToken) -> str:
    """The token as text without spaces, which can be pasted."""
    keys = token.keys
    packed = _Packed(token.address, _raw(keys.server), _raw(keys.own.secret), token.name, token.role)
    body = msgspec.msgpack.encode(packed)
    return TOKEN_PREFIX + base64.urlsafe_b64encode(_check(body) + body).rstrip(b"=").decode()


def read_token(text: object) -> JoinToken:
    """Decode a token. `UsageError` if the text is no token, is damaged, or has no tcp address."""
    if not isinstance(text, str) or not is_token(text):
        raise UsageError(f"join token {_shown(text)} does not begin with {TOKEN_PREFIX}; see transferqueue keys")
    if len(text) > TOKEN_CHARS_MAX:
        raise UsageError(f"join token {_shown(text)} has {len(text)} characters; at most {TOKEN_CHARS_MAX} are allowed")
    packed = _unpack(text.strip())
    if not isinstance(parse_address(packed.address), TcpAddress):
        raise UsageError(f"join token {_shown(text)} leads to {packed.address!r}; only tcp needs one")
    if len(packed.server) != _KEY_BYTES or len(packed.secret) != _KEY_BYTES:
        raise UsageError(f"join token {_shown(text)} has no keys of {_KEY_BYTES} bytes; make a new one")
    secret = _z85(packed.secret)
    keys = ClientKeys(_z85(packed.server), KeyPair(public_of(secret), secret))
    return JoinToken(packed.address, keys, check_name("key", packed.name), packed.role)


def _unpack(text: str) -> _Packed:
    body = text.removeprefix(TOKEN_PREFIX)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        check, packed = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
        if check != _check(packed):
            raise UsageError(f"join token {_shown(text)} was changed or cut short; paste all of it")
        _check_format(text, packed)
        return _decoder.decode(packed)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"join token {_shown(text)} cannot be read: {error}; paste all of it") from error


def _check_format(text: str, packed: bytes) -> None:
    """Refuse a token of a later format, which begins with the number of its format."""
    first, *_ = _items.decode(packed) or [None]
    if isinstance(first, int):
        raise UsageError(
            f"join token {_shown(text)} has format {first}, and this package reads format {TOKEN_FORMAT}: upgrade this "
            "package, or make the token with the version that is installed here (`transferqueue docs compatibility`)"
        )


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()


def _shown(text: object) -> str:
    return f"{text[:12]!r}..." if isinstance(text, str) else repr(text)[:40]


def _raw(key: str) -> bytes:
    from zmq.utils import z85

    return z85.decode(key)


def _z85(key: bytes) -> str:
    from zmq.utils import z85

    return z85.encode(key).decode()
