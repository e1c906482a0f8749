"""A recording proxy for black-box agents: an OpenAI-compatible endpoint that keeps the token ids of every call.

- Each agent gets its own URL (`RecordingProxy.session`), which answers until its session ends. The proxy asks the
  upstream endpoint for token ids and log-probabilities, whatever the agent requests, and forwards the answers, streamed
  ones as they arrive.
- Calls are joined by tokens: a call whose prompt begins with all tokens of earlier calls continues their sequence;
  any other call starts a new sequence (the agent shortened its history, or called twice). Text is never tokenized here.
- A call is stamped with the version at its start and at its end: each of its tokens has a version in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from aiohttp import web

from transferqueue.adapters.engines.background_loop import BackgroundLoop
from transferqueue.adapters.engines.http_engine import Endpoint, events
from transferqueue.adapters.engines.openai import SampledTokens
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.stages.agent_endpoint import (
    STREAM_END,
    error_body,
    event,
    event_stream,
    listen,
    refusal,
    request_body,
)
from transferqueue.adapters.stages.trajectory import FIELDS, Trajectory
from transferqueue.errors import PeerError, TransferQueueError, UsageError

_START_S: Final = 30.0
_ASKED: Final[Mapping[str, Mapping[str, Any]]] = {
    "chat/completions": {"logprobs": True, "return_token_ids": True},
    "completions": {"logprobs": 1, "return_token_ids": True},
}
"""Paths that are recorded, with the fields added to their requests. Other paths are forwarded unchanged."""


class Recording:
    """The answers that one agent got, as sequences. `calls` counts them."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.calls = 0
        self.refusals: list[TransferQueueError] = []
        self._trajectories: list[Trajectory] = []

    def add(self, prompt_ids: Sequence[int], drawn: SampledTokens, versions: tuple[int, int]) -> None:
        """Append an answer to the longest sequence that its prompt begins with, or to a new one. versions: of the
        weights at its start and at its end."""
        self.calls += 1
        begun = [each for each in self._trajectories if list(prompt_ids[: len(each.ids)]) == each.ids]
        if not begun:
            begun = [Trajectory()]
            self._trajectories += begun
        trajectory = max(begun, key=lambda each: len(each.ids))
        trajectory.add_input(prompt_ids[len(trajectory.ids) :])
        trajectory.add_output(drawn.ids, drawn.logprobs, versions)

    def trajectories(self) -> list[Trajectory]:
        """The calls as sequences; one, if each call continued the one before. Raises `Unsupported` if the endpoint gave
        no token ids."""
        if self.refusals:
            raise self.refusals[0]
        return self._trajectories

    def columns(self) -> Mapping[str, Any]:
        """The calls as columns of one row (`trajectory.FIELDS`). Raises `UsageError` unless they form one sequence."""
        return self._one().columns()

    def facts(self) -> Mapping[str, int]:
        """Policy versions and token count of that row."""
        return self._one().facts()

    def _one(self) -> Trajectory:
        trajectories = self.trajectories()
        if len(trajectories) != 1:
            raise UsageError(
                f"the agent's {self.calls} calls of the model are {len(trajectories)} sequences; a row holds one: "
                "let each call go on with the one before, or put the trajectories as rows of a table of their own"
            )
        return trajectories[0]


