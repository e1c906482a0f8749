"""A rollout of verl over transformers: verl's interface outside, `TransformersGenerator` inside.

verl's agent loop asks a *server*, a Ray actor, for one completion at a time; the server draws all that are asked for in
one batch. After a step each training worker sends the full weights to the server of its replica. A replica has one
server and one worker.

With verl's ``rollout.full_determinism`` the draws of a prompt depend on its tokens, the version of the weights, and how
many completions of it were asked for before, so two runs draw the same completions. verl then sends all requests to one
server.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import ABORT, Completion, Ids, Pause, Prompt, Sampling, Unsupported
from transferqueue.adapters.weights import ModuleWeights, TensorWeights

ABORTED = "aborted"
"""verl's stop reason of a completion that was cut short."""


def server_name(replica: int) -> str:
    """Name of the Ray actor that serves this replica."""
    return f"transformers_server_{replica}"


class TransformersServer:
    """Ray actor: a model in float32 on the CPU, and verl's methods of a server.

    path: directory of model and tokenizer. response_tokens: length limit of a response unless the request has one.
    requests_max: requests that may wait at once. seeded: completions are the same in each run.
    """

    def __init__(self, path: str, response_tokens: int, requests_max: int, seeded: bool) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._tied = set(model.state_dict()) - set(ModuleWeights(model).metadata())
        self._generator = TransformersGenerator(model, shared_batch=not seeded)
        self._asked: Counter[int] | None = Counter() if seeded else None
        self._stop_ids = (int(AutoTokenizer.from_pretrained(path).eos_token_id),)
        self._response_tokens = response_tokens
        self._waiting = ThreadPoolExecutor(requests_max, thread_name_prefix="request")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Complete one prompt. Raises `Unsupported` for images, videos, top-k and a repetition penalty."""
        if image_data or video_data:
            raise Unsupported("images or videos: this rollout reads tokens; use verl's vllm or sglang rollout")
        ids = np.asarray(prompt_ids, np.int32)
        prompt = Prompt(ids=ids, seed=self._seed(ids))
        sampling = self._sampling(sampling_params)
        loop = asyncio.get_running_loop()
        return _output(await loop.run_in_executor(self._waiting, self._completion, prompt, sampling))

    def _seed(self, ids: Ids) -> int | None:
        """A seed from the prompt, the version, and how many completions of it were asked for."""
        if self._asked is None:
            return None
        same = zlib.crc32(ids.tobytes(), self._generator.version & 0xFFFF)
        self._asked[same] += 1
        return same + self._asked[same]

    def _sampling(self, given: Mapping[str, Any]) -> Sampling:
        if given.get("top_k", -1) > 0 or given.get("repetition_penalty", 1.0) != 1.0:
            raise Unsupported(f"sampling {dict(given)}: this rollout has neither top_k nor repetition_penalty")
        limit = given.get("max_tokens", given.get("max_new_tokens", self._response_tokens))
        return Sampling(
            tokens_max=max(1, int(limit)),
            temperature=given["temperature"],
            top_p=given["top_p"],
            stop_ids=self._stop_ids,
        )

    def _completion(self, prompt: Prompt, sampling: Sampling) -> Completion:
        return next(iter(self._generator.generate([prompt], sampling)))

    async def update_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Take new weights between two tokens. The second name of a tied tensor is left out."""
        given = {name: tensor for name, tensor in tensors.items() if name not in self._tied}
        await asyncio.to_thread(self._generator.update_weights, TensorWeights(given), version)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End the running requests with their tokens so far; later ones wait for `resume_generation`."""
        await asyncio.to_thread(self._generator.pause, Pause.ABORT)

    async def resume_generation(self) -> None:
        """End the pause."""
        self._generator.resume()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: weights stay where they are, and a cache lives only while its rows run."""

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up


def _output(completion: Completion) -> TokenOutput:
    reason = ABORTED if completion.finish_reason == ABORT else "completed"
    return TokenOutput(
        token_ids=completion.ids.tolist(),
        log_probs=completion.logprobs.tolist(),
        stop_reason=reason,
        extra_fields={
            "global_steps": completion.policy_version_max,
            "min_global_steps": completion.policy_version,
            "max_global_steps": completion.policy_version_max,
        },
    )


class TransformersReplica(RolloutReplica):  # type: ignore[misc]
    """Starts the server on the node of its training worker."""

    async def launch_servers(self) -> None:
        """Start the server and wait until it has loaded the model. Raises `Unsupported` for a replica of several
        workers."""
        if self.world_size != 1:
            raise Unsupported(f"a replica of {self.world_size} workers: set tensor_model_parallel_size to 1")
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(TransformersServer)
            .options(
                name=server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(
                self.model_config.path,
                self.config.response_length,
                self.config.max_num_seqs,
                self.config.full_determinism,
            )
        )
        await server.wake_up.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = server_name(self.replica_rank)


class TransformersAdapter(BaseRollout):  # type: ignore[misc]
    """A training worker's side of its replica: sends weights to the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = torch.distributed.get_rank() if replica_rank < 0 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server holds its memory."""

    async def release(self) -> None:
        """Do nothing: the server holds its memory."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """Send all tensors; every rank gathers its shards meanwhile. Raises `Unsupported` for parts of tensors."""
        if wire_format != "named_tensors":
            raise Unsupported(f"weights as {wire_format!r}: this rollout takes whole tensors")
        tensors = {name: tensor.detach().cpu() async for name, tensor in ensure_async_iterator(weights)}
        server = ray.get_actor(server_name(self.replica_rank))
        await server.update_weights.remote(tensors, global_steps or 0)
