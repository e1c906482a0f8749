"""A generator over any OpenAI-compatible endpoint: token ids in, token ids and log-probabilities out, streamed.

Rules:

- The endpoint must return the ids of the tokens that it drew (``return_token_ids``, as vLLM does) and their log-probabilities. Otherwise
  the first answer raises `Unsupported`: tokenizing the text again need not give the tokens that were drawn.
- Log-probabilities must be those of the distribution that was drawn from. vLLM returns these when started with
  ``--logprobs-mode processed_logprobs``.
- A pause happens on this side: new requests wait, and running streams are awaited or cut. After the pause, cut streams that were to be
  kept are requested again with their tokens so far. An endpoint takes no weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import aiohttp

from transferqueue.adapters.engines.background_loop import BackgroundLoop
from transferqueue.adapters.engines.completion import check_request, completed, context, ended_by, seed_of, tokens_left
from transferqueue.adapters.protocols import (
    ABORT,
    GENERATE_S,
    PAUSE_S,
    Completion,
    Completions,
    Pause,
    Prompt,
    Sampling,
    Unsupported,
    WeightSource,
)
from transferqueue.errors import DeadlineExceeded, Disconnected, PeerError, ProtocolError, Unreachable, UsageError

CONNECTIONS_MAX: Final = 256
"""Concurrent requests to an endpoint; further requests wait on this side."""
CONNECT_S: Final = 30.0
"""Time limit for connecting to an endpoint."""
_LINE_BYTES: Final = 16 << 20
_ERROR_CHARACTERS: Final = 500


class Endpoint:
    """Requests to an HTTP server that speaks JSON; raises the queue's errors. Use it on one event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, connections_max: int = CONNECTIONS_MAX) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connections_max = connections_max
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and yield its successful response. It has no time limit of its own.

        Raises `UsageError` for 4xx and `PeerError` for 5xx, with the server's text; `Unreachable` and `Disconnected` for network errors.
        """
        try:
            async with self._open().request(method, self.url + path, json=body) as answer:
                if answer.status >= 400:
                    text = (await answer.text())[:_ERROR_CHARACTERS]
                    kind = UsageError if answer.status < 500 and answer.status not in (408, 429) else PeerError
                    raise kind(f"{method} {self.url}{path} was answered with {answer.status}: {text}")
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"nothing answers at {self.url}: {error}; is the server up?") from error
        except aiohttp.ClientError as error:
            raise Disconnected(f"{method} {self.url}{path} ended without an answer: {error}") from error

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one request and return the JSON of its response."""
        async with self.request(method, path, body) as answer:
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
            raise ProtocolError(f"{answer.url} streamed what is not JSON: {text[:80]!r}") from error
        if isinstance(event, dict) and event.get("error"):
            raise PeerError(f"{answer.url} failed while it streamed: {event['error']}")
        yield event


@dataclass
class SampledTokens:
    """Tokens of one choice so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a response, or a chunk of one. Raises `Unsupported` if it has tokens without ids or log-probabilities."""
        ids, logprobs = choice.get("token_ids"), logprobs_of(choice)
        if ids is None and _text_of(choice):
            raise Unsupported("the endpoint says no token ids (return_token_ids); use one that does, such as vLLM")
        if ids and len(logprobs) != len(ids):
            raise Unsupported(
                f"the endpoint gives {len(logprobs)} log-probabilities for {len(ids)} tokens; one for each is needed"
            )
        self.ids += ids or []
        self.logprobs += logprobs
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _text_of(choice: Mapping[str, Any]) -> Any:
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content")


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities of a choice's tokens, in the format of ``completions`` or of ``chat/completions``."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content") is not None:
        return [token["logprob"] for token in logprobs["content"]]
    return list(logprobs.get("token_logprobs") or [])


class OpenAIGenerator:
    """A generator (`protocols.Generator`) over ``POST {base_url}/completions``.

    base_url: with its ``/v1``. model: its name at the endpoint. version: of the weights that it serves; every token is stamped with it.
    context_max: context length in tokens, if known; longer requests are then refused on this side. body: further fields for each request.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        version: int = 0,
        context_max: int | None = None,
        connections_max: int = CONNECTIONS_MAX,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self._beside = BackgroundLoop("generator")
        self._endpoint = Endpoint(base_url, api_key=api_key, connections_max=connections_max)
        self._model, self._version, self._context_max = model, version, context_max
        self._body = dict(body or {})
        self._pauses = Pauses()

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be drawn with."""
        return self._version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished (`protocols.Generator.generate`)."""
        self._beside.check()
        check_request(prompts, sampling, self._context_max)
        jobs = [
            partial(self._complete, index, sample, prompt, sampling)
            for index, prompt in enumerate(prompts)
            for sample in range(prompt.samples)
        ]
        return self._beside.as_finished(jobs, timeout_s)

    async def _complete(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Completion:
        """Generate one completion: in one request, or in several if pauses come between; each continues the one before."""
        while True:
            async with self._pauses.running() as running:
                part = await self._part(index, sample, prompt, sampling, running)
            if part.finish_reason != ABORT or running.mode is Pause.ABORT:
                return part
            prompt = replace(prompt, samples=1, begun=part)

    async def _part(self, index: int, sample: int, prompt: Prompt, sampling: Sampling, running: Running) -> Completion:
        """Send one request and read it until it is finished or cut. All its tokens have one version."""
        tokens, version = SampledTokens(), self._version
        streaming = asyncio.ensure_future(self._stream(self._request(index, sample, prompt, sampling), tokens))
        waiting = asyncio.ensure_future(running.cut.wait())
        try:
            await asyncio.wait((streaming, waiting), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            await _ended(streaming, waiting)
        reason = tokens.finish_reason or ended_by(tokens.ids, tokens_left(prompt, sampling), sampling)
        return completed(index, sample, prompt, tokens.ids, tokens.logprobs, reason, [(version, len(tokens.ids))])

    def _request(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        fields = {
            "model": self._model,
            "prompt": context(prompt).tolist(),
            "max_tokens": tokens_left(prompt, sampling),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids) or None,
            "seed": seed_of(sampling, index, sample, prompt),
            "logprobs": 1,
            "return_token_ids": True,
            "stream": True,
        }
        return {name: value for name, value in (fields | self._body).items() if value is not None}

    async def _stream(self, body: Mapping[str, Any], tokens: SampledTokens) -> None:
        async with self._endpoint.request("POST", "/completions", body) as answer:
            async for event in events(answer):
                for choice in event.get("choices", ()):
                    tokens.add(choice)
        if tokens.finish_reason is None:
            raise Disconnected(f"{self._endpoint.url} ended a stream without a finish reason")

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Stop drawing tokens (`protocols.Generator.pause`).

        Completions that are kept are requested again after the pause, with their tokens so far.
        """
        try:
            self._beside.wait(self._pauses.begin(mode), timeout_s, f"pause ({mode.value}) was not in force")
        except DeadlineExceeded:
            self.resume()
            raise

    def resume(self) -> None:
        """End the pause."""
        if not self._beside.closed:
            self._beside.wait(self._pauses.end(), PAUSE_S, "resume was not answered")

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Always raises `Unsupported`: an endpoint takes no weights."""
        raise Unsupported("an OpenAI-compatible endpoint takes no weights; vllm_server.VllmServer does")

    def close(self) -> None:
        """Abort the running requests. The endpoint keeps running."""
        if not self._beside.closed:
            self._beside.wait(self._endpoint.close(), PAUSE_S, "connections were not closed")
            self._beside.close()


class Running:
    """A running request. cut: it must end now with its tokens so far. mode: of the pause that cut it."""

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


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
