"""Servers and fronts that tests are run against: the same test, embedded, over ipc and over tcp, sync and async."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import transferqueue as tq
from transferqueue.limits import MIB
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.server.process.embedded import EmbeddedServer
from transferqueue.server.runtime_directory import private_arena
from transferqueue.transport import IpcAddress, TcpAddress
from transferqueue.transport.security import keyring
from transferqueue.transport.security.keyring import Keyring
from transferqueue.transport.security.keys import write_token


class Served:
    """A server process: `ipc` and `tcp` are its addresses."""

    def __init__(self, directory: Path, arena_bytes: str = "1GiB") -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "transferqueue.server", "--address", f"ipc://{directory}/q.sock"),
                *("--tcp", "127.0.0.1:0", "--arena-bytes", arena_bytes),
            ],
            env={"TRANSFERQUEUE_SNAPSHOTS": f"{directory}/snapshots"} | os.environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready, self.ipc, self.tcp = self.process.stdout.readline().split()
        assert ready == "ready"

    def stop(self) -> None:
        """Ask it to stop, and check that it does so in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=20) == 0
        self.process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def served(directory: Path, arena_bytes: str = "1GiB") -> Iterator[Served]:
    """A server process for a while."""
    server = Served(directory, arena_bytes)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def in_this_process(way: str, directory: Path) -> Iterator[str]:
    """What a client of another process would connect to: the address, "ipc" or "tcp", or the join token, "keyed", of a
    server in a thread of this process."""
    keys = directory / "keys"
    if way == "keyed":
        keyring.add(keys, "main", "admin")
    server = ServerProcess(
        IpcAddress(directory / "run" / "q.sock"),
        private_arena(256 * MIB),
        [TcpAddress("127.0.0.1", 0)],
        keyring=Keyring(keys) if way == "keyed" else None,
    )
    running = EmbeddedServer(server)
    tcp = server.tcp_addresses[0]
    try:
        yield {"ipc": server.address, "tcp": tcp}.get(way) or write_token(keyring.token_of(keys, "main", tcp))
    finally:
        running.stop()


class Fronted:
    """An object of the asynchronous front, used as if it were one of the synchronous front: every awaitable is awaited
    in a loop of another thread, every async context and iterator is a plain one."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.__dict__ |= {"inner": inner, "loop": loop}

    def _run(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self._wrap(asyncio.run_coroutine_threadsafe(wait(), self.loop).result())

    def _wrap(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            return self._run(value)
        is_async = inspect.isasyncgen(value) or type(value).__name__.startswith("Async")
        return Fronted(value, self.loop) if is_async else value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value) or isinstance(
            value, list
        ):  # keys of rows are a list that can be called, as of a mapping
            return value
        return lambda *args, **named: self._wrap(
            value(*map(unwrapped, args), **{k: unwrapped(v) for k, v in named.items()})
        )

    def __getitem__(self, name: str) -> Any:
        return self.inner[name]

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return self if hasattr(self.inner, "__anext__") else iter(self.inner)

    def __next__(self) -> Any:
        try:
            return self._run(self.inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __contains__(self, name: object) -> bool:
        return name in self.inner

    def __enter__(self) -> Self:
        self._run(self.inner.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self.inner.__aexit__(*error))


def unwrapped(value: Any) -> Any:
    """What a `Fronted` stands for; anything else as it is."""
    return value.inner if isinstance(value, Fronted) else value


class LoopThread(AbstractContextManager["LoopThread"]):
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def connect(self, address: str | None, **named: Any) -> Fronted:
        """`transferqueue.aconnect` in this loop."""
        found = Fronted(None, self.loop)._run(tq.aconnect(address, **named))
        assert isinstance(found, Fronted)
        return found

    async def _end(self) -> None:
        """Cancel what still runs, as `asyncio.run` does: a task that goes with its loop would be garbage of a later
        test."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def until_someone_waits(queue: tq.Queue, table: str, requests: int = 1) -> None:
    """Return once that many requests wait at the server for this table."""
    while sum(one.table == table for one in queue.stats().waiting) < requests:
        pass


class Worker(AbstractContextManager["Worker"]):
    """A process that runs `program` with `queue` at hand; `line` is its next printed line."""

    def __init__(self, address: str, program: str, *arguments: str) -> None:
        opening = "import sys, numpy as np, transferqueue as tq\nqueue = tq.connect(sys.argv[1])\n"
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", opening + inspect.cleandoc(program), address, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """What it prints next; waits for it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        """Give it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
