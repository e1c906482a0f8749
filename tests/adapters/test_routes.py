"""Router replay: the trainer chooses the experts that the engine chose, and its gates have a gradient."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Completion, Prompt, Sampling, Unsupported
from transferqueue.adapters.scoring import plan_for, response_scores
from transferqueue.adapters.weights import ModuleWeights
from transferqueue.errors import UsageError
from transferqueue.workflows.job.settings.job import AlgorithmSettings, TrainerSettings
from transferqueue.workflows.job.training.learner import PolicyLearner

transformers = pytest.importorskip("transformers")
LAYERS, EXPERTS, CHOSEN = 3, 8, 2
PROMPTS = ([5, 6, 7, 9], [3, 4], [3, 4], [8, 1, 2, 30, 31, 32, 33])


def mixture(**changes: Any) -> Any:
    """A tiny Qwen3-MoE whose routers are almost undecided."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, initializer_range=0.2, **changes,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def drawn(model: Any, **options: Any) -> list[Completion]:
    generator = TransformersGenerator(copy.deepcopy(model), routes=True, version=0, **options)
    try:
        prompts = [Prompt.of(ids) for ids in PROMPTS]
        return sorted(
            generator.generate(prompts, Sampling(tokens_max=24, temperature=1.0, seed=1)), key=lambda each: each.prompt
        )
    finally:
        generator.close()


def columns(completions: list[Completion]) -> dict[str, list[Any]]:
    return {
        "prompt_ids": [np.array(ids, np.int32) for ids in PROMPTS],
        "response_ids": [each.ids for each in completions],
        "rollout_logprobs": [each.logprobs for each in completions],
        "token_versions": [each.versions for each in completions],
        "routes": [each.routes for each in completions],
        "advantages": [1.0, -0.5, 2.0, -1.0],
    }


def logprobs(model: Any, rows: dict[str, list[Any]], routes: Any) -> Tensor:
    return response_scores(model, rows["prompt_ids"], rows["response_ids"], routes=routes).logprobs_N


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_gives_the_experts_of_each_token_that_it_read(shared: bool) -> None:
    model = mixture()
    plan_for(model)
    for prompt, completion in zip(PROMPTS, drawn(model, shared_batch=shared), strict=True):
        ids = torch.tensor([[*prompt, *completion.ids.tolist()]])
        logits = model(ids, output_router_logits=True).router_logits
        wanted = torch.stack([each.topk(CHOSEN, dim=-1).indices for each in logits], dim=1)[:-1]
        assert completion.routes is not None
        assert completion.routes.dtype == np.int16
        np.testing.assert_array_equal(np.sort(completion.routes), np.sort(wanted.numpy()))


def test_routes_are_those_of_the_weights_that_tokens_were_read_with_last() -> None:
    model = mixture()
    generator = TransformersGenerator(copy.deepcopy(model), routes=True, rows_max=1)
    begun = next(generator.generate([Prompt.of(PROMPTS[0])], Sampling(tokens_max=5, seed=1)))
    torch.manual_seed(5)
    other = mixture()
    for parameter in other.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    generator.update_weights(ModuleWeights(other), 1)
    prompt = Prompt(ids=np.array(PROMPTS[0], np.int32), begun=begun)
    whole = next(generator.generate([prompt], Sampling(tokens_max=9, seed=1)))
    generator.close()
    logits = other(torch.tensor([[*PROMPTS[0], *whole.ids.tolist()]]), output_router_logits=True).router_logits
    wanted = torch.stack([each.topk(CHOSEN, dim=-1).indices for each in logits], dim=1)[:-1]
    np.testing.assert_array_equal(np.sort(whole.routes), np.sort(wanted.numpy()))


def test_replay_brings_the_trainer_nearer_to_an_engine_in_bfloat16() -> None:
    """The engine computes in bfloat16 with the very weights of the trainer."""
    engine = mixture().to(torch.bfloat16)
    rows = columns(drawn(engine))
    model = copy.deepcopy(engine).float()
    plan_for(model)
    own, replayed = (logprobs(model, rows, routes).detach() for routes in (None, rows["routes"]))
    engine_N = torch.from_numpy(np.concatenate(rows["rollout_logprobs"]))
    without, with_routes = float((own - engine_N).abs().mean()), float((replayed - engine_N).abs().mean())
    assert with_routes < without / 2, (with_routes, without)


class PlainBlock(torch.nn.Module):
    """A mixture's feed-forward block in plain torch, with given experts: token after token, expert after expert."""

    def __init__(self, block: Any, routes_TK: Any) -> None:
        super().__init__()
        self.block, self.routes = block, routes_TK

    def forward(self, hidden_1TH: Tensor) -> Tensor:
        experts, gate = self.block.experts, self.block.gate
        outputs = []
        for at, token_H in enumerate(hidden_1TH[0]):
            chance_E = torch.softmax(gate.weight @ token_H, dim=0)
            if at < len(self.routes):
                chosen = self.routes[at].tolist()
            else:
                chosen = chance_E.topk(CHOSEN).indices.tolist()
            total = sum(chance_E[expert] for expert in chosen)
            output_H = torch.zeros_like(token_H)
            for expert in chosen:
                first, second = (experts.gate_up_proj[expert] @ token_H).chunk(2)
                output_H = output_H + (experts.down_proj[expert] @ (torch.nn.functional.silu(first) * second)) * (
                    chance_E[expert] / total
                )
            outputs.append(output_H)
        return torch.stack(outputs)[None]


