"""OpenRLHF's asynchronous mode with its two queues in a table, by OpenRLHF's own code with
`examples/stacks/openrlhf.patch`, over Ray. `make test-openrlhf` runs it.

Its own are the arguments, both actors and their loops, prompts and their place, samples, advantages, the model and the
loss. Its DeepSpeed workers ask for CUDA and its engines for vLLM on a GPU: in their places stand an actor with an
optimizer of torch and one whose tokens follow from the prompt.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("make test-openrlhf fetches OpenRLHF", allow_module_level=True)

import ray
import torch

with warnings.catch_warnings():  # of DeepSpeed and of old escapes in its strings
    warnings.simplefilter("ignore")
    import openrlhf.utils
    from openrlhf.models import Actor, PolicyLoss
    from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
    from openrlhf.trainer.ray.launcher import BaseModelActor, RayActorGroup
    from openrlhf.utils import get_strategy

import transferqueue as tq
from transferqueue.adapters.trainers.openrlhf import RolloutQueues
from transferqueue.errors import UsageError
from transferqueue.workflows.job.tiny_model.make import make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROMPTS, BATCH, SAVE_STEPS, KILL_AT = 16, 2, 2, 4
STEPS = PROMPTS // BATCH
HOOK = "transferqueue.adapters.trainers.openrlhf.RolloutQueues"


def same_order() -> None:
    """Seed a process of Ray's: OpenRLHF leaves the order of its prompts to the process that draws it."""
    torch.manual_seed(0)


def note(path: Path, value: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def notes(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@ray.remote
class Engine:
    """In the place of vLLM: tokens that follow from the prompt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_num_unfinished_requests(self) -> int:
        return 0

    def generate_responses(self, prompt: str, label: str, hf_tokenizer: Any, num_samples: int, **_: Any) -> Any:
        note(self._folder / "generated", prompt)
        ids = hf_tokenizer(prompt)["input_ids"]
        made = []
        for number in range(num_samples):
            tokens = [(each * 7 + number * 3) % 50 + 1 for each in ids[:6]]
            made.append(
                {
                    "prompt": prompt,
                    "label": label,
                    "observation_tokens": ids + tokens,
                    "action_ranges": [(len(ids), len(ids) + len(tokens))],
                    "rollout_log_probs": None,
                    "reward": float(number),
                    "scores": float(number),
                }
            )
        return made


@ray.remote(num_cpus=0)
class Worker(BaseModelActor):  # type: ignore[misc]
    """In the place of OpenRLHF's DeepSpeed worker: its model and its loss, with an optimizer of torch on a CPU."""

    def init_model_from_pretrained(self, strategy: Any, folder: Path, hangs_at: int) -> None:
        self.strategy, self._folder, self._hangs_at = strategy, folder, hangs_at
        self._model = Actor(strategy.args.actor.model_name_or_path, attn_implementation="eager").float()
        self._loss, self._optimizer = PolicyLoss(), torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._batch: list[Any] = []
        self._step = 0

    def forward(self, sequences: Any, action_mask: Any, attention_mask: Any, **_: Any) -> Any:
        with torch.no_grad():
            return self._model(sequences, action_mask, attention_mask)

    def append(self, experience: Any) -> None:
        self._batch.append(experience)

    def fit(self, kl_ctl: float) -> dict[str, float]:
        self._step += 1
        if self._step == self._hangs_at:
            threading.Event().wait(900.0)
        losses = []
        for each in self._batch:
            log_probs = self._model(each.sequences, each.action_mask, each.attention_mask)
            loss = self._loss(log_probs, each.action_log_probs, each.advantages, each.action_mask)[0]
            losses.append(loss.item())
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        prompts = sorted(prompt for each in self._batch for prompt in each.prompts)
        weight = sum(float(each.detach().abs().sum()) for each in self._model.parameters())
        note(self._folder / "trained", [self._step, prompts, losses, weight])
        self._batch = []
        return {"policy_loss": sum(losses)}

    def broadcast_to_vllm(self) -> None: ...

    def save_checkpoint(self, tag: str, client_states: dict[str, Any], **_: Any) -> None:
        states = [client_states, self._model.state_dict(), self._optimizer.state_dict()]
        (self._folder / "_actor").mkdir(exist_ok=True)
        torch.save(states, self._folder / "_actor" / "states")

    def get_checkpoint_states(self) -> dict[str, Any]:
        states, model, optimizer = torch.load(self._folder / "_actor" / "states", weights_only=False)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        self._step = states["global_step"]
        return dict(states)


def ready(queue: tq.Queue) -> int:
    """Batches that wait for the trainer."""
    return queue.table("openrlhf-kept").stats().tasks["train"].ready


class Job:
    """A job of OpenRLHF in a folder. hangs_at: the step that never ends."""

    def __init__(self, args: Namespace, *, hangs_at: int = 0) -> None:
        self.folder = Path(args.ckpt.path)
        self.folder.mkdir(exist_ok=True)
        strategy = get_strategy(args)
        self._workers = RayActorGroup(1, 1, Worker, num_gpus_per_actor=0)
        ray.get(self._workers._actor_handlers[0].init_model_from_pretrained.remote(strategy, self.folder, hangs_at))
        self._engine = Engine.remote(self.folder)
        self._trainer = PPOTrainerAsync.remote(
            args.actor.model_name_or_path,
            strategy,
            self._workers,
            None,
            None,
            None,
            [self._engine],
            max_len=64,
            max_new_tokens=8,
            temperature=1.0,
            top_p=1.0,
        )
        self._fit = self._trainer.fit.remote()

    def finish(self) -> None:
        ray.get(self._fit, timeout=900)
        self.kill()

    def kill(self) -> None:
        for actor in (self._trainer, self._engine, *self._workers._actor_handlers):
            ray.kill(actor)


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tq.Queue]:
    with tq.connect("embedded") as queue:
        path = ":".join(part for part in sys.path if part)
        environment = {
            "env_vars": {"PYTHONPATH": path, "TRANSFERQUEUE_ADDRESS": queue.address},
            "worker_process_setup_hook": same_order,
        }
        ray.init(address="local", num_cpus=6, include_dashboard=False, runtime_env=environment)
        yield queue
        ray.shutdown()


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: tq.Queue) -> Callable[..., Namespace]:
    """OpenRLHF's arguments as its own command reads them."""
    make(tmp_path / "model")
    rows = [{"input": f"sort {place}", "label": str(place)} for place in range(PROMPTS)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Read(Exception):
        pass

    def read(args: Namespace) -> None:
        raise Read(args)

    def arguments(name: str, *more: str) -> Namespace:
        text = (
            f"--actor.model_name_or_path {tmp_path}/model --reward.remote_url rewards.py --ckpt.path {tmp_path}/{name} "
            f"--data.prompt_dataset {tmp_path}/data.jsonl --data.input_key input --data.label_key label "
            f"--rollout.batch_size {BATCH} --rollout.micro_batch_size {BATCH * 2} --rollout.n_samples_per_prompt 2 "
            f"--train.batch_size {BATCH * 2} --train.num_episodes 1 --ckpt.save_steps {SAVE_STEPS} --ckpt.load_enable "
            "--train.async_enable --train.async_queue_size 2 --vllm.num_engines 1 --actor.num_gpus_per_node 1 "
            "--algo.kl.init_coef 0 --algo.advantage.estimator group_norm --ds.attn_implementation eager"
        )
        monkeypatch.setattr(openrlhf.utils, "get_strategy", read)
        monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *text.split(), *more])
        with pytest.raises(Read) as got:
            runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
        monkeypatch.undo()
        (args,) = got.value.args
        return args

    return arguments


