"""The transformers engine: what a row draws depends on its seed and weights; rows join and leave a running batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from transferqueue.adapters.builtin.model import BuiltinModel, ModelShape
from transferqueue.adapters.engines.running_batch import Row, RunningBatch
from transferqueue.adapters.engines.sampling import RowDraws, draw_by
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import ABORT, Caches, Completion, Pause, Prompt, Sampling
from transferqueue.adapters.weights import ModuleWeights
from transferqueue.errors import Disconnected, UsageError

SAMPLING = Sampling(tokens_max=20, stop_ids=(1, 2))
DRAWS = np.random.default_rng(5)
PROMPTS = [DRAWS.integers(5, 64, size=length).astype(np.int32) for length in (3, 9, 5, 12)]


def model(kind: str = "qwen3", **changes: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.25}
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **ids, **changes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return model()


def seeded(which: Sequence[int]) -> list[Prompt]:
    return [Prompt(ids=PROMPTS[at], seed=100 + at) for at in which]


def drawn(engine: TransformersGenerator, prompts: Sequence[Prompt], sampling: Sampling = SAMPLING) -> list[Completion]:
    return sorted(engine.generate(prompts, sampling, timeout_s=60), key=lambda each: (each.prompt, each.sample))


@torch.no_grad()
def check_logprobs(subject: Any, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
    for completion in completions:
        context = prompts[completion.prompt].ids
        tokens_1T = torch.from_numpy(np.concatenate([context, completion.ids])).long()[None]
        logprobs_TV = subject(input_ids=tokens_1T).logits[0, len(context) - 1 : -1].log_softmax(-1)
        truth = logprobs_TV.gather(-1, torch.from_numpy(completion.ids).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs, truth, atol=1e-4)


def test_a_request_of_its_own_is_bit_equal_beside_any_other(qwen3: Any) -> None:
    alone = drawn(TransformersGenerator(qwen3, shared_batch=False), seeded([0, 1]))
    engine = TransformersGenerator(qwen3, shared_batch=False)
    others = [Thread(target=drawn, args=(engine, seeded([2, 3]))) for _ in range(3)]
    for other in others:
        other.start()
    beside = drawn(engine, seeded([0, 1]))
    for other in others:
        other.join(60)
    for first, second in zip(alone, beside, strict=True):
        assert first.ids.tolist() == second.ids.tolist()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()


def test_a_prompt_with_a_seed_draws_the_same_in_any_company(qwen3: Any) -> None:
    engine = TransformersGenerator(qwen3)
    together = drawn(engine, seeded([3, 1, 0]))
    alone = [drawn(engine, seeded([at]))[0] for at in (3, 1, 0)]
    assert [each.ids.tolist() for each in together] == [each.ids.tolist() for each in alone]


def test_samples_of_a_seeded_prompt_differ(qwen3: Any) -> None:
    found = drawn(TransformersGenerator(qwen3), [Prompt(ids=PROMPTS[1], samples=4, seed=7)])
    assert len({tuple(each.ids.tolist()) for each in found}) > 1


def test_a_continued_completion_draws_what_it_would_have_drawn_at_once(qwen3: Any) -> None:
    engine = TransformersGenerator(qwen3)
    (whole,) = drawn(engine, seeded([2]), Sampling(tokens_max=12))
    (begun,) = drawn(engine, seeded([2]), Sampling(tokens_max=5))
    cut = Completion(**{**vars(begun), "finish_reason": ABORT})
    (ended,) = drawn(engine, [Prompt(ids=PROMPTS[2], seed=102, begun=cut)], Sampling(tokens_max=12))
    assert ended.ids.tolist() == whole.ids.tolist()


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3", {}), ("mistral", {"sliding_window": 6}), ("gpt2", {"n_positions": 64})]
)
def test_rows_that_come_while_others_run_have_the_models_logprobs(kind: str, changes: dict[str, Any]) -> None:
    subject = model(kind, **changes)
    batch, owner = RunningBatch(subject, rows_max=6), object()
    prompts, sampling = seeded([0, 1, 2, 3]), Sampling(tokens_max=14, stop_ids=(1, 2))
    completions: list[Completion] = []
    for start in (0, 1, 2, 3):
        batch.add([Row(owner, start, sample, prompts[start], sampling) for sample in range(3)])
        for _ in range(3):
            completions += [completion for _, completion in batch.step(0)]
            assert len(batch._running()) <= 6
    while len(batch):
        completions += [completion for _, completion in batch.step(0)]
    assert sorted((each.prompt, each.sample) for each in completions) == [(p, s) for p in range(4) for s in range(3)]
    check_logprobs(subject, prompts, completions)


def test_a_row_ends_for_its_own_sampling_in_a_shared_batch(qwen3: Any) -> None:
    batch, rows = RunningBatch(qwen3, rows_max=8), []
    for at, sampling in enumerate([Sampling(tokens_max=3, temperature=0), Sampling(tokens_max=9, top_p=0.9)]):
        rows.append(Row(None, at, 0, seeded([at])[0], sampling))
    batch.add(rows)
    lengths = {}
    while len(batch):
        lengths |= {completion.prompt: len(completion.ids) for _, completion in batch.step(0)}
    assert lengths == {0: 3, 1: 9}


def test_a_row_that_has_finished_needs_no_position_beyond_the_last() -> None:
    """Turns of episodes have contexts of all lengths, up to as many tokens as the model has positions."""
    batch = RunningBatch(BuiltinModel(ModelShape(max_position_embeddings=32)), rows_max=8)
    for length, tokens_max in ((30, 2), (8, 24), (8, 24)):
        prompt = Prompt(ids=np.arange(5, 5 + length, dtype=np.int32))
        batch.add([Row(None, 0, 0, prompt, Sampling(tokens_max=tokens_max, seed=1))])
    finished: list[tuple[Row, Completion]] = []
    while len(batch):
        finished += batch.step(0)
    assert [len(completion.ids) for _, completion in finished] == [2, 24, 24]


def test_a_closed_generator_ends_its_requests(qwen3: Any) -> None:
    engine = TransformersGenerator(qwen3)
    closer = Thread(target=engine.close)
    with closing(
        engine.generate(seeded([0, 1]), Sampling(tokens_max=30_000, stop_ids=(1,)), timeout_s=60)
    ) as completions:
        next(completions)
        closer.start()
        with pytest.raises(Disconnected, match="the generator was closed"):
            for _ in completions:
                pass
    closer.join(60)


def test_an_error_of_the_model_reaches_every_request(qwen3: Any) -> None:
    engine = TransformersGenerator(qwen3)
    with pytest.raises(IndexError):
        drawn(engine, [Prompt(ids=np.array([5, 10_000], np.int32))])
    assert len(drawn(engine, seeded([0]))) == 1


def test_no_rows_at_once_are_refused(qwen3: Any) -> None:
    with pytest.raises(UsageError, match="rows_max=0: at least one"):
        TransformersGenerator(qwen3, rows_max=0)


def test_numbers_of_a_row_do_not_depend_on_where_it_began() -> None:
    whole = RowDraws(9)
    numbers = [whole.next() for _ in range(200)]
    for begun in (1, 64, 150):
        rest = RowDraws(9, drawn=begun)
        assert [rest.next() for _ in range(200 - begun)] == numbers[begun:]


def test_inversion_draws_each_token_as_often_as_its_probability_says() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).repeat(20_000, 1)
    numbers_B = (torch.arange(20_000) + 0.5).double() / 20_000
    tokens_B, logprobs_B = draw_by(logits_BV, Sampling(tokens_max=1), numbers_B)
    shares = torch.bincount(tokens_B, minlength=4) / 20_000
    torch.testing.assert_close(shares, logits_BV[0].softmax(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs_B, logits_BV[0].log_softmax(-1)[tokens_B])


@torch.no_grad()
def test_a_kept_cache_is_that_of_the_weights_that_read_each_token() -> None:
    """A row that goes on under other weights, against the model called token by token with a cache of its own."""
    subject, other = model(), model()
    for parameter in other.parameters():
        parameter.data.mul_(1.25)
    before, after = (copy_of(each.state_dict()) for each in (subject, other))
    batch = RunningBatch(subject, rows_max=4, kv=lambda: Caches.KEEP)
    row = Row(object(), 0, 0, seeded([1])[0], Sampling(tokens_max=9))
    batch.add([row])
    for _ in range(4):
        batch.step(0)
    assert batch.cached_tokens() == len(PROMPTS[1]) + 3
    subject.load_state_dict(after)
    while len(batch):
        batch.step(1)
    assert row.spans == [(0, 4), (1, 5)]

    subject.load_state_dict(before)
    ids, cache, wanted = [*PROMPTS[1].tolist(), *row.ids], None, []
    for at in range(len(PROMPTS[1]) - 1, len(ids) - 1):
        if at == len(PROMPTS[1]) + 3:
            subject.load_state_dict(after)
        new = torch.tensor([ids[: at + 1] if cache is None else ids[at : at + 1]])
        output = subject(input_ids=new, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        wanted.append(float(output.logits[0, -1].log_softmax(-1)[ids[at + 1]]))
    np.testing.assert_allclose(row.logprobs, wanted, atol=1e-4)


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_tokens_that_are_read_again_are_counted_once(qwen3: Any) -> None:
    """Of two updates between two tokens, rows are read again once."""
    engine = TransformersGenerator(qwen3, version=0)
    with closing(engine.generate(seeded([0, 1]), Sampling(tokens_max=40), timeout_s=60)) as completions:
        drawing = Thread(target=list, args=(completions,))
        drawing.start()
        engine.pause(Pause.KEEP)
        while not (cached := sum(batch.cached_tokens() for batch in engine._batches())):
            engine.resume()
            engine.pause(Pause.KEEP)
        weights = ModuleWeights(qwen3)
        engine.update_weights(weights, 1)
        engine.update_weights(weights, 2)
        assert engine.prefilled_again == cached
        engine.resume()
        drawing.join(60)
    engine.kv = Caches.KEEP
    engine.update_weights(weights, 3)
    assert engine.prefilled_again == cached
