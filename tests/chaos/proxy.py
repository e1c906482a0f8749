"""A TCP proxy that acts as a bad network: on command it delays, stalls, resets, or changes bytes.

It listens at another host of the loopback network, at the ports of the server. Clients take the port for bulk
transfers from the server and the host from their own address, so both kinds of connection pass through the proxy. Each
run has two hosts of its own, and so all their ports, also between two lives of its server.
Commands are lines of JSON, ``[kind, seconds or port]``: ``port`` (forward this one too), ``delay``, ``stall``,
``reset``, ``flip``.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import struct
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

CHUNK_BYTES: Final = 1 << 16
DELAY_S: Final = 0.03
FLIPPED: Final = 3
"""Chunks in which one command changes a byte."""
_RESET: Final = struct.pack("ii", 1, 0)


class LoopbackHosts(NamedTuple):
    """The hosts at which the server and the proxy of one run listen."""

    server: str
    proxy: str

    @classmethod
    def of_one_run(cls) -> LoopbackHosts:
        """Two random hosts of 127.0.0.0/8, all of which is loopback; collisions with other runs are unlikely."""
        network = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}"
        host = 2 * secrets.randbelow(127) + 1
        return cls(f"{network}.{host}", f"{network}.{host + 1}")


class Proxy:
    """Forwards connections from the one host to the other until its commands end."""

    def __init__(self, seed: int, hosts: LoopbackHosts) -> None:
        self._chance = random.Random(seed)
        self._hosts = hosts
        self._listening: dict[int, asyncio.Server] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._delay_s = 0.0
        self._flips = 0
        self._open = asyncio.Event()
        self._open.set()

    async def run(self, commands: int) -> None:
        """Carry out commands from the descriptor `commands` until it is closed."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(commands, "rb"))
        while line := await reader.readline():
            kind, value = msgspec.json.decode(line, type=tuple[str, float])
            await self._obey(kind, value, loop)
        self._reset()
        for server in self._listening.values():
            server.close()

    async def _obey(self, kind: str, value: float, loop: asyncio.AbstractEventLoop) -> None:
        if kind == "port":
            await self._forward(int(value))
        elif kind == "delay":
            self._delay_s = DELAY_S
            loop.call_later(value, self._end_delay)
        elif kind == "stall":
            self._open.clear()
            loop.call_later(value, self._open.set)
        elif kind == "flip":
            self._flips = FLIPPED
        else:
            self._reset()

    def _end_delay(self) -> None:
        self._delay_s = 0.0

    async def _forward(self, port: int) -> None:
        if port not in self._listening:
            self._listening[port] = await asyncio.start_server(
                lambda r, w: self._link(port, r, w), self._hosts.proxy, port
            )

    async def _link(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(self._hosts.server, port)
        except OSError:  # no server runs now
            writer.close()
            return
        self._writers |= {writer, server_writer}
        pumps = [
            asyncio.ensure_future(self._pump(*ends)) for ends in ((reader, server_writer), (server_reader, writer))
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self._writers -= {writer, server_writer}
        writer.close()
        server_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(self._changed(data))
                await writer.drain()

    def _changed(self, data: bytes) -> bytes:
        if not self._flips:
            return data
        self._flips -= 1
        place = self._chance.randrange(len(data))
        return data[:place] + bytes([data[place] ^ self._chance.randrange(1, 256)]) + data[place + 1 :]

    def _reset(self) -> None:
        for writer in self._writers:
            held = writer.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


def run_proxy(seed: int, hosts: LoopbackHosts, commands: int) -> None:
    """Run the proxy: the work of its process."""
    asyncio.run(Proxy(seed, hosts).run(commands))
