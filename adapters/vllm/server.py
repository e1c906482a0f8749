r"""A generator over vLLM's own server: token ids in and out; pauses and weights through its native endpoints.

Start the server with the arguments that this adapter needs (`SERVER_ARGUMENTS`, `SERVER_ENVIRONMENT`), with this
package installed::

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model DIR --enable-scale-out \
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "transferqueue"}'

Its workers read weights directly from a channel of the queue (`adapters.vllm.weight_transfer`); only the version number
travels over HTTP. The server reports which version drew which token. While its weights change, it is paused and calls
its version `LOADING`: it stays so if a load fails, and then no client takes tokens from it until a load succeeded.

On a CPU, vLLM (0.32) dies of a request with a seed whose prompt it computes in parts (`adapters.vllm.engine`). Such a
server, as ``/server_info`` describes it, gets no seeds; with ``--no-enable-chunked-prefill`` it does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from transferqueue.adapters.engines.completion import completed, context, seed_of, tokens_left
from transferqueue.adapters.engines.http_engine import CONNECTIONS_MAX, ServerEngine
from transferqueue.adapters.protocols import (
    ABORT,
    Caches,
    Completion,
    Pause,
    Prompt,
    Sampling,
    WeightSource,
)
from transferqueue.adapters.vllm.plugin import BACKEND
from transferqueue.adapters.weights import WeightHandoff
from transferqueue.errors import Disconnected, PeerError, ProtocolError

SERVER_ARGUMENTS: Final = (
    "--enable-scale-out",
    "--logprobs-mode",
    "processed_logprobs",
    "--weight-transfer-config",
    json.dumps({"backend": BACKEND}),
)
SERVER_ENVIRONMENT: Final = {"VLLM_SERVER_DEV_MODE": "1"}
ABORTED_S: Final = 5.0
"""Time limit for the answer to an aborted request. The server answers these at once; a request without an answer by
then arrived after the pause and waits there.
"""
LOADING: Final = "loading"
"""Version that a server says whose weights may be of two versions."""
_GENERATE: Final = "/inference/v1/generate"


class VllmServer(ServerEngine):
    """A generator (`protocols.Generator`) over a running vLLM server.

    Args:
        url: of the server, without ``/v1``.
        api_key: sent as a bearer token; default None: none is sent.
        version: of the weights that the server was started with; default 0. A server that has loaded newer weights
            keeps their version.
        checkpoint: a directory with the model's tensors, to check weights against before they are sent; default None:
            the server's model directory, if it exists here.
        connections_max: concurrent requests to the server; default 256. Further requests wait on this side.

    Raises:
        UsageError: the server lacks the endpoints: start it as the module says.
    """

    kv = Caches.RECOMPUTE
    """What becomes of the caches of running completions when weights change; set it before the first request."""
    reads_channel: Final = True
    """The server's workers read weights of a channel themselves (`adapters.weights.WeightUpdater`)."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        version: int = 0,
        checkpoint: Path | str | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._relay = WeightHandoff()
        self._channel: tuple[str, str] | None = None
        self._held = False
        self._half_loaded = False
        """Whether the server's weights may be of two versions, since a load did not end well."""
        self._takes_seeds = True
        self._load = secrets.token_hex(8)
        """Another one after each load: a version may come again with other weights, from another channel or trainer."""
        self._asked: set[asyncio.Future[Any]] = set()
        super().__init__(url, api_key=api_key, version=version, checkpoint=checkpoint, connections_max=connections_max)

    async def _learn(self, served: Mapping[str, Any]) -> str:
        server_version = (await self._endpoint.ask("GET", "/weight_info"))["weight_version"]
        if server_version.isdecimal():
            self._version = int(server_version)
        elif server_version == LOADING:
            self._half_loaded = True
        else:
            await self._endpoint.ask("POST", "/update_weight_version", {"new_version": str(self._version)})
        self._takes_seeds = takes_seeds(await self._endpoint.ask("GET", "/server_info?config_format=json"))
        return str(served.get("root") or served["id"])

    # ------------------------------------------------------------ completions

    async def _complete(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Completion:
        """Generate one completion; vLLM batches concurrent ones, and aborts one whose connection ends."""
        parameters = {
            "max_tokens": tokens_left(prompt, sampling),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids),
            "seed": seed_of(sampling, index, sample, prompt) if self._takes_seeds else None,
            "logprobs": 0,
            "detokenize": False,
        }
        body = {"token_ids": context(prompt).tolist(), "sampling_params": parameters, **await self._salt()}
        self._check_whole()
        answer = await self._answered(body)
        if answer is None:
            self._check_whole()
            return completed(index, sample, prompt, (), (), ABORT, ())
        try:
            return _completion(index, sample, prompt, answer["choices"][0])
        except (KeyError, IndexError, TypeError) as error:
            raise ProtocolError(f"{self._endpoint.url} gave a completion without {error}") from error
        except ValueError as error:  # of a version that is no number, as `LOADING`
            raise self._half() from error

    async def _salt(self) -> Mapping[str, str]:
        """Return what keeps a request from caches of older weights. Waits for the end of a pause or an update: the
        server would take the request during one, and compute it with newer weights than its salt says."""
        if self.kv is not Caches.SALT:
            return {}
        async with self._control:
            await self._control.wait_for(lambda: not self._held)
            return {"cache_salt": f"version {self._version}, load {self._load}"}

    async def _answered(self, body: Mapping[str, Any]) -> Any:
        """Return the server's answer; None for a request that was taken back here: it arrived after a pause, or the
        server's weights are of two versions."""
        answer = asyncio.ensure_future(self._endpoint.ask("POST", _GENERATE, body))
        self._asked.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if (running := asyncio.current_task()) is None or running.cancelling():
                raise
            return None
        finally:
            self._asked.discard(answer)

    def _check_whole(self) -> None:
        if self._half_loaded:
            raise self._half()

    def _half(self) -> Disconnected:
        return Disconnected(
            f"the server at {self._endpoint.url} has weights of two versions, since an update failed; update them "
            "again, or start it anew"
        )

    # ------------------------------------------------------------ control

    async def _pause(self, mode: Pause) -> None:
        async with self._control:
            running = self._asked.copy() if mode is Pause.ABORT else set()
            await self._endpoint.ask("POST", f"/pause?mode={mode.value}{self._clearing()}")
            self._held = True
            if running:
                _, overtaken = await asyncio.wait(running, timeout=ABORTED_S)
                for request in overtaken:
                    request.cancel()

    def _clearing(self) -> str:
        """Whether a pause drops caches: of the server's two ways to drop those of running requests, a pause is the one
        that waits until none runs."""
        return f"&clear_cache={'true' if self.kv is Caches.RECOMPUTE else 'false'}"

    async def _resume(self) -> None:
        async with self._control:
            if not self._half_loaded:
                await self._endpoint.ask("POST", "/resume")
            self._held = False
            self._control.notify_all()

    def _send_weights(self, source: WeightSource, version: int, timeout_s: float) -> None:
        """The server's workers read weights of a channel directly; other weights are published once to a queue that
        this adapter embeds on this machine."""
        place, version_there = self._relay.place(source)
        updating = self._update(place, version_there, version, timeout_s)
        self._beside.wait(updating, timeout_s, f"weights of version {version} were not loaded")

    async def _update(self, place: tuple[str, str], version_there: int, version: int, timeout_s: float) -> None:
        ask = self._endpoint.ask
        async with self._control:
            if place != self._channel:
                init = {"init_info": {"address": place[0], "channel": place[1]}}
                await ask("POST", "/init_weight_transfer_engine", init)
            self._channel = None  # an error may mean that another client has named another channel since
            with suppress(PeerError):  # an update that did not end is started still; the next request says if not
                await ask("POST", "/start_weight_update", may_fail=True)
            info = {"version": version_there, "timeout_s": timeout_s}
            await ask("POST", "/update_weights", {"update_info": info}, may_fail=True)
            self._channel = place
            with self._changing_weights():
                if not self._held:
                    await ask("POST", f"/pause?mode=keep{self._clearing()}")
                await ask("POST", "/update_weight_version", {"new_version": LOADING})
                await ask("POST", "/finish_weight_update", {"weight_version": str(version)}, may_fail=True)
            self._version, self._load = version, secrets.token_hex(8)
            if not self._held:
                await ask("POST", "/resume")

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """The weights change in this block. An error in it ends all requests until another block has ended well."""
        try:
            yield
        except BaseException:
            self._half_loaded = True
            for request in self._asked:
                request.cancel()
            raise
        self._half_loaded = False

    def close(self) -> None:
        """Abort the running requests. The server keeps running."""
        super().close()
        self._relay.close()


def takes_seeds(served: Mapping[str, Any]) -> bool:
    """Whether a server may get a seed with a request.

    Args:
        served: its answer of ``/server_info``, as JSON.

    >>> takes_seeds({"vllm_config": {"device_config": {"device": "cuda"}}})
    True
    """
    configured = served.get("vllm_config") or {}
    device = (configured.get("device_config") or {}).get("device")
    return device != "cpu" or not (configured.get("scheduler_config") or {}).get("enable_chunked_prefill")


def _completion(index: int, sample: int, prompt: Prompt, choice: Mapping[str, Any]) -> Completion:
    ids = choice["token_ids"] or []
    logprobs = [position["logprob"] for position in (choice["logprobs"] or {}).get("content") or []]
    spans = [(int(span["version"]), span["end"] - span["start"]) for span in choice.get("weight_versions") or ()]
    return completed(index, sample, prompt, ids, logprobs, choice["finish_reason"] or ABORT, spans)
