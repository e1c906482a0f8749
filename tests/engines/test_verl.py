"""verl 0.9.1's own data path on the drop-in: agent loop, replay buffer, bridge, padding, checkpoint. `make test-verl`
runs it.

verl's modules run as they are installed; what a model and a cluster would do (tokens, scores) is given by the test.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("make test-verl installs verl", allow_module_level=True)

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from transferqueue.adapters import transfer_queue as tq
from transferqueue.adapters.transfer_queue_hook import activate

activate()  # before verl: what it imported first it keeps

from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils import tensordict_utils, transferqueue_utils

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]
TRAIN = "train"


def module_of(name: str) -> ModuleType:
    """A file of verl's v1 trainer, without the trainers that its package imports (they need more than the data path
    does)."""
    import verl.trainer.ppo as package

    path = Path(next(iter(package.__path__))) / "v1" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRANSFERQUEUE_SHIM_LOCAL", "1")
    tq.init()
    yield
    tq.close()


def register(*uids: str) -> None:
    """As its trainer does: a tag alone for each prompt."""
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 3} for _ in uids]
    fields = tensordict_utils.get_tensordict(
        {"uid": list(uids), "raw_prompt": [[{"role": "user", "content": u}] for u in uids]}
    )
    tq.kv_batch_put(keys=list(uids), partition_id=TRAIN, fields=fields, tags=tags)


def multimodal(length: int) -> dict[str, torch.Tensor]:
    """What a processor of images gives for a trajectory: other shapes for each."""
    return {"pixel_values": torch.full((4 * length, 8), 1.0 / length), "image_grid_thw": torch.tensor([[1, length, 4]])}


def worker() -> Any:
    """Its agent loop's worker with a given agent: the number of tokens is that of the session."""
    module = module_of("agent_loop_tq")
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    class Worker(module.AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 2, "val_kwargs": {"n": 1}}}})
            self.processor = None
            self.background_tasks: set[Any] = set()

        async def _compute_score(self, outputs: Any, kwargs: Any) -> None:
            for output in outputs:
                output.reward_score = float(kwargs["session_id"])

        def _compute_multi_modal_inputs(self, output: Any, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return multimodal(len(output.response_ids))

        async def _compute_teacher_logprobs(self, *arguments: Any, **named: Any) -> None:
            return None

        async def _run_agent_loop(self, sampling_params: Any, *, trajectory: Any, trace: bool, **prompt: Any) -> None:
            if prompt["uid"] == "bad":
                raise RuntimeError("the agent failed")
            length = prompt["session_id"] + 2
            output = AgentLoopOutput(
                prompt_ids=[1, 2, 3],
                response_ids=[7] * length,
                response_mask=[1] * length,
                response_logprobs=[-0.5] * length,
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields={"min_global_steps": 2, "max_global_steps": 3},
            )
            await self._agent_loop_postprocess(output, trajectory["validate"], **prompt)

    return Worker()


def rolled_out(*uids: str) -> None:
    async def all_prompts() -> None:
        one = worker()
        prompts = [{"uid": uid, "global_steps": 3, "data_source": "test"} for uid in uids]
        await asyncio.gather(*(one._run_prompt(prompt, {}, {"validate": False}) for prompt in prompts))

    register(*uids)
    asyncio.run(all_prompts())


def sampled(prompts: int) -> Any:
    buffer = module_of("replay_buffer").ReplayBuffer(
        "sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}), 0.05
    )
    return buffer.sample(global_steps=3, partition_id=TRAIN, batch_size=prompts)[0]


def test_agent_loop_and_replay_buffer() -> None:
    """Prompts go from pending to finished or failure; trajectories carry their tags, and the prompts sampled are
    gone."""
    rolled_out("a", "b", "bad")
    found = tq.kv_list(TRAIN)[TRAIN]
    assert {uid: found[uid]["status"] for uid in ("a", "b", "bad")} == {
        "a": "finished",
        "b": "finished",
        "bad": "failure",
    }
    assert found["a_1_0"]["seq_len"] == 6
    assert found["a_1_0"]["min_global_steps"] == 2
    batch = sampled(3)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    assert sorted(tq.kv_list(TRAIN)[TRAIN]) == sorted(batch.keys)
    data = tq.kv_batch_get(batch.keys, TRAIN, select_fields=["responses", "rm_scores"])
    scores = {key: row.sum().item() for key, row in zip(batch.keys, data["rm_scores"].unbind(), strict=True)}
    assert scores == {"a_0_0": 0.0, "a_1_0": 1.0, "b_0_0": 0.0, "b_1_0": 1.0}


def test_multimodal_inputs_of_trajectories() -> None:
    rolled_out("a")
    batch = sampled(1)
    data = tq.kv_batch_get(batch.keys, TRAIN, select_fields=["multi_modal_inputs", "responses"])
    for responses, inputs in zip(data["responses"].unbind(), data["multi_modal_inputs"], strict=True):
        assert inputs.keys() == multimodal(1).keys()
        assert all(torch.equal(inputs[name], given) for name, given in multimodal(len(responses)).items())


def test_padding_makes_a_batch_divisible() -> None:
    rolled_out("a", "b", "c")
    batch = upsample_batch_to_divisible_size(sampled(3), 4, eos_token_id=9)
    assert len(batch) == 8
    assert [tag.get("is_padding", False) for tag in batch.tags] == [False] * 6 + [True] * 2
    data = tq.kv_batch_get(batch.keys, TRAIN, select_fields=["input_ids", "response_mask"])
    assert [len(row) for row in data["input_ids"].unbind()][6:] == [128, 128]
    assert [int(row.sum()) for row in data["response_mask"].unbind()][6:] == [0, 0]


def test_the_bridge_gives_data_and_takes_columns() -> None:
    """A worker's function takes a TensorDict and gives columns; the caller has metadata on both sides."""

    @transferqueue_utils.tqbridge()  # type: ignore[untyped-decorator]
    def lengths(data: TensorDict) -> TensorDict:
        rows = data["responses"].unbind()
        values = torch.nested.as_nested_tensor(
            [torch.full((len(row),), float(len(row))) for row in rows], layout=torch.jagged
        )
        return TensorDict({"values": values}, batch_size=[len(rows)])

    @transferqueue_utils.tqbridge()  # type: ignore[untyped-decorator]
    async def total(data: TensorDict) -> float:
        return float(sum(row.sum() for row in data["values"].unbind()))

    assert transferqueue_utils.tq is tq, "verl's transfer_queue is the drop-in"
    rolled_out("a", "b")
    batch = sampled(2)
    made = lengths(batch)
    assert isinstance(made, tq.KVBatchMeta)
    assert made.keys == batch.keys
    assert made.tags == batch.tags
    assert "values" in (made.fields or ())
    assert asyncio.run(total(made)) == 2 * (2 * 2 + 3 * 3)


def test_a_checkpoint_keeps_prompts_in_flight(tmp_path: Path) -> None:
    """As its asynchronous trainers resume: finished trajectories are there, pending prompts are issued again with their
    data."""
    rolled_out("a")
    register("waiting")
    tq.save_checkpoint(tmp_path / "transfer_queue", metadata={"global_steps": 3})
    tq.close()
    tq.init()
    tq.load_checkpoint(tmp_path / "transfer_queue")
    pending = [key for key, tag in tq.kv_list(TRAIN)[TRAIN].items() if tag.get("status") == "pending"]
    assert pending == ["waiting"]
    assert tensordict_utils.get(tq.kv_batch_get(pending, TRAIN), "uid") == pending
    assert sorted(sampled(1).keys) == ["a_0_0", "a_1_0"]
