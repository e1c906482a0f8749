"""The model, sampling, packed log-probs, the GRPO loss and the learner: what is computed, by an independent way."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from transferqueue.errors import UsageError
from transferqueue.workflows.grpo.learning.evaluate import evaluate
from transferqueue.workflows.grpo.learning.learner import (
    GrpoLearner,
    TrainBatch,
    learning_rate_share,
)
from transferqueue.workflows.grpo.learning.problems import problem_set
from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.learning.warmup import warm_up
from transferqueue.workflows.grpo.model.prompt_packing import pack, response_logprobs
from transferqueue.workflows.grpo.model.sampling import Response, SamplingRequest, generate
from transferqueue.workflows.grpo.model.tokenizer import EOS_ID, encode_prompt
from transferqueue.workflows.grpo.model.transformer import Cache, Transformer

SMALL = LearningSettings(width=32, heads=4, layers=2, hidden=48, context=32, warmup_steps=3, warmup_rows=8)
PROMPTS = [encode_prompt(text) for text in ("7", "1 + 2 + 3", "9 - 4", "12345678")]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> Transformer:
    made = Transformer(SMALL.model_shape())
    made.initialize(torch.Generator().manual_seed(1))
    with torch.no_grad():
        made.head.weight[EOS_ID] *= 3  # so that rows of one request end at different lengths
    return made


def sample(model: Transformer, *, seed: int = 0, temperature: float = 1.0, samples: int = 5) -> list[Response]:
    generator = torch.Generator().manual_seed(seed)
    return generate(model, PROMPTS, samples=samples, tokens_max=9, temperature=temperature, generator=generator)


def alone(model: Transformer, prompt: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], temperature: float) -> Tensor:
    """Log-probs of one response by one full forward pass: no cache, no padding, no packing."""
    tokens = torch.from_numpy(np.concatenate([prompt, ids])).long()
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(tokens[None, :-1])[0] / temperature, -1)
    return logprobs_TV.gather(1, tokens[1:, None]).squeeze(1)[len(prompt) - 1 :]


def assert_close(found: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=tolerance, rtol=0)


# ---------------------------------------------------------------- model


def test_a_cache_changes_nothing(model: Transformer) -> None:
    tokens_BT = torch.randint(4, 90, (3, 12), generator=torch.Generator().manual_seed(0))
    cache = Cache(model.shape, pads_B=torch.zeros(3, dtype=torch.int64), columns_max=12)
    with torch.no_grad():
        pieces = [model(piece, cache) for piece in tokens_BT.split([5, 1, 1, 3, 2], dim=1)]
        assert_close(torch.cat(pieces, 1), model(tokens_BT))


def test_a_token_sees_nothing_later(model: Transformer) -> None:
    tokens_BT = torch.randint(4, 90, (1, 8), generator=torch.Generator().manual_seed(0))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 5] += 1
    with torch.no_grad():
        before, after = model(tokens_BT)[0], model(changed_BT)[0]
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


def test_more_than_the_context_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="33 tokens exceed the context of 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match="a cache of 33 columns exceeds the context of 32"):
        Cache(model.shape, pads_B=torch.zeros(1, dtype=torch.int64), columns_max=33)
    long = np.ones(30, dtype=np.int32)
    with pytest.raises(ValueError, match="position 33 is beyond the context of 32"):
        response_logprobs(model, [long], [long[:5]], temperature=1.0)
    with pytest.raises(ValueError, match="width 30 is not a multiple of 2 x 4 heads"):
        replace(SMALL, width=30).model_shape()


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_a_full_forward_pass(model: Transformer, temperature: float) -> None:
    responses = sample(model, temperature=temperature)
    assert len({len(response.ids) for response in responses}) > 3
    for response in responses:
        assert_close(response.logprobs, alone(model, PROMPTS[response.prompt], response.ids, temperature))


def test_rows_end_at_eos_or_at_the_limit(model: Transformer) -> None:
    responses = sample(model, samples=20)
    assert [(r.prompt, r.sample) for r in responses] == [(p, s) for p in range(len(PROMPTS)) for s in range(20)]
    for response in responses:
        assert response.ids.dtype == np.int32
        assert response.logprobs.dtype == np.float32
        assert EOS_ID not in response.ids[:-1].tolist()
        ended = response.ids[-1] == EOS_ID
        assert response.finish_reason == ("eos" if ended else "length")
        assert ended or len(response.ids) == 9
    assert {response.finish_reason for response in responses} == {"eos", "length"}


def test_the_same_generator_gives_the_same_responses(model: Transformer) -> None:
    first, second, other = (sample(model, seed=seed) for seed in (3, 3, 4))
    assert [r.ids.tolist() for r in first] == [r.ids.tolist() for r in second]
    assert [r.logprobs.tolist() for r in first] == [r.logprobs.tolist() for r in second]
    assert [r.ids.tolist() for r in first] != [r.ids.tolist() for r in other]


def test_tokens_are_drawn_as_often_as_their_logprobs_say(model: Transformer) -> None:
    prompt = [PROMPTS[0]]
    responses = generate(
        model, prompt, samples=20_000, tokens_max=1, temperature=1.0, generator=torch.Generator().manual_seed(0)
    )
    drawn_V = np.bincount([response.ids[0] for response in responses], minlength=model.shape.vocabulary) / 20_000
    with torch.no_grad():
        expected_V = torch.softmax(model(torch.from_numpy(prompt[0]).long()[None])[0, -1], -1).numpy()
    assert np.abs(drawn_V - expected_V).max() < 5 * math.sqrt(expected_V.max() / 20_000)


def test_temperature_zero_takes_the_likeliest_token(model: Transformer) -> None:
    for response in sample(model, temperature=0.0, samples=1):
        tokens = np.concatenate([PROMPTS[response.prompt], response.ids])
        with torch.no_grad():
            likeliest = model(torch.from_numpy(tokens).long()[None, :-1])[0].argmax(-1)
        assert likeliest[len(PROMPTS[response.prompt]) - 1 :].tolist() == response.ids.tolist()
        assert not response.logprobs.any()


def test_a_generation_hands_out_each_row_once_as_it_ends(model: Transformer) -> None:
    generation = SamplingRequest(
        model, PROMPTS, samples=5, tokens_max=9, temperature=1.0, generator=torch.Generator().manual_seed(0)
    )
    handed: list[Response] = []
    for length in range(1, 10):
        handed += (ended := generation.step())
        assert {len(response.ids) for response in ended} <= {length}
    assert generation.done
    assert generation.step() == []
    assert len({(response.prompt, response.sample) for response in handed}) == len(handed) == 20


def test_requests_that_cannot_be_generated_are_refused(model: Transformer) -> None:
    draws = torch.Generator()
    with pytest.raises(ValueError, match="0 prompts"):
        SamplingRequest(model, [], samples=1, tokens_max=1, temperature=1.0, generator=draws)
    with pytest.raises(ValueError, match="none may be empty"):
        SamplingRequest(model, [PROMPTS[0][:0]], samples=1, tokens_max=1, temperature=1.0, generator=draws)
    with pytest.raises(ValueError, match="samples 0 and tokens_max 1 must be positive"):
        SamplingRequest(model, PROMPTS, samples=0, tokens_max=1, temperature=1.0, generator=draws)
    with pytest.raises(ValueError, match="exceeds the context of 32"):
        SamplingRequest(model, PROMPTS, samples=1, tokens_max=30, temperature=1.0, generator=draws)


# ---------------------------------------------------------------- packing


def test_packed_logprobs_are_those_of_each_row_alone(model: Transformer) -> None:
    responses = sample(model)
    order = np.random.default_rng(0).permutation(len(responses))  # rows of one prompt apart: fewer shared, same values
    for rows in ([*range(len(responses))], order.tolist()):
        chosen = [responses[row] for row in rows]
        prompts = [PROMPTS[response.prompt] for response in chosen]
        found = response_logprobs(model, prompts, [response.ids for response in chosen], temperature=0.8)
        for prompt, response, logprobs in zip(prompts, chosen, found, strict=True):
            assert logprobs.dtype == np.float32
            assert_close(logprobs, alone(model, prompt, response.ids, 0.8))


def test_neighbours_of_one_prompt_share_a_pack() -> None:
    responses = [np.arange(4, 4 + length) for length in (3, 1, 2)]
    packed = pack([PROMPTS[0], PROMPTS[0].copy(), PROMPTS[1]], responses)
    assert packed.tokens_PS.shape == (2, max(len(PROMPTS[0]) + 2, len(PROMPTS[1]) + 1))
    assert packed.mask_BT.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert packed.targets_BT[packed.mask_BT].tolist() == [4, 5, 6, 4, 4, 5]


def test_a_response_sees_its_prompt_and_itself_only() -> None:
    packed = pack([PROMPTS[0]] * 2, [np.array([4, 5, 6]), np.array([7, 8])])
    sight = packed.sight()[0].int().tolist()
    #        bos  7  mark  4  5  7     (6 and 8 come last: they are predicted, never read)
    assert sight == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert packed.positions_PS.tolist() == [[0, 1, 2, 3, 4, 3]]


def test_columns_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="1 prompts and 2 responses"):
        pack(PROMPTS[:1], PROMPTS[:2])
    with pytest.raises(ValueError, match="a prompt or response is empty"):
        pack(PROMPTS[:1], [PROMPTS[0][:0]])


# ---------------------------------------------------------------- learner


def learner(model: Transformer, **settings: float) -> GrpoLearner:
    return GrpoLearner(
        model,
        algorithm=replace(SMALL, **settings).algorithm(),
        temperature=1.0,
        learning_rate=1e-3,
        final_share=0.1,
        steps=10,
        gradient_norm_max=1.0,
    )


def batch_of(responses: list[Response], advantages: npt.ArrayLike) -> TrainBatch:
    return TrainBatch(
        prompt_ids=[PROMPTS[response.prompt] for response in responses],
        response_ids=[response.ids for response in responses],
        rollout_logprobs=[response.logprobs for response in responses],
        advantages=np.asarray(advantages, dtype=np.float32),
    )


def copy_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def test_a_step_makes_good_responses_likelier_and_bad_ones_less(model: Transformer) -> None:
    responses = sample(model, samples=2)
    advantages = np.tile([1.0, -1.0], len(PROMPTS))
    batch = batch_of(responses, advantages)
    metrics = learner(model).step(batch)
    after = response_logprobs(model, batch.prompt_ids, batch.response_ids, temperature=1.0)
    gained = np.array([new.mean() - old.logprobs.mean() for new, old in zip(after, responses, strict=True)])
    assert (gained * advantages).mean() > 0
    assert metrics["rollout_kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["clip_share"] == 0
    assert metrics["live_rows"] == 8
    assert metrics["tokens"] == sum(len(response.ids) for response in responses)


def test_rows_without_advantage_cost_nothing_and_change_nothing() -> None:
    def weights_after(rows: slice, advantages: list[float], **settings: float) -> dict[str, Tensor]:
        model = Transformer(SMALL.model_shape())
        model.initialize(torch.Generator().manual_seed(1))
        batch = batch_of(sample(model, samples=1)[rows], advantages)
        batch = replace(batch, ref_logprobs=batch.rollout_logprobs)
        trained = learner(model, **settings)
        trained.step(batch)
        return trained.weights()

    # A KL weight too small to matter forces the rows without advantage through the model.
    skipped = weights_after(slice(None), [1.0, 0.0, -1.0, 0.0])
    computed = weights_after(slice(None), [1.0, 0.0, -1.0, 0.0], kl_weight=1e-12)
    for name, weight in skipped.items():
        assert_close(weight, computed[name], 2e-5)


def test_the_loss_is_a_mean_over_all_rows(model: Transformer) -> None:
    """Rows that are not computed count: a gain of 1 for each token of one row in four."""
    metrics = learner(model).step(batch_of(sample(model, samples=1), [1.0, 0.0, 0.0, 0.0]))
    assert metrics["loss"] == pytest.approx(-1 / 4, abs=1e-4)


def test_a_kl_weight_without_a_reference_is_refused(model: Transformer) -> None:
    with pytest.raises(UsageError, match=r"no ref_logprobs_N, which kl=2\.0 reads"):
        learner(model, kl_weight=2.0).step(batch_of(sample(model, samples=1), np.ones(4)))


@pytest.mark.parametrize("bound", [0.5, math.inf, math.nan])
def test_a_weight_bound_that_bounds_nothing_is_refused(bound: float) -> None:
    with pytest.raises(UsageError, match="finite bound of at least 1"):
        LearningSettings(weight_max=bound)


@pytest.mark.parametrize(("low", "high"), [(0, 0.2), (1, 0.2), (0.2, 0), (0.2, math.inf), (math.nan, 0.2), (0.2, -1)])
def test_clip_bounds_that_bound_nothing_are_refused(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="give 0 < clip_low < 1"):
        LearningSettings(clip_low=low, clip_high=high)


def test_a_batch_without_any_advantage_takes_no_step(model: Transformer) -> None:
    before = copy_of(model.state_dict())
    metrics = learner(model).step(batch_of(sample(model, samples=1), np.zeros(4)))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert set(metrics.values()) == {0.0}


def test_tokens_outside_the_loss_mask_have_no_gradient(model: Transformer) -> None:
    responses = sample(model, samples=1)
    batch = batch_of(responses, np.ones(4))
    masked = replace(batch, loss_mask=[np.zeros(len(response.ids), dtype=np.bool_) for response in responses])
    before = copy_of(model.state_dict())
    assert set(learner(model).step(masked).values()) == {0.0, 4.0}  # 4 live rows, and nothing to learn from them
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_the_same_batch_gives_the_same_weights() -> None:
    def trained() -> dict[str, Tensor]:
        model = Transformer(SMALL.model_shape())
        model.initialize(torch.Generator().manual_seed(1))
        taught = learner(model)
        for _ in range(2):
            taught.step(batch_of(sample(model, samples=2), np.tile([1.0, -1.0], 4)))
        return taught.weights()

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_weights_move_between_models_by_name(model: Transformer) -> None:
    other = Transformer(SMALL.model_shape())
    weights = learner(model).weights()
    learner(other).load(weights)
    assert all(torch.equal(other.state_dict()[name], weight) for name, weight in weights.items())
    assert all(weight.dtype == torch.float32 and not weight.requires_grad for weight in weights.values())
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.weight"):
        learner(other).load({name: weight for name, weight in weights.items() if name != "head.weight"})


def test_a_batch_whose_columns_differ_is_refused(model: Transformer) -> None:
    batch = batch_of(sample(model, samples=1), np.ones(4))
    with pytest.raises(ValueError, match="prompt_ids has 3 rows, advantages 4"):
        replace(batch, prompt_ids=batch.prompt_ids[:3])
    with pytest.raises(ValueError, match=r"rollout_logprobs\[0\] has 0 tokens, its response"):
        replace(batch, rollout_logprobs=[row[:0] for row in batch.rollout_logprobs])


def test_the_learning_rate_rises_then_falls() -> None:
    shares = [learning_rate_share(step, steps=100, final_share=0.1) for step in range(120)]
    assert shares[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert shares[5:101] == sorted(shares[5:101], reverse=True)
    assert shares[100:] == pytest.approx([0.1] * 20)


# ---------------------------------------------------------------- warm-up and evaluation


def test_a_warm_up_is_a_function_of_its_settings() -> None:
    first, second, other = (warm_up(settings) for settings in (SMALL, SMALL, replace(SMALL, seed=1)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_an_evaluation_is_a_function_of_its_seed(model: Transformer) -> None:
    problems = problem_set("chain_sum")
    first, second = (
        evaluate(model, problems, tokens_max=4, samples=2, seed=5, problems=problems.heldout()[:32]) for _ in range(2)
    )
    assert first == second
    assert 0 <= first.reward <= 1
    assert first.accuracy == 0


@pytest.mark.slow
def test_a_short_warm_up_teaches_something() -> None:
    settings = LearningSettings(dataset="spell_backward", warmup_steps=60, warmup_learning_rate=3e-3)
    model = Transformer(settings.model_shape())
    problems = problem_set(settings.dataset)
    model.initialize(torch.Generator().manual_seed(0))
    before = evaluate(model, problems, tokens_max=8, samples=1, seed=0)
    model.load_state_dict(warm_up(settings))
    after = evaluate(model, problems, tokens_max=8, samples=1, seed=0)
    assert before.reward < 0.05
    assert after.reward > 0.2
