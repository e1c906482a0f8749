"""The learner of a job: a step's gradient does not depend on how its rows came, and its figures are means over the
step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from transferqueue.adapters.scoring import response_scores
from transferqueue.errors import UsageError
from transferqueue.workflows.job.algorithms.losses import policy_loss
from transferqueue.workflows.job.algorithms.responses import Responses
from transferqueue.workflows.job.settings.defaults import filled
from transferqueue.workflows.job.settings.job import AlgorithmSettings, TokenStalenessSettings, TrainerSettings
from transferqueue.workflows.job.training.columns import loss_columns, select
from transferqueue.workflows.job.training.learner import (
    PolicyLearner,
    StepLearner,
    ValueLearner,
    in_minibatches,
    rate_share,
)

ROWS = 14


def model(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(dtype).eval()


def rows(count: int = ROWS, seed: int = 0) -> dict[str, list[Any]]:
    """Rows of every column that a policy's loss reads."""
    draws = np.random.default_rng(seed)
    sizes = draws.integers(1, 9, count)
    return {
        "prompt_ids": [draws.integers(0, 48, draws.integers(2, 5)).astype(np.int32) for _ in range(count)],
        "response_ids": [draws.integers(0, 48, size).astype(np.int32) for size in sizes],
        "rollout_logprobs": [draws.normal(-4, 0.3, size).astype(np.float32) for size in sizes],
        "ref_logprobs": [draws.normal(-4, 0.3, size).astype(np.float32) for size in sizes],
        "advantages": draws.normal(size=count).astype(np.float32).tolist(),
        "token_advantages": [draws.normal(size=size).astype(np.float32) for size in sizes],
        "teacher_ids": [draws.integers(0, 48, (size, 3)).astype(np.int32) for size in sizes],
        "teacher_logprobs": [np.log(np.full((size, 3), 0.3, np.float32)) for size in sizes],
        "finish_reason": ["length" if at % 5 == 0 else "stop" for at in range(count)],
    }


COLUMNS = {
    "grpo": ("rollout_logprobs", "advantages"),
    "dr_grpo": ("rollout_logprobs", "advantages"),
    "dapo": ("rollout_logprobs", "advantages", "ref_logprobs", "finish_reason"),
    "gspo": ("rollout_logprobs", "advantages"),
    "ppo": ("rollout_logprobs", "token_advantages"),
    "distill": ("rollout_logprobs", "teacher_ids", "teacher_logprobs"),
    "sft": (),
}
ALGORITHMS = {
    kind: AlgorithmSettings(
        kind=kind,  # type: ignore[arg-type]
        kl=0.1 if kind == "dapo" else 0.0,
        mask_truncated=kind == "dapo",
        top_k=3 if kind == "distill" else 0,
    )
    for kind in COLUMNS
}


def columns(kind: str) -> dict[str, list[Any]]:
    every = rows()
    return {name: every[name] for name in ("prompt_ids", "response_ids", *COLUMNS[kind])}


def learner(kind: str, given: Any = None, **trainer: Any) -> PolicyLearner:
    settings = TrainerSettings(**{"lr": 1e-2, "micro_tokens": 10_000, "gradient_norm_max": 1.0, **trainer})
    return PolicyLearner(
        model() if given is None else given, ALGORITHMS[kind], settings, steps=10, tokens_max=8, rows_near=ROWS
    )


def gradient(learner: StepLearner) -> torch.Tensor:
    return torch.cat([(parameter.grad * 1.0).flatten() for parameter in learner.trained])


