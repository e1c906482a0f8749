"""SGLang's adapter against its documented endpoints, served here over transformers. No record of the matrix: it is not
SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.tiny import TinySubject, model, save

pytest.importorskip("aiohttp")
safetensors = pytest.importorskip("safetensors.torch")

from aiohttp import web

from transferqueue.adapters.engines.background_loop import BackgroundLoop
from transferqueue.adapters.engines.sglang_server import SglangServer
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Generator, Pause, Prompt, Sampling, Unsupported
from transferqueue.adapters.weights import TensorWeights
from transferqueue.errors import PeerError, ProtocolError
from transferqueue.testing.conformance.generators import (
    GENERATOR_CHECKS,
    GeneratorSubject,
    caches_stay_over_an_update,
)
from transferqueue.testing.conformance.report import Verdict, judge


class Documented:
    """The endpoints that SGLang documents for reinforcement learning."""

    def __init__(self, directory: Path) -> None:
        self.engine = TransformersGenerator(model(0))
        self.directory = directory
        self.weight_version = "default"
        self.answers: dict[str, Any] = {}
        self.beside = BackgroundLoop("endpoint")
        self.url, self._runner = self.beside.wait(self._serve(), 10, "no endpoint")

    async def _serve(self) -> tuple[str, web.AppRunner]:
        application = web.Application()
        for path, answer in (
            ("/v1/models", self.models),
            ("/get_model_info", self.model_info),
            ("/generate", self.generate),
            ("/pause_generation", self.pause_generation),
            ("/continue_generation", self.continue_generation),
            ("/update_weights_from_disk", self.update_weights_from_disk),
        ):
            application.router.add_route("*", path, self.answered(path, answer))
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}", runner

    def answered(self, path: str, answer: Callable[[Any], Any]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else {}
            found = self.answers[path] if path in self.answers else await asyncio.to_thread(answer, body)
            return web.json_response(found)

        return handle

    def models(self, _: Any) -> Any:
        return {"data": [{"id": "tiny", "root": str(self.directory), "max_model_len": 256}]}

    def model_info(self, _: Any) -> Any:
        return {"model_path": str(self.directory), "weight_version": self.weight_version}

    def generate(self, body: Any) -> Any:
        asked = body["sampling_params"]
        sampling = Sampling(
            tokens_max=asked["max_new_tokens"],
            temperature=asked["temperature"],
            stop_ids=tuple(asked["stop_token_ids"]),
            seed=asked.get("sampling_seed"),
        )
        found = next(iter(self.engine.generate([Prompt.of(body["input_ids"])], sampling)))
        pairs = zip(found.logprobs.tolist(), found.ids.tolist(), strict=True)
        told = {
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "finish_reason": {"type": found.finish_reason},
            "weight_version": self.weight_version,
        }
        return {"text": "", "output_ids": found.ids.tolist(), "meta_info": told}

    def pause_generation(self, body: Any) -> Any:
        assert body == {"mode": "abort"}
        self.engine.pause(Pause.ABORT)
        return {"status": "ok"}

    def continue_generation(self, _: Any) -> Any:
        self.engine.resume()
        return {"status": "ok"}

    def update_weights_from_disk(self, body: Any) -> Any:
        tensors = safetensors.load_file(Path(body["model_path"]) / "model.safetensors")
        self.engine.update_weights(TensorWeights(tensors), int(body["weight_version"]))
        self.weight_version = body["weight_version"]
        return {"success": True, "message": "ok", "num_paused_requests": 0}

    def close(self) -> None:
        self.engine.close()
        self.beside.wait(self._runner.cleanup(), 10, "no end")
        self.beside.close()


class Subject(TinySubject):
    def __init__(self, url: str, folder: Path) -> None:
        super().__init__()
        self.engine = SglangServer(url, weights=folder)

    def open(self) -> Generator:
        self.engine.resume()
        self.engine.update_weights(self.weights(0), 0)
        return self.engine


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    found = Documented(save(tmp_path_factory.mktemp("model")))
    yield found
    found.close()


@pytest.fixture(scope="module")
def subject(endpoint: Documented, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("weights")
    found = Subject(endpoint.url, folder)
    yield found
    found.engine.close()
    assert list(folder.iterdir()) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_sglang(check: Callable[[GeneratorSubject], None], subject: Subject) -> None:
    outcome = judge(check, subject)
    computed_again = check is caches_stay_over_an_update  # as the manual of engines says
    assert outcome.verdict is (Verdict.UNSUPPORTED if computed_again else Verdict.PASSED), outcome.text


def test_what_it_cannot_do_and_what_goes_wrong(
    endpoint: Documented, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = subject.open()
    with pytest.raises(Unsupported, match="before that cut"):
        engine.generate([Prompt.of([5])], Sampling(tokens_max=2, top_p=0.5))
    monkeypatch.setitem(endpoint.answers, "/update_weights_from_disk", {"success": False, "message": "no room"})
    with pytest.raises(PeerError, match="did not take weights: no room"):
        engine.update_weights(subject.weights(1), 1)
    assert engine.version == 0
    monkeypatch.setitem(endpoint.answers, "/generate", {"text": ""})
    with pytest.raises(ProtocolError, match="without 'meta_info'"):
        list(engine.generate([Prompt.of([5])], Sampling(tokens_max=2)))