def test_a_killed_job_trains_each_batch_as_it_was_and_generates_none_again(
    arguments: Callable[..., Namespace], queue: tq.Queue
) -> None:
    own = Job(arguments("own"))  # on Ray's queues, to its end
    own.finish()
    expected = notes(own.folder / "trained")
    assert [step for step, *_ in expected] == list(range(1, STEPS + 1))

    args = arguments("kept", "--train.async_queue_path", HOOK)
    killed = Job(args, hangs_at=KILL_AT)
    generated, deadline = killed.folder / "generated", time.monotonic() + 600.0
    while len(notes(generated)) < (KILL_AT + 2) * BATCH or ready(queue) < 2:
        assert time.monotonic() < deadline, notes(generated)
        time.sleep(0.1)
    killed.kill()
    before = notes(killed.folder / "trained")

    Job(args).finish()
    trained = notes(killed.folder / "trained")
    assert [step for step, *_ in trained[len(before) :]] == list(range(SAVE_STEPS + 1, STEPS + 1))
    trained = before[:SAVE_STEPS] + trained[len(before) :]
    assert [each[:2] for each in trained] == [each[:2] for each in expected]
    for ours, theirs in zip(trained, expected, strict=True):
        assert ours[2] == pytest.approx(theirs[2], abs=1e-5)
        assert ours[3] == pytest.approx(theirs[3], rel=1e-5)
    assert len({weight for *_, weight in expected}) == STEPS  # each step changes the model
    assert sorted(notes(generated)) == sorted(f"sort {place}" for place in range(PROMPTS))
    assert queue.audit().balanced


def test_a_job_that_begins_anew_has_an_empty_table(arguments: Callable[..., Namespace], queue: tq.Queue) -> None:
    args = arguments("anew", "--train.async_queue_path", HOOK)
    kept = RolloutQueues(args, queue)
    assert kept.slots.get() == 0
    kept.rollouts.put(([], {"episode": 0}, None, 0.5))
    begun = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}
    assert RolloutQueues(args, queue).resume(begun) == begun
    assert queue.table("openrlhf-anew").stats().tasks["train"].ready == 0


def test_a_job_goes_on_behind_its_newest_batch_and_not_in_an_episode_that_is_over(
    arguments: Callable[..., Namespace], queue: tq.Queue
) -> None:
    args = arguments("over", "--train.async_queue_path", HOOK)
    kept = RolloutQueues(args, queue)
    over = {"episode": 0, "total_consumed_prompts": 3, "data_loader_state_dict": {"_iterator_finished": True}}
    for step in range(3):
        assert kept.slots.get() == max(0, step - 1)
        kept.rollouts.put(([], dict(over), None, 0.5))
        assert kept.rollouts.get() == ([], over, None, 0.5)
        kept.slots.put(step)
    kept.rollouts.put(("eval", 2, {"pass1": 0.5}))
    kept.rollouts.put("done")
    saved = {"episode": 0, "global_step": 2, "total_consumed_prompts": 2, "data_loader_state_dict": {"at": 2}}
    assert RolloutQueues(args, queue).resume(saved) == {
        "episode": 1,
        "global_step": 2,
        "total_consumed_prompts": 3,
        "data_loader_state_dict": {},
    }
    assert queue.table("openrlhf-over").stats().tasks["train"].ready == 1  # the third batch
    with pytest.raises(UsageError, match="checkpoint"):
        RolloutQueues(args, queue).resume({**saved, "global_step": 1})