def plain_logprobs(model: Any, rows: dict[str, list[Any]]) -> Tensor:
    """Log-probs row by row, without packing, by `PlainBlock`."""
    found = []
    for prompt, response, routes in zip(rows["prompt_ids"], rows["response_ids"], rows["routes"], strict=True):
        blocks = [layer.mlp for layer in model.model.layers]
        for layer, block in enumerate(blocks):
            model.model.layers[layer].mlp = PlainBlock(block, routes[:, layer])
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logprobs_TV = model(ids[None]).logits[0].log_softmax(-1)
        for layer, block in enumerate(blocks):
            model.model.layers[layer].mlp = block
        found.append(logprobs_TV[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0])
    return torch.cat(found)


def test_loss_and_gradient_are_those_of_plain_torch_with_the_same_routes() -> None:
    """The routes are drawn at random, so that hardly one is the trainer's own choice."""
    rows = columns(drawn(mixture()))
    draws = np.random.default_rng(0)
    rows["routes"] = [
        np.argsort(draws.random((*each.shape[:2], EXPERTS)), axis=-1)[..., :CHOSEN].astype(np.int16)
        for each in rows["routes"]
    ]
    model, plain = mixture(), mixture()
    settings = AlgorithmSettings(kind="grpo", aggregate="tokens", router_replay=True)
    learner = PolicyLearner(model, settings, TrainerSettings(micro_tokens=512), steps=1)
    loss = learner.loss(rows)
    loss.total.backward()
    plan_for(plain)
    plain.set_attn_implementation("eager")
    plain_N = plain_logprobs(plain, rows)
    torch.testing.assert_close(logprobs(model, rows, rows["routes"]), plain_N, atol=1e-5, rtol=1e-5)
    plain_total = learner_loss(plain_N, rows)
    torch.testing.assert_close(loss.total, plain_total, atol=1e-4, rtol=1e-5)
    plain_total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            plain.get_parameter(name).grad,
            atol=1e-4,
            rtol=1e-3,
            msg=lambda text, n=name: f"{n}: {text}",
        )
    assert float(model.model.layers[0].mlp.gate.weight.grad.abs().max()) > 0


def learner_loss(logprobs_N: Tensor, rows: dict[str, list[Any]]) -> Tensor:
    """The clipped loss, summed over tokens."""
    counts = [len(response) for response in rows["response_ids"]]
    advantages_N = torch.from_numpy(np.repeat(np.array(rows["advantages"], np.float32), counts))
    ratio_N = (logprobs_N - torch.from_numpy(np.concatenate(rows["rollout_logprobs"]))).exp()
    clipped_N = ratio_N.clamp(0.8, 1.2)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N).sum()


def test_a_step_says_what_the_error_would_be_without_routes() -> None:
    engine = mixture().to(torch.bfloat16)
    rows = columns(drawn(engine))
    model = copy.deepcopy(engine).float()
    settings = AlgorithmSettings(kind="grpo", router_replay=True)
    learner = PolicyLearner(model, settings, TrainerSettings(micro_tokens=40), steps=1)
    learner.version = 0
    learner.accumulate(rows)
    figures = learner.step()
    assert figures["passes"] > 1
    assert 0 < figures["engine_error"] < figures["unreplayed_error"]
    assert "unreplayed_tokens" not in figures


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            (-1, LAYERS + 1, CHOSEN),
            r"the shape [T, 4, 2], and the trainer's model takes T tokens x 3 layers x 2 experts",
        ),
        (
            (-1, LAYERS, CHOSEN + 1),
            r"the shape [T, 3, 3], and the trainer's model takes T tokens x 3 layers x 2 experts",
        ),
        ((0, LAYERS, CHOSEN), r"the shape [S, 3, 2], and the trainer's model takes T tokens x 3 layers x 2 experts"),
    ],
)
def test_routes_of_another_shape_are_refused_with_both(shape: tuple[int, ...], words: str) -> None:
    rows = columns(drawn(mixture()))
    tokens = len(rows["routes"][1])
    rows["routes"][1] = np.zeros((tokens + 1 + shape[0], *shape[1:]), np.int16)
    model = mixture()
    plan_for(model)
    text = words.replace("T", str(tokens)).replace("S", str(tokens + 1))
    with pytest.raises(UsageError, match="routes of row 1 have " + re.escape(text)):
        logprobs(model, rows, rows["routes"])


def test_routes_to_an_expert_that_the_model_lacks_are_refused() -> None:
    rows = columns(drawn(mixture()))
    rows["routes"][0] = np.full_like(rows["routes"][0], EXPERTS)
    model = mixture()
    plan_for(model)
    with pytest.raises(UsageError, match="routes with expert 8; the trainer's model has experts 0 to 7"):
        logprobs(model, rows, rows["routes"])


def test_a_model_without_routers_has_nothing_to_replay() -> None:
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(Unsupported, match="LlamaForCausalLM has no router of experts"):
        TransformersGenerator(transformers.LlamaForCausalLM(config), routes=True)


def test_a_router_with_other_gates_is_refused() -> None:
    model = mixture()
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False
    drawn(model)  # gates that are not normalized are replayed so
    twice = mixture()
    for layer in twice.model.layers:
        layer.mlp.gate.register_forward_hook(lambda router, inputs, output: (output[0], output[1] * 2, output[2]))
    with pytest.raises(Unsupported, match="Qwen3MoeTopKRouter does not return its logits, the gates of their softmax"):
        TransformersGenerator(twice, routes=True)


def test_a_router_that_takes_more_than_the_tokens_is_refused() -> None:
    model = mixture()

    class NeedsBiasTopKRouter(torch.nn.Linear):
        def forward(self, tokens_NH: Tensor, bias_E: Tensor) -> Tensor:
            return super().forward(tokens_NH) + bias_E

    for layer in model.model.layers:
        layer.mlp.gate = NeedsBiasTopKRouter(32, EXPERTS)
    with pytest.raises(Unsupported, match="NeedsBiasTopKRouter does not return its logits"):
        TransformersGenerator(model, routes=True)
