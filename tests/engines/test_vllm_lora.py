"""vLLM with adapters by version: each request draws with the adapters that it began with, several versions beside one
base."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.engines.tiny import model, save

pytest.importorskip("vllm", reason="make test-engines installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from transferqueue.adapters.protocols import Completion, Pause, Prompt, Sampling
from transferqueue.adapters.scoring.lora import AdapterWeights, add_lora
from transferqueue.adapters.vllm.engine import VllmGenerator
from transferqueue.adapters.vllm.lora_slots import LoraSlots
from transferqueue.adapters.weights import ModuleWeights, WeightUpdater
from transferqueue.errors import SchemaError, UsageError

SLOTS = 2
LONG = Sampling(tokens_max=150)
PROMPT = Prompt(ids=np.random.default_rng(3).integers(5, 60, size=40).astype(np.int32), samples=2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmGenerator]:
    found = VllmGenerator(
        str(save(tmp_path_factory.mktemp("model"))),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=32,
        kv_cache_memory_bytes=64 << 20,
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=8,
    )
    yield found
    found.close()
    with warnings.catch_warnings():  # vLLM leaves a context of ZeroMQ to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Trained:
    """A model whose adapters move, the channel that it publishes them on, and what the engine follows it by."""

    def __init__(self, engine: VllmGenerator, queue: tq.Queue, rank: int = 4, which: int = 1) -> None:
        self.model, self.engine, self.states = model(which), engine, list[dict[str, torch.Tensor]]()
        add_lora(self.model, rank=rank, targets=["q_proj", "v_proj", "gate_proj", "down_proj"])
        self.channel = queue.weights("policy")
        self.updater = WeightUpdater(queue, "policy", engine.update_weights, reads_channel=engine.reads_channel)

    def publish(self) -> int:
        """Publish the next version with other adapters; return the bytes that it wrote."""
        for name, parameter in self.model.named_parameters():
            if "lora" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        self.states.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        return self.channel.publish(len(self.states) - 1, dict(AdapterWeights(self.model)))

    def step(self) -> int:
        written = self.publish()
        assert self.updater.follow()
        return written

    @torch.no_grad()
    def truth(self, version: int, ids: Any) -> Any:
        """The log-probs of the drawn tokens of PROMPT under the adapters of a version, by the trainer's model."""
        self.model.load_state_dict(self.states[version])
        tokens = torch.from_numpy(np.concatenate([PROMPT.ids, ids])).long()[None]
        scores = self.model(input_ids=tokens).logits[0, len(PROMPT.ids) - 1 : -1].log_softmax(-1)
        self.model.load_state_dict(self.states[-1])
        return scores.gather(-1, torch.from_numpy(ids).long()[:, None])[:, 0].numpy()

    def check(self, drawn: Completion, version: int) -> None:
        """All tokens are of that version, and of no other."""
        assert drawn.spans == ((version, len(drawn.ids)),)
        differences = [np.abs(drawn.logprobs - self.truth(each, drawn.ids)).max() for each in range(len(self.states))]
        assert [difference < 1e-3 for difference in differences] == [
            each == version for each in range(len(differences))
        ]


class Running:
    """Requests that run while the weights change, until `stop` lets them end."""

    def __init__(self, engine: VllmGenerator) -> None:
        self.drawn, self._engine = list[Completion](), engine
        engine.pause(Pause.KEEP)
        self._rows = set(engine._rows._rows)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.drawn += self._engine.generate([PROMPT], LONG)

    def begin(self, tokens: int) -> None:
        """Return when the rows have drawn so many tokens, and stand still."""
        engine = self._engine
        engine.resume()
        self._thread.start()
        with engine._turn:
            assert engine._turn.wait_for(lambda: self._tokens() >= tokens, 60)
        engine.pause(Pause.KEEP)

    def _tokens(self) -> int:
        rows = [row for name, row in self._engine._rows._rows.items() if name not in self._rows]
        return min((self._engine._rows._drawn(row)[1] for row in rows), default=0)

    def end(self) -> list[Completion]:
        self._engine.resume()
        self._thread.join(120)
        return self.drawn


def drawn(engine: VllmGenerator) -> list[Completion]:
    return list(engine.generate([PROMPT], Sampling(tokens_max=12)))


