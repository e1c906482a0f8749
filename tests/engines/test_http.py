"""What goes wrong between us and an endpoint becomes an error of the queue that says so."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from tests.workflows.job.policies import job_of
from transferqueue.adapters.engines.background_loop import BackgroundLoop
from transferqueue.adapters.engines.openai import OpenAIGenerator
from transferqueue.adapters.protocols import ABORT, LENGTH, Pause, Prompt, Sampling, Unsupported
from transferqueue.adapters.stages.recording_proxy import RecordingProxy
from transferqueue.adapters.vllm.server import VllmServer
from transferqueue.adapters.weights import TensorWeights
from transferqueue.errors import DeadlineExceeded, Disconnected, PeerError, ProtocolError, Unreachable, UsageError
from transferqueue.workflows.job.engines import open_engine

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
ONE = Sampling(tokens_max=4, seed=1, stop_ids=(2,))


class Endpoint:
    """An endpoint that answers as a test says."""

    def __init__(self) -> None:
        self.answer: Answer = stream()
        self.asked: list[dict[str, Any]] = []
        self.beside = BackgroundLoop("endpoint")
        self.url, self._runner = self.beside.wait(self._serve(), 10, "no endpoint")

    async def _serve(self) -> tuple[str, web.AppRunner]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._take)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1", runner

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json() if request.can_read_body else {})
        return await self.answer(request)

    def close(self) -> None:
        self.beside.wait(self._runner.cleanup(), 10, "no end")
        self.beside.close()


def chunk(
    ids: list[int] | None, logprobs: list[float] | None, reason: str | None = None, **more: Any
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "x",
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
    }
    return {"choices": [choice], **more}


WHOLE = (chunk([5, 6], [-1.0, -2.0], prompt_token_ids=[9]), chunk([7], [-3.0], LENGTH))


def stream(*chunks: Any, then: Callable[[], Awaitable[object]] | None = None) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for each in chunks:
            text = each if isinstance(each, str) else json.dumps(each)
            await response.write(f"data: {text}\n\n".encode())
        if then is not None:
            await then()
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    return answer


def plain(status: int, text: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    yield found
    found.close()


@pytest.fixture
def engine(endpoint: Endpoint) -> Iterator[OpenAIGenerator]:
    found = OpenAIGenerator(endpoint.url, "m", version=3, context_max=16, body={"top_k": 5})
    yield found
    found.close()


def ask(engine: Any, **more: Any) -> Any:
    return next(iter(engine.generate([Prompt.of([9])], ONE, **more)))


def test_a_stream_is_put_together(endpoint: Endpoint, engine: OpenAIGenerator) -> None:
    endpoint.answer = stream(*WHOLE)
    found = ask(engine)
    assert found.ids.tolist() == [5, 6, 7]
    assert found.logprobs.tolist() == [-1, -2, -3]
    assert (found.finish_reason, found.spans) == (LENGTH, ((3, 3),))
    said = endpoint.asked[0]
    assert (said["model"], said["prompt"], said["max_tokens"], said["top_k"]) == ("m", [9], 4, 5)
    assert (said["stop_token_ids"], said["return_token_ids"], said["stream"]) == ([2], True, True)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (plain(400, "too long"), UsageError, "answered with 400: too long"),
        (plain(401, "who"), UsageError, "401"),
        (plain(429, "busy"), PeerError, "429: busy"),
        (plain(503, "down"), PeerError, "503: down"),
        (stream("{"), ProtocolError, "not JSON"),
        (stream({"error": {"message": "oh"}}), PeerError, "failed while it streamed"),
        (stream(chunk(None, None)), Unsupported, "no token ids"),
        (stream(chunk([5, 6], [-1.0])), Unsupported, "1 log-probabilities for 2 tokens"),
        (stream(chunk([5], [-1.0])), Disconnected, "without a finish reason"),
    ],
)
def test_errors(answer: Answer, error: type[Exception], said: str, endpoint: Endpoint, engine: OpenAIGenerator) -> None:
    endpoint.answer = answer
    with pytest.raises(error, match=said):
        ask(engine)


def test_nobody_there() -> None:
    engine = OpenAIGenerator("http://127.0.0.1:9/v1", "m")
    with pytest.raises(Unreachable, match="nothing answers at"):
        ask(engine)
    engine.close()
    with pytest.raises(Disconnected, match="was closed"):
        ask(engine)


def test_what_runs_is_cut_short_and_what_comes_waits(endpoint: Endpoint, engine: OpenAIGenerator) -> None:
    streaming = threading.Event()

    async def forever() -> None:
        import asyncio

        streaming.set()
        await asyncio.Event().wait()

    endpoint.answer = stream(WHOLE[0], then=forever)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask(engine)))
    thread.start()
    assert streaming.wait(20)
    engine.pause(Pause.ABORT)
    thread.join(20)
    assert found[0].finish_reason == ABORT
    endpoint.answer = stream(*WHOLE)
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.05 s"):
        ask(engine, timeout_s=0.05)
    engine.resume()
    assert ask(engine).finish_reason == LENGTH


def test_what_is_kept_is_asked_for_again_with_what_was_begun(endpoint: Endpoint, engine: OpenAIGenerator) -> None:
    streaming = threading.Event()

    async def forever() -> None:
        import asyncio

        streaming.set()
        await asyncio.Event().wait()

    endpoint.answer = stream(WHOLE[0], then=forever)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask(engine)))
    thread.start()
    assert streaming.wait(20)
    engine.pause(Pause.KEEP)
    endpoint.answer = stream(WHOLE[1])
    engine.resume()
    thread.join(20)
    assert found[0].ids.tolist() == [5, 6, 7]
    assert (found[0].finish_reason, found[0].spans) == (LENGTH, ((3, 3),))
    first, second = endpoint.asked
    assert (second["prompt"], second["max_tokens"]) == ([9, 5, 6], 2)
    assert first["seed"] != second["seed"]


def test_a_pause_that_takes_too_long_is_none(endpoint: Endpoint, engine: OpenAIGenerator) -> None:
    streaming, go_on = threading.Event(), threading.Event()

    async def wait() -> None:
        import asyncio

        streaming.set()
        await asyncio.to_thread(go_on.wait, 20)

    endpoint.answer = stream(*WHOLE, then=wait)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask(engine)))
    thread.start()
    assert streaming.wait(20)
    with pytest.raises(DeadlineExceeded, match=r"pause \(wait\) was not in force"):
        engine.pause(Pause.WAIT, timeout_s=0.05)
    go_on.set()
    thread.join(20)
    assert found[0].finish_reason == LENGTH
    endpoint.answer = stream(*WHOLE)
    assert ask(engine).finish_reason == LENGTH


@pytest.mark.parametrize(("options", "sent"), [({}, False), ({"seeds": True}, True)])
def test_a_job_sends_seeds_where_it_says_that_the_endpoint_carries_them(
    options: dict[str, Any], sent: bool, endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.answer = stream(*WHOLE)
    job = job_of(tmp_path, engine=[{"kind": "openai", "url": endpoint.url, "options": options}], steps=2)
    with closing(open_engine(job.engine[0], job)) as engine:
        ask(engine)
    assert [("seed" in asked) for asked in endpoint.asked] == [sent]


def test_what_an_endpoint_cannot_do_is_unsupported(engine: OpenAIGenerator) -> None:
    with pytest.raises(Unsupported, match="takes no weights"):
        engine.update_weights(TensorWeights({}), 1)
    with pytest.raises(UsageError, match="the engine's context is 16"):
        engine.generate([Prompt.of([1] * 13)], ONE)


def test_a_server_without_the_native_endpoints_is_refused(endpoint: Endpoint) -> None:
    endpoint.answer = plain(404, "no such thing")
    with pytest.raises(UsageError, match="404"):
        VllmServer(endpoint.url)


# ---------------------------------------------------------------- the recorder


def post(base_url: str, path: str, body: Any) -> tuple[int, bytes]:
    host, _, rest = base_url.removeprefix("http://").partition("/")
    connection = HTTPConnection(host, timeout=20)
    connection.request("POST", f"/{rest}/{path}", body if isinstance(body, bytes) else json.dumps(body))
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_calls_are_recorded_with_their_versions(endpoint: Endpoint) -> None:
    versions = iter([4, 5])
    endpoint.answer = stream(*WHOLE)
    with RecordingProxy(endpoint.url, version=lambda: next(versions)) as recorder, recorder.session() as recording:
        status, text = post(recording.base_url, "completions", {"prompt": "p", "stream": True})
        assert status == 200
        assert text.count(b"data: ") == 3
        assert endpoint.asked[0]["return_token_ids"] is True
        assert recording.columns()["input_ids"].tolist() == [9, 5, 6, 7]
        assert recording.columns()["loss_mask"].tolist() == [False, True, True, True]
        assert recording.facts() == {"policy_version": 4, "policy_version_max": 5, "tokens": 4}


def test_an_answer_that_an_agent_has_is_recorded_though_it_leaves_before_the_end_of_the_stream(
    endpoint: Endpoint,
) -> None:
    """It leaves at the finish reason, before ``[DONE]``, and its session ends."""
    left = asyncio.Event()
    endpoint.answer = stream(*WHOLE, then=left.wait)
    with RecordingProxy(endpoint.url) as recorder, recorder.session() as recording:
        host, _, rest = recording.base_url.removeprefix("http://").partition("/")
        with closing(HTTPConnection(host, timeout=20)) as connection:
            connection.request("POST", f"/{rest}/completions", json.dumps({"prompt": "p", "stream": True}))
            answer = connection.getresponse()
            while b'"finish_reason": "length"' not in answer.readline():
                pass
            answer.close()
            assert recording.columns()["input_ids"].tolist() == [9, 5, 6, 7]
        assert recording.columns()["loss_mask"].tolist() == [False, True, True, True]


def test_an_endpoint_that_names_no_tokens_serves_the_agent_but_gives_no_columns(endpoint: Endpoint) -> None:
    endpoint.answer = plain(200, json.dumps({"choices": [{"message": {"content": "hello"}}]}))
    with RecordingProxy(endpoint.url) as recorder, recorder.session() as recording:
        assert post(recording.base_url, "chat/completions", {"messages": []})[0] == 200
        with pytest.raises(Unsupported, match="no token ids"):
            recording.columns()


def test_the_agent_hears_what_went_wrong(endpoint: Endpoint) -> None:
    with RecordingProxy(endpoint.url) as recorder:
        with recorder.session() as recording:
            endpoint.answer = plain(503, "down")
            assert post(recording.base_url, "completions", {})[0] == 502
            assert post(recording.base_url, "completions", b"{")[0] == 400
            assert post(recording.base_url, "completions", [])[0] == 400
            endpoint.answer = stream(WHOLE[0], {"error": "oh"})
            status, text = post(recording.base_url, "completions", {"stream": True})
            assert status == 200
            assert b"failed while it streamed" in text
            assert recording.calls == 0
            with pytest.raises(UsageError, match="0 calls of the model are 0 sequences"):
                recording.columns()
        assert post(recording.base_url, "completions", {})[0] == 404
