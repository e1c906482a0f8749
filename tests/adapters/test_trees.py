"""Rows that continue rows: any tree gives the numbers and the gradient of its rows apart, and computes each shared
token once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.adapters.test_scoring import MODELS, VOCABULARY, gradients, qwen3  # noqa: E402
from tests.scale import examples  # noqa: E402
from transferqueue.adapters.builtin.model import BuiltinModel, ModelShape  # noqa: E402
from transferqueue.adapters.scoring import RowTree, logprobs, micro_batches, plan_for, response_scores  # noqa: E402
from transferqueue.adapters.scoring.batching import PATHS_MAX, micro_batches_of_ranks  # noqa: E402
from transferqueue.adapters.scoring.forward_rows import forward_rows  # noqa: E402
from transferqueue.adapters.scoring.plan import inputs, lay_out, shared_prompts  # noqa: E402
from transferqueue.errors import UsageError  # noqa: E402

ANY = {name: make for name, (make, packed, _) in MODELS.items() if packed and name != "qwen3 untied"}
ANY["builtin"] = lambda: BuiltinModel(ModelShape(vocab_size=VOCABULARY, hidden_size=32, max_position_embeddings=64))


class Rows:
    """Rows of a drawn forest. prompts, responses: of each row; parents, tokens: what it continues."""

    def __init__(self, shape: list[tuple[float, float, int, float]]) -> None:
        """shape: of each row, its parent and the share of the parent's tokens that it has, as numbers below 1; its own
        tokens; the share of its tokens that are prompt."""
        draws = np.random.default_rng(len(shape))
        self.rows: list[Any] = []
        self.prompts, self.responses, self.parents, self.tokens = [], [], [], []
        for row, (parent, share, own, prompt) in enumerate(shape):
            above = int(parent * (row + 1)) - 1
            common = 0 if above < 0 else int(share * (len(self.rows[above]) + 1))
            trunk = self.rows[above][:common] if common else []
            ids = np.concatenate([trunk, draws.integers(0, VOCABULARY, max(own, 1 - common))]).astype(np.int64)
            cut = 1 + int(prompt * len(ids))
            self.rows.append(ids)
            self.prompts.append(ids[:cut])
            self.responses.append(ids[cut:])
            self.parents.append(above)
            self.tokens.append(common)

    @property
    def tree(self) -> RowTree:
        return RowTree.of(self.parents, self.tokens)

    def unique(self) -> int:
        """Tokens that no earlier row of the tree has."""
        return sum(map(len, self.rows)) - sum(self.tokens)


UNIT = st.floats(0, 1, exclude_max=True)
FORESTS = st.lists(st.tuples(UNIT, UNIT, st.integers(0, 6), UNIT), min_size=1, max_size=9).map(Rows)


def loss_of(model: Any, rows: Rows, tree: RowTree) -> tuple[Any, Any]:
    """Log-probs of all responses, and a loss that weighs each token and its entropy differently."""
    scores = response_scores(model, rows.prompts, rows.responses, temperature=0.7, entropy=True, tree=tree)
    weights = torch.linspace(-1, 2, len(scores.logprobs_N))
    return scores.logprobs_N, (scores.logprobs_N * weights + scores.entropy_N * weights**2).sum()


@pytest.fixture(scope="module", params=ANY)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    made = ANY[request.param]().eval().double()
    assert plan_for(made).trees
    return made


@settings(max_examples=examples(30))
@given(rows=FORESTS)
def test_a_tree_has_the_log_probs_and_the_gradient_of_its_rows_apart(model: Any, rows: Rows) -> None:
    apart, loss_apart = loss_of(model, rows, RowTree.apart(len(rows.rows)))
    found, loss = loss_of(model, rows, rows.tree)
    torch.testing.assert_close(found, apart, rtol=1e-5, atol=1e-5)  # log-probs are float32
    if not len(apart):
        return
    wanted, got = (torch.cat([g.flatten() for g in gradients(model, each)]) for each in (loss_apart, loss))
    assert float((got - wanted).norm()) <= 1e-6 * max(float(wanted.norm()), 1e-3)
    assert lay_out(model, rows.prompts, rows.responses, rows.tree).ids_BT.numel() == rows.unique()


@given(rows=FORESTS, data=st.data())
def test_rows_of_a_tree_keep_what_they_share_in_any_selection(rows: Rows, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows.rows))), min_size=1, unique=True))
    tree = rows.tree.select(chosen)
    prompts, responses = ([values[row] for row in chosen] for values in (rows.prompts, rows.responses))
    laid = forward_rows(prompts, responses, packed=True, tree=tree)  # refuses tokens that are not the same
    common = np.array([[declared(rows, row, other) for other in chosen] for row in chosen])
    own = [len(rows.rows[row]) - common[at, :at].max(initial=0) for at, row in enumerate(chosen)]
    assert laid.ids_BT.numel() == sum(own)


def declared(rows: Rows, row: int, other: int) -> int:
    """The tokens that two rows have in common by their declarations: along the way from one to the other."""
    if row == other:
        return len(rows.rows[row])
    later = max(row, other)
    if rows.parents[later] < 0:
        return 0
    return min(rows.tokens[later], declared(rows, rows.parents[later], min(row, other)))


@given(rows=FORESTS, tokens=st.integers(1, 40), ranks=st.integers(1, 4))
def test_micro_batches_count_shared_tokens_once(rows: Rows, tokens: int, ranks: int) -> None:
    lengths = [len(row) for row in rows.rows]
    for batches in (
        micro_batches(lengths, tokens, tree=rows.tree),
        micro_batches_of_ranks(lengths, tokens, ranks, tree=rows.tree),
    ):
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        for batch in batches:
            unique = sum(lengths[row] for row in batch) - int(rows.tree.select(batch).shared.sum())
            assert unique <= tokens or len(batch) == 1
            assert sum(lengths[row] for row in batch) <= PATHS_MAX * max(tokens, unique)


def test_a_group_that_fits_stays_together_and_ranks_share_one_that_is_alone() -> None:
    groups = RowTree.of_prompts([[1] * 10, [2] * 30] * 4)
    assert micro_batches([12, 32] * 4, tokens=38, tree=groups) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = RowTree.of_prompts([[1] * 100] * 8)
    assert micro_batches_of_ranks([110] * 8, 8192, 2, tree=alone) == [[0, 1, 2, 3], [4, 5, 6, 7]]


GROUP_OF_8 = [(2000, 100)] * 8
CUTS = {
    "a group by four ranks": ([GROUP_OF_8], 4, 8192, [2200] * 4),
    "a group by three ranks": ([GROUP_OF_8], 3, 8192, [2300, 2300, 2200]),
    "three groups by four ranks": ([GROUP_OF_8] * 3, 4, 8192, [2800, 2800, 2400, 2400]),
    "four groups by four ranks": ([GROUP_OF_8] * 4, 4, 8192, [2800] * 4),
    "two groups by four ranks": ([GROUP_OF_8] * 2, 4, 8192, [2400] * 4),
    "long and short responses": ([[(2000, 300)] + [(2000, 100)] * 5], 4, 8192, [2300, 2200, 2200, 2100]),
    "rows apart": ([[(0, 110)]] * 8, 4, 8192, [220] * 4),
    "more rows than fit": ([GROUP_OF_8] * 6, 2, 2800, [2800] * 6),
    "fewer rows than ranks": ([[(10, 5)] * 3], 4, 8192, [15] * 3),
    "a short own part": ([[(1000, 10)] * 16], 1, 8192, [1160]),
    "short own parts by two ranks": ([[(1000, 10)] * 16] * 2, 2, 8192, [1160] * 2),
    "groups that fill their paths together": ([[(1000, 10)] * 16] * 5, 1, 8192, [4640, 1160]),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "ranks", "tokens", "sizes"), CUTS.values(), ids=CUTS)
def test_ranks_get_as_many_passes_with_few_tokens(
    groups: list[list[tuple[int, int]]], ranks: int, tokens: int, sizes: list[int]
) -> None:
    """groups: prompt and own tokens of each row. sizes: tokens of each micro-batch."""
    rows = [(group, prompt, own) for group, each in enumerate(groups) for prompt, own in each]
    lengths, tree = [prompt + own for _, prompt, own in rows], RowTree.of_prompts([[g] * p for g, p, _ in rows])
    batches = micro_batches_of_ranks(lengths, tokens, ranks, tree=tree)
    assert batches == micro_batches_of_ranks(lengths, tokens, ranks, tree=tree)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    assert [sum(lengths[row] for row in batch) - tree.select(batch).shared.sum() for batch in batches] == sizes
    assert len(batches) % ranks == 0 or len(batches) == len(rows)
    assert all(sum(lengths[row] for row in batch) <= PATHS_MAX * tokens for batch in batches)


@given(rows=FORESTS, tokens=st.integers(1, 40), ranks=st.integers(2, 4), padded=st.booleans())
def test_rounds_take_no_longer_than_those_of_rows_apart(rows: Rows, tokens: int, ranks: int, padded: bool) -> None:
    lengths = [len(row) for row in rows.rows]
    tree = RowTree.apart(len(lengths)) if padded else rows.tree

    def time_of(batches: list[list[int]]) -> int:
        sizes = [
            max(lengths[row] for row in batch) * len(batch)
            if padded
            else sum(lengths[row] for row in batch) - int(tree.select(batch).shared.sum())
            for batch in batches
        ]
        return sum(sorted(sizes, reverse=True)[::ranks])

    batches = micro_batches_of_ranks(lengths, tokens, ranks, padded=padded, tree=tree)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert len(batches) >= min(ranks, len(lengths))
    apart = micro_batches(lengths, min(tokens, max(1, -(-sum(lengths) // ranks))), padded=padded)
    assert time_of(batches) <= min(time_of(apart), time_of(micro_batches(lengths, tokens, padded=padded, tree=tree)))


def test_attention_holds_at_most_a_few_paths_a_token() -> None:
    """Keys and values are held for each row that shares a token."""
    batches = micro_batches([1001] * 64, 1100, tree=RowTree.of_prompts([[1] * 1000] * 64))
    assert {len(batch) for batch in batches} == {8}


def test_logits_of_shared_response_tokens_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, responses = [[1, 2], [1, 2], [1, 2]], [[3, 4, 5], [3, 4, 6, 7], [3, 4, 5]]
    tree = RowTree.of([-1, 0, 0], [0, 4, 5])
    model, computed = qwen3(), []
    apart = response_scores(model, prompts, responses, top_k=2, tree=RowTree.apart(3))
    of = logprobs._Wanted.of
    monkeypatch.setattr(logprobs._Wanted, "of", lambda self, *chunk: computed.append(len(chunk[0])) or of(self, *chunk))
    found = response_scores(model, prompts, responses, top_k=2, tree=tree)
    assert computed == [5]
    torch.testing.assert_close(found.logprobs_N, apart.logprobs_N)
    assert torch.equal(found.top_ids_NK, apart.top_ids_NK)
    at_ids = [np.tile([[row]], (len(response), 1)) for row, response in enumerate(responses)]
    each = response_scores(model, prompts, responses, at_ids=at_ids, tree=tree)
    torch.testing.assert_close(
        each.logprobs_NK, response_scores(model, prompts, responses, at_ids=at_ids, tree=RowTree.apart(3)).logprobs_NK
    )


def test_members_of_a_group_share_their_prompt_without_being_asked() -> None:
    prompts, responses = [[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]], [[6, 7], [8], [9], []]
    rows = lay_out(qwen3(), prompts, responses)
    assert rows.ids_BT.tolist() == [[1, 2, 3, 6, 7, 4, 5, 8, 9]]
    assert rows.positions_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert rows.from_S.tolist() == [2, 3, 6, 2]
    assert rows.last_R.tolist() == [4, 7, 8, 6]


def test_attention_that_is_aligned_otherwise_is_found_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_left(queries: int, keys: int, _: Any, dtype: Any, device: Any) -> Any:
        return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(
            ~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf
        )

    assert plan_for(qwen3()).trees
    monkeypatch.setattr("transferqueue.adapters.scoring.row_attention._mask", top_left)
    plan = plan_for(qwen3())
    assert plan.packed
    assert not plan.trees


def test_rows_with_long_responses_share_no_prompt_on_a_cpu() -> None:
    model = qwen3()
    hidden = model.config.hidden_size
    long = int((2 * 8 * hidden) ** 0.5)  # two shared tokens pay up to here
    for own, shared in ((long, [0, 2]), (long + 1, [0, 0])):
        tree = shared_prompts(model, [[1, 2]] * 2, [2 + own] * 2)
        assert tree is not None
        assert tree.shared.tolist() == shared


def test_prompts_of_other_integers_are_equal_if_their_numbers_are() -> None:
    prompts = [np.array([1], np.int64), np.array([1, 0], np.int32), np.array([1], np.int16)]
    assert RowTree.of_prompts(prompts).shared_by_row().tolist() == [0, 0, 1]


def test_layers_share_the_masks_of_a_pass() -> None:
    model = qwen3()
    laid = lay_out(model, [[1, 2, 3]] * 2, [[4, 5], [6, 7]])
    assert laid.packed is not None
    model(**inputs(laid))
    assert len(laid.packed.masks) == len(laid.packed.buckets) == 2


def test_a_model_whose_rows_are_padded_computes_each_apart() -> None:
    torch.manual_seed(1)
    padded = MODELS["capped attention"][0]().eval()
    assert shared_prompts(padded, [[1, 2], [1, 2]], [3, 3]) is None
    assert lay_out(padded, [[1, 2], [1, 2]], [[3], [4]], RowTree.of([-1, 0], [0, 2])).ids_BT.shape == (2, 3)


@pytest.mark.parametrize(
    ("parents", "tokens", "text"),
    [
        ([-1, 1], [0, 1], "row 1 continues row 1; a row continues an earlier row, or none"),
        ([1, -1], [1, 0], "row 0 continues row 1"),
        ([-2], [0], "row 0 continues row -2"),
        ([-1, -1], [0, 2], "row 1 shares 2 tokens with row -1"),
        ([-1, 0], [0, -1], "row 1 shares -1 tokens with row 0"),
    ],
)
def test_a_tree_that_is_none_is_refused(parents: list[int], tokens: list[int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RowTree.of(parents, tokens)


@pytest.mark.parametrize(
    ("parents", "tokens", "text"),
    [
        ([-1], [0], "a tree of 1 rows for 2 rows"),
        ([-1, 0], [0, 3], "row 1 shares 3 tokens with another row by its tree, and differs from it at token 2"),
        ([-1, 0], [0, 5], "row 1 shares 5 tokens"),
    ],
)
def test_rows_that_are_not_as_declared_are_refused(parents: list[int], tokens: list[int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        response_scores(qwen3(), [[1, 2], [1, 2]], [[3], [4, 5]], tree=RowTree.of(parents, tokens))