def test_requests_end_with_the_adapters_that_they_began_with_and_new_ones_get_the_newest(engine: VllmGenerator) -> None:
    """Two versions at a time, of a prompt whose cache is shared within a version and not beyond it."""
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        written = [trained.step()]
        before = engine.prefilled_again
        old = Running(engine)
        old.begin(20)
        written.append(trained.step())
        engine.resume()
        for completion in drawn(engine):
            trained.check(completion, 1)
        assert len(old.end()) == 2
        for completion in old.drawn:
            trained.check(completion, 0)
        for version in (2, 3, 4):
            written.append(trained.step())
            for completion in drawn(engine):
                trained.check(completion, version)
    assert engine.prefilled_again == before
    assert max(written[1:]) < 0.2 * written[0]


def test_without_a_free_slot_the_oldest_requests_go_on_with_the_newest_adapters(engine: VllmGenerator) -> None:
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        trained.step()
        running = [Running(engine)]
        running[0].begin(20)
        trained.step()
        running.append(Running(engine))
        running[1].begin(10)
        trained.step()  # both slots are in use
        engine.resume()
        for completion in drawn(engine):
            trained.check(completion, 2)
        first, second = (each.end() for each in running)
        for completion in second:
            trained.check(completion, 1)
        for completion in first:
            (old, begun), (new, rest) = completion.spans
            assert (old, new) == (0, 2)
            assert 20 <= begun < begun + rest == len(completion.ids)
            truth = trained.truth(0, completion.ids)[:begun]
            np.testing.assert_allclose(completion.logprobs[:begun], truth, atol=1e-3)
            assert np.abs(completion.logprobs[begun:] - trained.truth(0, completion.ids)[begun:]).max() > 1e-2


def test_what_does_not_fit_is_refused_and_the_adapters_stay(engine: VllmGenerator) -> None:
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        trained.step()
        with tq.connect() as another:
            larger = Trained(engine, another, rank=16)
            larger.publish()
            with pytest.raises(SchemaError, match="adapters of rank 16, and the engine has slots of max_lora_rank=8"):
                larger.updater.follow()
        tensors = dict(AdapterWeights(trained.model))
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        trained.channel.publish(1, tensors)
        with pytest.raises((SchemaError, RuntimeError), match=r'changes tensor "model\.norm\.weight" beside its adapt'):
            trained.updater.follow()
        embedding = {"model.embed_tokens.lora_a": torch.ones(4, 64), "model.embed_tokens.lora_b": torch.ones(64, 4)}
        trained.channel.publish(2, dict(AdapterWeights(trained.model)) | embedding)
        with pytest.raises((SchemaError, RuntimeError), match=r'vLLM has no LoRA for layer "model\.embed_tokens"'):
            trained.updater.follow()
        old = Running(engine)
        old.begin(5)
        with pytest.raises(UsageError, match="weights of another channel, or the first with adapters or without"):
            engine.update_weights(ModuleWeights(model(0)), 9)
        for completion in old.end():
            trained.check(completion, 0)


def test_a_version_without_adapters_is_drawn_with_alone(engine: VllmGenerator) -> None:
    with tq.connect() as queue:
        trained = Trained(engine, queue)
        trained.step()
        engine.update_weights(ModuleWeights(model(0)), 7)
        (first, _) = drawn(engine)
        assert first.spans == ((7, 12),)
        tokens = torch.from_numpy(np.concatenate([PROMPT.ids, first.ids])).long()[None]
        with torch.no_grad():
            scores = model(0)(input_ids=tokens).logits[0, len(PROMPT.ids) - 1 : -1].log_softmax(-1)
        truth = scores.gather(-1, torch.from_numpy(first.ids).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(first.logprobs, truth, atol=1e-3)
        trained.step()
        for completion in drawn(engine):
            np.testing.assert_allclose(completion.logprobs, trained.truth(1, completion.ids), atol=1e-3)


def test_a_version_takes_a_free_slot_or_that_of_the_oldest() -> None:
    slots = LoraSlots(2)
    taken = []
    for version, used in enumerate([set[int](), {1}, {1, 2}, {1, 2}, {1}]):
        slot = slots.choose(used)
        slots.fill(slot, version)
        taken.append(slot)
        assert (slots.request().lora_int_id, slots.request().lora_name) == (slot, f"version {version}")
    assert taken == [1, 2, 1, 2, 2]
