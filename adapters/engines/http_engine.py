"""Base of the generators over HTTP: requests that raise the queue's errors, pauses on this side, and servers that take
weights."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from transferqueue.adapters.engines.loop_engine import LoopEngine
from transferqueue.adapters.protocols import (
    ABORT,
    PAUSE_S,
    Completion,
    Pause,
    Prompt,
    Sampling,
    TensorSpec,
    Unsupported,
    WeightSource,
)
from transferqueue.adapters.weights import check_fits, checkpoint_specs
from transferqueue.errors import Disconnected, PeerError, ProtocolError, Unreachable, UsageError

CONNECTIONS_MAX: Final = 256
"""Concurrent requests to an endpoint; further requests wait on this side."""
CONNECT_S: Final = 30.0
"""Time limit for connecting to an endpoint."""
_LINE_BYTES: Final = 16 << 20
_ERROR_CHARACTERS: Final = 500
_ANSWER_S: Final = 60.0
"""Time limit for a server's description of itself."""


class Endpoint:
    """Requests to an HTTP server that speaks JSON; raises the queue's errors. Use it on one event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, connections_max: int = CONNECTIONS_MAX) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connections_max = connections_max
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, may_fail: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and yield its successful response. It has no time limit of its own. may_fail: use its
        connection for no other request; a server may close that of a request that failed.

        Raises `UsageError` for 4xx and `PeerError` for 5xx, with the server's text; `Unreachable` and `Disconnected`
        for network errors.
        """
        try:
            headers = {"Connection": "close"} if may_fail else None
            async with self._open().request(method, self.url + path, json=body, headers=headers) as answer:
                if answer.status >= 400:
                    text = (await answer.text())[:_ERROR_CHARACTERS]
                    kind = UsageError if answer.status < 500 and answer.status not in (408, 429) else PeerError
                    raise kind(f"{method} {self.url}{path} was answered with {answer.status}: {text}")
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"nothing answers at {self.url}: {error}; is the server up?") from error
        except aiohttp.ClientError as error:
            raise Disconnected(f"{method} {self.url}{path} ended without an answer: {error}") from error

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, may_fail: bool = False
    ) -> Any:
        """Send one request (see `request`) and return the JSON of its response."""
        async with self.request(method, path, body, may_fail=may_fail) as answer:
            try:
                return await answer.json(content_type=None)
            except ValueError as error:
                raise ProtocolError(f"{method} {self.url}{path} was not answered with JSON: {error}") from error

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._connections_max),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                read_bufsize=_LINE_BYTES,
            )
        return self._session


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event, until the last. Raises `ProtocolError` for a malformed event."""
    async for line in answer.content:
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        text = text.removeprefix(b"data:").strip()
        if text == b"[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError as error:
            raise ProtocolError(f"{answer.url} streamed a line that is not JSON: {text[:80]!r}") from error
        if isinstance(event, dict) and event.get("error"):
            raise PeerError(f"{answer.url} failed while it streamed: {event['error']}")
        yield event


class Running:
    """A running request. `cut`: it must end now with its tokens so far. `mode`: of the pause that cut it."""

    def __init__(self) -> None:
        self.cut = asyncio.Event()
        self.mode: Pause | None = None


class Pauses:
    """Tracks running requests, and whether new ones may start. Use it on one event loop."""

    def __init__(self) -> None:
        self._running: set[Running] = set()
        self._changed = asyncio.Condition()
        self.paused = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """Wait for the end of a pause, then count as a running request until the block ends."""
        running = Running()
        async with self._changed:
            await self._changed.wait_for(lambda: not self.paused)
            self._running.add(running)
        try:
            yield running
        finally:
            self._running.discard(running)
            async with self._changed:
                self._changed.notify_all()

    def cut(self, mode: Pause) -> None:
        """Let no request start. Cut the running ones, unless `mode` waits for them."""
        self.paused = True
        for running in self._running if mode is not Pause.WAIT else ():
            running.mode = mode
            running.cut.set()

    async def begin(self, mode: Pause) -> None:
        """Call `cut`, then wait until no request runs."""
        self.cut(mode)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)

    async def end(self) -> None:
        """Let requests start again."""
        self.paused = False
        async with self._changed:
            self._changed.notify_all()


class HttpEngine(LoopEngine):
    """A generator that sends a request to `url` for each completion."""

    def __init__(self, url: str, *, api_key: str | None, version: int, connections_max: int) -> None:
        super().__init__("generator", version)
        self._endpoint = Endpoint(url, api_key=api_key, connections_max=connections_max)

    def close(self) -> None:
        """Abort the running requests. The server keeps running."""
        if not self._beside.closed:
            self._beside.wait(self._endpoint.close(), PAUSE_S, "connections were not closed")
            self._beside.close()


class ResendingEngine(HttpEngine):
    """A generator that pauses on this side: new requests wait, and running ones are awaited or cut. Those that were to
    be kept are sent again after the pause, with their tokens so far."""

    def __init__(self, url: str, *, api_key: str | None, version: int, connections_max: int) -> None:
        super().__init__(url, api_key=api_key, version=version, connections_max=connections_max)
        self._pauses = Pauses()

    async def _complete(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Completion:
        """Generate one completion: in one request, or in several if pauses come between; each continues its
        predecessor."""
        while True:
            async with self._pauses.running() as running:
                part = await self._part(index, sample, prompt, sampling, running)
            if part.finish_reason != ABORT or running.mode is Pause.ABORT:
                return part
            prompt = replace(prompt, samples=1, begun=part)

    @abstractmethod
    async def _part(self, index: int, sample: int, prompt: Prompt, sampling: Sampling, running: Running) -> Completion:
        """Send one request and read it until it is finished or cut. All its tokens have one version."""

    async def _pause(self, mode: Pause) -> None:
        await self._pauses.begin(mode)

    async def _resume(self) -> None:
        await self._pauses.end()


class ServerEngine(HttpEngine):
    """A generator over a running server that takes weights. It pauses the server for all its clients.

    Args:
        url: Of the server, without ``/v1``.
        version: Of the weights that the server was started with; a server that has loaded newer weights keeps their
            version.
        checkpoint: A directory with the model's tensors, to check new weights against; None: the one that the server
            reports, if it exists here.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        version: int,
        checkpoint: Path | str | None,
        connections_max: int,
    ) -> None:
        super().__init__(url, api_key=api_key, version=version, connections_max=connections_max)
        self._control = asyncio.Condition()
        """Held while the server is paused, resumed or given weights; a resume notifies."""
        self._wanted: Mapping[str, TensorSpec] = {}
        try:
            self._beside.wait(self._greet(checkpoint), _ANSWER_S, f"{url} did not answer")
        except BaseException:
            self.close()
            raise

    async def _greet(self, checkpoint: Path | str | None) -> None:
        served = (await self._endpoint.ask("GET", "/v1/models"))["data"][0]
        self._context_max = served.get("max_model_len")
        directory = await self._learn(served)
        self._wanted = checkpoint_specs(Path(checkpoint or directory))

    @abstractmethod
    async def _learn(self, served: Mapping[str, Any]) -> str:
        """Take over the version that the server reports; return the directory of its model. `served` is its entry of
        ``/v1/models``."""

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Load new weights between two tokens (`protocols.Generator.update_weights`).

        Args:
            source: the tensors.
            version: of the weights.
            timeout_s: seconds to wait; default 60.

        Raises:
            DeadlineExceeded: the server did not load them in time.
            SchemaError: a tensor does not fit the served model; the old weights stay.
            Unsupported: the served model's tensors are not known here.
        """
        if not self._wanted:
            raise Unsupported(
                "the tensors of the served model are not known here; name a directory with them: checkpoint=…"
            )
        check_fits(source, self._wanted)
        self._send_weights(source, version, timeout_s)

    @abstractmethod
    def _send_weights(self, source: WeightSource, version: int, timeout_s: float) -> None:
        """Have the server load weights that fit. Blocks."""
