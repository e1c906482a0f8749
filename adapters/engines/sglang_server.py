"""A generator over SGLang's server, by its documented endpoints: token ids in and out, pauses, and weights through a
folder.

- The server reports one version for a whole request, so no request may span two. Before weights change, the server ends
  the running requests; they are sent again afterwards with their tokens so far.
- The server reads weights from files. Each version is written as one safetensors file into a folder that the server can
  read, preferably in shared memory; the file of the version before is removed.
- The server reports log-probabilities before the nucleus is cut, so ``top_p`` below 1 is `Unsupported`.

Not run against a real server: SGLang's package needs an accelerator. The tests run this adapter against the documented
endpoints, implemented over another engine.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from transferqueue.adapters.engines.completion import completed, context, seed_of, tokens_left
from transferqueue.adapters.engines.http_engine import CONNECTIONS_MAX, ResendingEngine, Running, ServerEngine
from transferqueue.adapters.protocols import (
    GENERATE_S,
    Completion,
    Completions,
    Pause,
    Prompt,
    Sampling,
    Unsupported,
    WeightSource,
)
from transferqueue.adapters.weight_files import WEIGHTS, write_tensors
from transferqueue.errors import PeerError, ProtocolError

_log: Final = logging.getLogger("transferqueue.adapters.sglang")


class SglangServer(ServerEngine, ResendingEngine):
    """A generator (`protocols.Generator`) over a running SGLang server.

    Args:
        url: of the server, without ``/v1``.
        weights: an empty folder for new versions, which the server sees under the same path.
        api_key: sent as a bearer token; default None: none is sent.
        version: of the weights that the server was started with; default 0. A server that has loaded newer weights
            keeps their version.
        checkpoint: a directory with the model's tensors, to check new weights against; default None: the directory that
            the server reports.
        connections_max: concurrent requests to the server; default 256. Further requests wait on this side.
    """

    def __init__(
        self,
        url: str,
        *,
        weights: Path | str,
        api_key: str | None = None,
        version: int = 0,
        checkpoint: Path | str | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._folder = Path(weights)
        super().__init__(url, api_key=api_key, version=version, checkpoint=checkpoint, connections_max=connections_max)
        _log.info("%s loads each version of the weights whole, from files", url)

    async def _learn(self, served: Mapping[str, Any]) -> str:
        info = await self._endpoint.ask("GET", "/get_model_info")
        version = str(info.get("weight_version", ""))
        self._version = int(version) if version.isdecimal() else self._version
        return str(info["model_path"])

    # ------------------------------------------------------------ completions

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished (`protocols.Generator.generate`).

        Args:
            prompts: the prompts, at least one.
            sampling: how their tokens are drawn; `top_p` is 1.
            timeout_s: seconds until all completions must be finished, pauses included; default 600.

        Raises:
            DeadlineExceeded: not all completions were finished in time.
            Disconnected: the generator was closed.
            Unsupported: `top_p` is below 1.
            UsageError: a request that the server cannot carry out.
        """
        if sampling.top_p < 1:
            raise Unsupported(f"top_p={sampling.top_p}: SGLang tells log-probabilities before that cut; give 1")
        return super().generate(prompts, sampling, timeout_s=timeout_s)

    async def _part(self, index: int, sample: int, prompt: Prompt, sampling: Sampling, running: Running) -> Completion:
        """Send one request and read it until it is finished, or until a pause makes the server end it."""
        parameters = {
            "max_new_tokens": tokens_left(prompt, sampling),
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_ids),
            "sampling_seed": seed_of(sampling, index, sample, prompt),
            "skip_special_tokens": False,
        }
        body = {
            "input_ids": context(prompt).tolist(),
            "sampling_params": {name: value for name, value in parameters.items() if value is not None},
            "return_logprob": True,
        }
        version = self._version
        answer = await self._endpoint.ask("POST", "/generate", body)
        try:
            meta = answer["meta_info"]
            token_logprobs = meta["output_token_logprobs"]
            ids, logprobs = [token for _, token, *_ in token_logprobs], [logprob for logprob, *_ in token_logprobs]
            reason = meta["finish_reason"]["type"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self._endpoint.url} gave a completion without {error}") from error
        return completed(index, sample, prompt, ids, logprobs, reason, [(version, len(ids))])

    # ------------------------------------------------------------ control

    async def _pause(self, mode: Pause) -> None:
        async with self._control:
            await self._halt(mode)

    async def _halt(self, mode: Pause) -> None:
        self._pauses.cut(mode)
        if mode is not Pause.WAIT:
            await self._endpoint.ask("POST", "/pause_generation", {"mode": "abort"})
        await self._pauses.begin(mode)
        if mode is Pause.WAIT:
            await self._endpoint.ask("POST", "/pause_generation", {"mode": "abort"})

    async def _resume(self) -> None:
        async with self._control:
            await self._endpoint.ask("POST", "/continue_generation", {})
            await self._pauses.end()

    def _send_weights(self, source: WeightSource, version: int, timeout_s: float) -> None:
        place = self._folder / f"version-{version}"
        place.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(place / WEIGHTS, {name: tensor.detach().to("cpu", copy=True) for name, tensor in source})
            self._beside.wait(self._update(place, version), timeout_s, f"weights of version {version} were not loaded")
        finally:
            shutil.rmtree(place)

    async def _update(self, place: Path, version: int) -> None:
        async with self._control:
            was_paused = self._pauses.paused
            if not was_paused:
                await self._halt(Pause.KEEP)
            try:
                body: dict[str, Any] = {"model_path": str(place), "weight_version": str(version), "flush_cache": True}
                answer = await self._endpoint.ask("POST", "/update_weights_from_disk", body)
                if not answer.get("success"):
                    raise PeerError(f"{self._endpoint.url} did not take weights: {answer.get('message')}")
                self._version = version
            finally:
                if not was_paused:
                    await self._endpoint.ask("POST", "/continue_generation", {})
                    await self._pauses.end()
