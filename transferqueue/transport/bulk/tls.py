"""TLS under the bulk stream, for servers with keys.

- A listening process makes a private key and a certificate when it starts, in memory alone. Clients get the fingerprint
  of the certificate over the control port, which is encrypted and admits known keys only. They accept no other peer.
- The listening process asks for no certificate: each transfer needs a ticket, and tickets cross over the control port.
- TLS 1.3 without session tickets: after the handshake a socket is readable only for bytes of the bulk protocol.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import select
import socket
import ssl
from functools import cache
from typing import Final

from transferqueue.errors import Unreachable
from transferqueue.limits import KIB
from transferqueue.transport.bulk.stream import BulkStream

_WRITE_BYTES: Final = 64 * KIB
"""Content is encrypted in steps of this size: a connection that moves is seen to move."""
_RECORD_BYTES: Final = 17 * KIB
"""A record of TLS is shorter, with its head and tag. One that has come in part is outside the kernel's buffer."""
_VALID: Final = dt.timedelta(days=36500)
_NAME: Final = "transferqueue bulk"


class ServerCertificate:
    """The private key of a listening process, and its self-signed certificate."""

    def __init__(self) -> None:
        key, certificate, der = _self_signed()
        self.fingerprint: Final = fingerprint_of(der)
        self._context: Final = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0
        descriptor = os.memfd_create("transferqueue-certificate", os.MFD_CLOEXEC)  # `ssl` reads keys from files only
        try:
            os.write(descriptor, key + certificate)
            self._context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def accepted(self, connection: socket.socket) -> BulkStream:
        """The stream over a connection that was accepted. The handshake takes place as bytes arrive. `OSError` if the
        peer is gone."""
        return TlsStream(self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False))


class TlsStream(BulkStream):
    """One end of an encrypted connection."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        super().__init__(connection)
        self._tls: Final = connection
        self._writing: memoryview | None = None
        """Bytes of a write that the kernel had no room for: TLS must be given the same again."""

    @classmethod
    def dialled(cls, connection: socket.socket) -> TlsStream:
        """The stream over a connection to a listening process. Call `handshake` until it is done."""
        return cls(_client_context().wrap_socket(connection, do_handshake_on_connect=False))

    def handshake(self, fingerprint: str) -> int:
        """Advance the handshake. Returns what to poll for before the next call; 0: done.

        Raises:
            Unreachable: The connection was lost, or its peer has another certificate than that of `fingerprint`.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except OSError as error:
            raise Unreachable(f"no encrypted connection came about: {error.strerror or error}") from error
        if fingerprint_of(self._tls.getpeercert(binary_form=True) or b"") != fingerprint:
            raise Unreachable(
                "the bulk port answers with a certificate that its server did not name: the server has started again, "
                "or another program listens there"
            )
        return 0

    @property
    def buffered(self) -> bool:
        """See `BulkStream.buffered`: a record is decrypted whole."""
        return self._tls.pending() > 0

    def _wake_at(self, left: int) -> None:
        super()._wake_at(left - _RECORD_BYTES)

    def _write(self) -> int:
        if self._writing is None:
            self._writing = self._next_bytes()
        try:
            sent = self._tls.send(self._writing)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        self._writing = None
        return sent

    def _next_bytes(self) -> memoryview:
        """The first unsent bytes. Small pieces are joined: each write makes a record and a system call."""
        first = self._leaving[0]
        if first.nbytes >= _WRITE_BYTES or len(self._leaving) == 1:
            return first[:_WRITE_BYTES]
        joined = bytearray()
        for piece in self._leaving:
            if len(joined) + piece.nbytes > _WRITE_BYTES:
                break
            joined += piece
        return memoryview(joined)

    def _read_bytes(self, nbytes: int) -> bytes:
        try:
            return self._tls.recv(nbytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def _read_into(self, into: memoryview) -> int:
        try:
            return self._tls.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


def fingerprint_of(der: bytes) -> str:
    """The SHA-256 of a certificate in DER, as hexadecimal text."""
    return hashlib.sha256(der).hexdigest()


@cache
def _client_context() -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `handshake` compares the certificate itself
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _self_signed() -> tuple[bytes, bytes, bytes]:
    """A new private key and its certificate as PEM, and the certificate as DER."""
    from cryptography import x509  # 30 ms, of which servers without keys have no use
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    encoding = serialization.Encoding
    return pem, certificate.public_bytes(encoding.PEM), certificate.public_bytes(encoding.DER)