class RecordingProxy:
    """The proxy, for the recorder of `callables.Agents`: listens on this machine from its creation until `close`.

    Args:
        upstream: base URL of the endpoint, with its ``/v1``.
        api_key: sent to the endpoint as a bearer token; default None: none is sent.
        version: returns the version of the weights that the endpoint serves now, such as ``lambda: generator.version``;
            default: always 0.
        host: address to listen on; default ``"127.0.0.1"``.

    Raises:
        DeadlineExceeded: it did not listen within 30 s.
    """

    gives: Sequence[str] = FIELDS

    def __init__(
        self,
        upstream: str,
        *,
        api_key: str | None = None,
        version: Callable[[], int] = lambda: 0,
        host: str = "127.0.0.1",
    ) -> None:
        self._upstream = Endpoint(upstream, api_key=api_key)
        self._version = version
        self._recordings: dict[str, Recording] = {}
        self._beside = BackgroundLoop("recorder")
        try:
            listening = listen("/{token}/v1/{path:.+}", self._answer, host)
            self._runner, self.url = self._beside.wait(listening, _START_S, "the recorder did not start")
        except BaseException:
            self._beside.close()
            raise

    @contextmanager
    def session(self) -> Iterator[Recording]:
        """Record the calls to the session's ``base_url``, from any process, until the block ends."""
        self._beside.check()
        token = secrets.token_urlsafe(16)
        recording = self._recordings[token] = Recording(f"{self.url}/{token}/v1")
        try:
            yield recording
        finally:
            del self._recordings[token]

    def close(self) -> None:
        """Stop listening and end running calls. A second call does nothing."""
        if not self._beside.closed:
            self._beside.wait(self._stop(), _START_S, "the recorder did not stop")
            self._beside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ on the loop

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._upstream.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        recording = self._recordings.get(request.match_info["token"])
        if recording is None:
            return refusal(404, "this session is over, or never was; take the base URL of a session that is open")
        path = request.match_info["path"]
        try:
            if path not in _ASKED or request.method != "POST":
                return web.json_response(
                    await self._upstream.ask(request.method, f"/{path}", await request_body(request) or None)
                )
            return await self._record(recording, request, path)
        except UsageError as error:
            return refusal(400, str(error))
        except PeerError as error:
            return refusal(502, str(error))

    async def _record(self, recording: Recording, request: web.Request, path: str) -> web.StreamResponse:
        body = {**await request_body(request), **_ASKED[path]}
        began = self._version()
        answers = _Answers(_choices(body))

        def keep() -> None:
            if not answers.kept:
                answers.keep(recording, (began, self._version()))

        if body.get("stream"):
            return await self._stream(request, path, body, answers, keep)
        answer = await self._upstream.ask("POST", f"/{path}", body)
        answers.add(answer)
        keep()
        return web.json_response(answer)

    async def _stream(
        self,
        request: web.Request,
        path: str,
        body: Mapping[str, Any],
        answers: _Answers,
        keep: Callable[[], None],
    ) -> web.StreamResponse:
        """Forward the stream. An agent may leave at the finish reason, and call again or end its session at once: the
        answer is kept before the agent gets it."""
        async with self._upstream.request("POST", f"/{path}", body) as answer:
            response = await event_stream(request)
            try:
                async for chunk in events(answer):
                    answers.add(chunk)
                    if answers.are_finished():
                        keep()
                    await response.write(event(chunk))
                keep()
            except PeerError as error:  # the agent has begun to read: report it in the stream
                await response.write(event(error_body(502, str(error))))
        await response.write(STREAM_END)
        return response


def _choices(body: Mapping[str, Any]) -> int:
    """How many choices a request asks for."""
    prompt, count = body.get("prompt"), int(body.get("n") or 1)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        count *= len(prompt)
    return count


class _Answers:
    """The choices of one call, joined from their chunks. `count`: how many there will be."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._prompt_ids: Sequence[int] | None = None
        self._drawn: dict[int, SampledTokens] = {}
        self._refusal: TransferQueueError | None = None
        self.kept = False

    def add(self, answer: Mapping[str, Any]) -> None:
        """Add an answer, or a chunk of one. Missing ids do not disturb the agent: reading the recording raises
        instead."""
        self._prompt_ids = answer.get("prompt_token_ids") or self._prompt_ids
        for choice in answer.get("choices", ()):
            self._prompt_ids = choice.get("prompt_token_ids") or self._prompt_ids
            try:
                self._drawn.setdefault(choice.get("index", 0), SampledTokens()).add(choice)
            except Unsupported as error:
                self._refusal = error

    def are_finished(self) -> bool:
        """Whether each choice has its finish reason."""
        return len(self._drawn) >= self._count and all(each.finish_reason for each in self._drawn.values())

    def keep(self, recording: Recording, versions: tuple[int, int]) -> None:
        """Add the choices to the recording, once."""
        self.kept = True
        if self._prompt_ids is None:
            self._refusal = Unsupported(
                "the endpoint says no token ids (return_token_ids); use one that does, such as vLLM"
            )
        if self._refusal is not None:
            recording.refusals.append(self._refusal)
        for _, choice in sorted(self._drawn.items()):
            recording.add(self._prompt_ids or (), choice, versions)