def stepped(kind: str, cuts: int, **trainer: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean gradient of a step on all rows, given in as many calls; and its figures."""
    one = learner(kind, **trainer)
    given = columns(kind)
    for part in np.array_split(np.arange(ROWS), cuts):
        one.accumulate(select(given, part.tolist()))
    mean = gradient(one) * one._scale / one._sums["weight"]
    return mean, one.step()


# ---------------------------------------------------------------- bad input


def test_a_step_of_nothing_is_refused() -> None:
    one = learner("grpo")
    with pytest.raises(UsageError, match="a step was taken with no rows"):
        one.step()
    one.accumulate({name: [] for name in columns("grpo")})
    with pytest.raises(UsageError, match="with no rows"):
        one.step()


def test_a_column_of_other_length_than_the_response_is_named() -> None:
    given = columns("grpo")
    given["rollout_logprobs"][3] = given["rollout_logprobs"][3][:-1]
    with pytest.raises(UsageError, match=r"rollout_logprobs of row 3 has \d values, its response \d tokens"):
        learner("grpo").accumulate(given)


def test_columns_with_different_rows_are_refused() -> None:
    given = columns("grpo")
    given["advantages"].pop()
    with pytest.raises(UsageError, match=r"columns have .*'advantages': 13.* rows; give each one value a row"):
        learner("grpo").accumulate(given)


# ---------------------------------------------------------------- one gradient, however rows come


@pytest.mark.parametrize("kind", ["grpo", "gspo", "distill"])
def test_a_step_on_groups_computes_each_prompt_once_and_is_that_on_their_rows_apart(kind: str) -> None:
    given = columns(kind)
    prompts = given["prompt_ids"][:2]
    given["prompt_ids"] = [prompts[row % 2] for row in range(ROWS)]
    once = sum(map(len, [*prompts, *given["response_ids"]]))
    groups, apart = learner(kind, micro_tokens=once), learner(kind)
    groups.accumulate(given)
    for row in range(ROWS):
        apart.accumulate(select(given, [row]))
    torch.testing.assert_close(gradient(groups), gradient(apart), rtol=1e-4, atol=1e-7)
    assert groups.step()["passes"] == 1


@pytest.mark.parametrize("kind", list(COLUMNS))
def test_a_step_is_the_same_in_1_2_and_7_calls_and_passes(kind: str) -> None:
    whole, figures = stepped(kind, 1)
    for cuts, tokens in ((2, 10_000), (7, 10_000), (1, 12)):
        mean, again = stepped(kind, cuts, micro_tokens=tokens)
        torch.testing.assert_close(mean, whole, rtol=1e-4, atol=1e-7)
        assert again["passes"] >= cuts
        for name in figures.keys() - {"passes"}:
            assert again[name] == pytest.approx(figures[name], rel=2e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo"])
def test_the_gradient_is_that_of_the_mean_loss_of_the_whole_step(kind: str) -> None:
    one = learner(kind, micro_tokens=16)
    given = columns(kind)
    one.accumulate(given)
    scale, weight = one._scale, one._sums["weight"]
    accumulated = gradient(one) * scale / weight
    plain = learner(kind, one.model)
    plain.discard()
    loss = plain.loss(given)
    (loss.total / loss.weight).backward()
    assert weight == loss.weight
    torch.testing.assert_close(accumulated, gradient(plain), rtol=1e-4, atol=1e-7)


def test_the_loss_is_the_algorithms_loss_of_the_models_logprobs() -> None:
    one, given = learner("dapo"), columns("dapo")
    with torch.no_grad():
        loss = one.loss(given)
        logits = [
            one.model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
            for prompt, response in zip(given["prompt_ids"], given["response_ids"], strict=True)
        ]
    logprobs_N = torch.cat(
        [
            table[len(prompt) - 1 : -1].gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0]
            for table, prompt, response in zip(logits, given["prompt_ids"], given["response_ids"], strict=True)
        ]
    )
    tensors = loss_columns(given, one.algorithm, torch.device("cpu"))
    wanted = policy_loss(Responses(logprobs_N=logprobs_N, **tensors), one.algorithm, tokens_max=8)  # type: ignore[arg-type]
    assert float(loss.total) == pytest.approx(float(wanted.total), rel=1e-4)
    truncated = sum(len(given["response_ids"][row]) for row in range(0, ROWS, 5))
    assert loss.weight == sum(map(len, given["response_ids"])) - truncated


def test_gradients_of_16_bit_weights_are_added_in_float32() -> None:
    """128 equal micro-batches: added in bfloat16, a sum stops growing when an addend is below half of its last
    digit."""
    given = select(columns("sft"), [0])
    sums = []
    for passes in (1, 128):
        one = learner("sft", model(torch.bfloat16))
        for _ in range(passes):
            one.accumulate(given)
        sums.append(torch.cat([wide.flatten() for wide in one._wide if wide is not None]))
    torch.testing.assert_close(sums[1], 128 * sums[0])


def test_discarded_rows_leave_no_trace() -> None:
    one, other = learner("grpo"), learner("grpo")
    one.accumulate(select(columns("grpo"), [0, 1]))
    one.discard()
    for each in (one, other):
        each.accumulate(columns("grpo"))
    assert one.step() == other.step()


# ---------------------------------------------------------------- schedule, updates


def test_the_rate_rises_over_the_warmup_and_falls_as_scheduled() -> None:
    assert [rate_share(step, steps=4) for step in range(4)] == [1.0] * 4
    assert rate_share(3, steps=6, warmup=2, schedule="cosine") == pytest.approx(0.853, abs=1e-3)
    one = learner("sft", warmup=4)
    rates = []
    for _ in range(3):
        one.accumulate(columns("sft"))
        rates.append(one.step()["lr"])
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3])


def test_a_step_of_several_updates_has_one_rate() -> None:
    one = learner("sft", warmup=4)
    rates = []
    for counts in (False, True):
        one.accumulate(columns("sft"))
        rates.append(one.step(counts=counts)["lr"])
    assert rates == [2.5e-3, 2.5e-3]
    assert one.steps_taken == 1


def test_minibatches_have_each_row_once() -> None:
    cut = in_minibatches(10, 4, torch.Generator().manual_seed(1))
    assert sorted(row for part in cut for row in part) == list(range(10))
    assert sorted(map(len, cut)) == [2, 2, 3, 3]
    assert in_minibatches(2, 4, torch.Generator()) != []


# ---------------------------------------------------------------- the critic


def critic(**trainer: Any) -> ValueLearner:
    from transformers import Qwen3Config, Qwen3ForTokenClassification

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_labels=1, classifier_dropout=0.0,
    )  # fmt: skip
    settings = TrainerSettings(**{"micro_tokens": 10_000, **trainer})
    return ValueLearner(
        Qwen3ForTokenClassification(config).eval(),
        AlgorithmSettings(kind="ppo"),
        settings,
        steps=9,
        lr=1e-2,
        tokens_near=70,
    )


def valued() -> dict[str, list[Any]]:
    given, draws = rows(), np.random.default_rng(3)
    return {
        "prompt_ids": given["prompt_ids"],
        "response_ids": given["response_ids"],
        "values": [draws.normal(size=len(ids)).astype(np.float32) for ids in given["response_ids"]],
        "returns": [np.full(len(ids), 2.0, np.float32) for ids in given["response_ids"]],
    }


def test_a_critic_learns_the_returns_however_rows_come() -> None:
    whole, cut = critic(), critic(micro_tokens=16)
    for each, parts in ((whole, 1), (cut, 5)):
        for part in np.array_split(np.arange(ROWS), parts):
            each.accumulate(select(valued(), part.tolist()))
    torch.testing.assert_close(gradient(cut) * cut._scale, gradient(whole) * whole._scale, rtol=1e-4, atol=1e-5)
    losses = [whole.step()["loss"]]
    for _ in range(6):
        whole.accumulate(valued())
        losses.append(whole.step()["loss"])
    assert losses[-1] < losses[0]


def test_an_entropy_bonus_is_over_the_whole_distribution() -> None:
    """Without advantages the bonus alone is learned: the entropy rises, and the figure is exact."""
    given = columns("grpo") | {"advantages": [0.0] * ROWS}
    algorithm = AlgorithmSettings(kind="grpo", entropy=1.0)
    settings = TrainerSettings(lr=1e-2, micro_tokens=10_000)
    one = PolicyLearner(model(), algorithm, settings, steps=10, rows_near=ROWS)
    entropies = []
    for _ in range(3):
        one.accumulate(given)
        entropies.append(one.step()["entropy"])
    scores = response_scores(model(), given["prompt_ids"], given["response_ids"], entropy=True)
    assert scores.entropy_N is not None
    assert entropies[0] == pytest.approx(scores.entropy_N.mean().item(), rel=1e-4)
    assert entropies[0] < entropies[1] < entropies[2]


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("own_rows", [ROWS, 2, 0])
def test_the_engine_error_is_over_the_tokens_of_the_trainers_own_version(own_rows: int) -> None:
    one, given = learner("grpo"), columns("grpo")
    one.version = 3
    with torch.no_grad():
        logprobs_N = response_scores(one.model, given["prompt_ids"], given["response_ids"]).logprobs_N.numpy()
    sizes = [len(response) for response in given["response_ids"]]
    older_then_own = [np.repeat([2, 3], [size - (row < own_rows), row < own_rows]) for row, size in enumerate(sizes)]
    given["token_versions"] = older_then_own
    given["rollout_logprobs"] = [
        part - np.where(versions == 3, 0.25, 1.0).astype(np.float32)
        for part, versions in zip(np.split(logprobs_N, np.cumsum(sizes)[:-1]), older_then_own, strict=True)
    ]
    one.accumulate(given)
    figures = one.step()
    assert (figures["own_tokens"], figures["tokens"]) == (own_rows, sum(sizes))
    assert figures.get("engine_error") == (pytest.approx(0.25, abs=1e-5) if own_rows else None)
    assert figures["policy_movement"] == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------- tokens of old weights


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo"])
def test_tokens_of_older_versions_are_left_out_of_the_loss_as_a_plain_loop_does(kind: str, updates: int) -> None:
    draws, given = np.random.default_rng(5), columns(kind)
    sizes = [len(response) for response in given["response_ids"]]
    given["token_versions"] = [np.sort(draws.integers(4, 9, size)) for size in sizes]
    given["token_versions"][0][0] = -1  # not known
    algorithm = replace(ALGORITHMS[kind], kl=0.0, mask_truncated=False, token_staleness=TokenStalenessSettings(mask=2))
    one = PolicyLearner(model(), algorithm, TrainerSettings(lr=1e-3), steps=10, tokens_max=8, rows_near=ROWS)
    one.version = 8
    for _ in range(updates):  # the version of the model is another one after the first, that of the step is not
        wanted, kept, stale = plain_loss(one.model, given, filled(algorithm), oldest=8 - 2)
        one.accumulate(given)
        figures = one.step(counts=False)
        assert figures["loss"] == pytest.approx(wanted, rel=1e-5, abs=1e-7)
        assert (figures["tokens"], figures["stale_tokens"]) == (kept, stale)
    assert 0 < stale < sum(sizes)


def plain_loss(model: Any, given: dict[str, list[Any]], algorithm: Any, oldest: int) -> tuple[float, int, int]:
    """The loss, token by token; the tokens that it is over, and those that it leaves out."""
    total = weight = 0.0
    kept = stale = 0
    for row, response in enumerate(given["response_ids"]):
        ids = torch.from_numpy(np.concatenate([given["prompt_ids"][row], response])).long()[None]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
        losses = []
        for at, token in enumerate(response):
            if 0 <= given["token_versions"][row][at] < oldest:
                stale += 1
                continue
            logprob = logprobs[len(given["prompt_ids"][row]) + at - 1, int(token)].item()
            ratio = math.exp(logprob - given["rollout_logprobs"][row][at])
            near = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
            losses.append(max(-ratio * given["advantages"][row], -near * given["advantages"][row]))
        kept += len(losses)
        if algorithm.aggregate == "tokens":
            total, weight = total + sum(losses), weight + len(losses)
        elif algorithm.aggregate == "rows":
            total, weight = total + (sum(losses) / len(losses) if losses else 0.0), weight + bool(losses)
        else:
            total, weight = total + sum(losses), weight + 8 * bool(losses)
    return total / weight, kept, stale


def test_a_step_whose_tokens_are_all_too_old_leaves_the_weights() -> None:
    algorithm = replace(ALGORITHMS["grpo"], token_staleness=TokenStalenessSettings(mask=1))
    one, given = PolicyLearner(model(), algorithm, TrainerSettings(lr=1e-3), steps=10), columns("grpo")
    tokens = sum(len(response) for response in given["response_ids"])

    def step(version: int) -> tuple[dict[str, float], bool]:
        """Its figures, and whether the weights changed."""
        given["token_versions"] = [np.full(len(response), version, np.int32) for response in given["response_ids"]]
        before, one.version = [parameter.detach().clone() for parameter in one.trained], 2
        one.accumulate(given)
        figures = one.step()
        return figures, any(not torch.equal(*pair) for pair in zip(before, one.trained, strict=True))

    figures, changed = step(0)
    assert (figures["stale_tokens"], figures["tokens"], changed, one.steps_taken) == (tokens, 0, False, 1)
    assert not {"loss", "gradient_norm"} & figures.keys()
    figures, changed = step(1)
    assert (figures["stale_tokens"], figures["tokens"], changed, one.steps_taken) == (0, tokens, True, 2)
    with pytest.raises(UsageError, match="no rows"):
        one.step()
