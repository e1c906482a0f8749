"""A generator over any OpenAI-compatible endpoint: token ids in, token ids and log-probabilities out, streamed.

- The endpoint must return the ids of the tokens that it drew (``return_token_ids``, as vLLM does) and their
  log-probabilities. Otherwise the first answer raises `Unsupported`: tokenizing the text again need not give the tokens
  that were drawn.
- Log-probabilities must be those of the distribution that was drawn from. vLLM returns these when started with
  ``--logprobs-mode processed_logprobs``.
- Some endpoints cannot carry seeds: vLLM (0.32) on a CPU dies of one whose prompt it computes in parts, and does not
  say that it is such a server. ``seeds=False`` sends none.
- A pause happens on this side: new requests wait, and running streams are awaited or cut. After the pause, cut streams
  that were to be kept are requested again with their tokens so far. An endpoint takes no weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transferqueue.adapters.engines.completion import completed, context, ended_by, seed_of, tokens_left
from transferqueue.adapters.engines.http_engine import CONNECTIONS_MAX, ResendingEngine, Running, events
from transferqueue.adapters.protocols import PAUSE_S, Completion, Prompt, Sampling, Unsupported, WeightSource
from transferqueue.errors import Disconnected


@dataclass
class SampledTokens:
    """Tokens of one choice so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a response, or a chunk of one. Raises `Unsupported` if it has tokens without ids or
        log-probabilities."""
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
    """Return the log-probabilities of a choice's tokens, in the format of ``completions`` or of
    ``chat/completions``."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content") is not None:
        return [token["logprob"] for token in logprobs["content"]]
    return list(logprobs.get("token_logprobs") or [])


class OpenAIGenerator(ResendingEngine):
    """A generator (`protocols.Generator`) over ``POST {base_url}/completions``.

    Args:
        base_url: of the endpoint, with its ``/v1``.
        model: its name at the endpoint.
        api_key: sent as a bearer token; default None: none is sent.
        version: of the weights that the endpoint serves, with which every token is stamped; default 0.
        context_max: context length in tokens, if known; longer requests are then refused on this side. Default None.
        connections_max: concurrent requests to the endpoint; default 256. Further requests wait on this side.
        seeds: whether requests carry the seeds of prompts and of the sampling; default True.
        body: further fields for each request; default None.
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
        seeds: bool = True,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(base_url, api_key=api_key, version=version, connections_max=connections_max)
        self._model, self._context_max, self._takes_seeds = model, context_max, seeds
        self._body = dict(body or {})

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Raise `Unsupported`: an endpoint takes no weights.

        Args:
            source: not used.
            version: not used.
            timeout_s: not used.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("an OpenAI-compatible endpoint takes no weights; vllm_server.VllmServer does")

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
            "seed": seed_of(sampling, index, sample, prompt) if self._takes_seeds else None,
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


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
