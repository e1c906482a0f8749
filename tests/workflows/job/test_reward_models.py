"""Reward models as terms: with the policy's tokens as they were drawn, else with their own template and tokens."""

from copy import deepcopy

import numpy as np
import pytest

from tests.workflows.job import jobs
from tests.workflows.job.tokens import save_tokenizer
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.tokenizer import load_tokenizer
from transferqueue.workflows.job.reward_terms.scorer import RewardScorer
from transferqueue.workflows.job.settings.job import ModelSettings
from transferqueue.workflows.job.settings.read import job_from_values

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

OTHER = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def save_classifier(directory):
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=256,
    )
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_tokenizer(ModelSettings(path=str(save_tokenizer(tmp_path_factory.mktemp("policy")))))


def scorer(path, policy, **args) -> RewardScorer:
    values = deepcopy(jobs.KINDS["grpo"]) | {"reward": [{"model": str(path), "weight": 2.0, "args": args}]}
    values["model"] = {"path": "models/tiny", "dtype": "float32"}
    return RewardScorer(job_from_values(values), policy)


def scores(path, policy, prompt="sort 21", texts=("12", "21 or so"), **args):
    prompts = [policy([f"<|im_start|>user\n{prompt}<|im_end|>\n"], add_special_tokens=False)["input_ids"][0]] * len(
        texts
    )
    responses = [policy([f"{text}<|im_end|>"], add_special_tokens=False)["input_ids"][0] for text in texts]
    return scorer(path, policy, **args).score(
        ids=range(len(texts)),
        data=[{"prompt": prompt}] * len(texts),
        prompt_ids=[np.array(ids, np.int32) for ids in prompts],
        response_ids=[np.array(ids, np.int32) for ids in responses],
    )


def by_hand(path, tokenizer, texts):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    ids = [tokenizer([text], add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [model(torch.tensor(each)).logits.item() for each in ids]


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_a_model_with_the_policys_tokens_reads_them_as_drawn(tmp_path, policy, with_tokenizer):
    path = save_classifier(tmp_path / "reward")
    if with_tokenizer:
        save_tokenizer(path)
    result = scores(path, policy)
    whole = [f"<|im_start|>user\nsort 21<|im_end|>\n{text}<|im_end|>" for text in ("12", "21 or so")]
    expected = by_hand(path, policy, whole)
    assert result.terms[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert result.rewards.tolist() == pytest.approx([2 * score for score in expected], abs=1e-5)
    assert scorer(path, policy).names == ("reward",)


def test_a_score_becomes_a_probability_where_the_job_says_so(tmp_path, policy):
    path = save_classifier(tmp_path / "reward")
    raw = scores(path, policy).terms[:, 0]
    result = scores(path, policy, output="probability")
    assert result.terms[:, 0].tolist() == pytest.approx((1 / (1 + np.exp(-raw))).tolist(), abs=1e-6)
    assert result.rewards.tolist() == pytest.approx((2 * result.terms[:, 0]).tolist())


def test_a_model_with_another_template_reads_the_conversation_as_its_own(tmp_path, policy):
    path = save_tokenizer(save_classifier(tmp_path / "reward"), template=OTHER)
    expected = by_hand(path, policy, [f"user: sort 21\nassistant: {text}\n" for text in ("12", "21 or so")])
    assert scores(path, policy).terms[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    messages = [{"role": "user", "content": "sort 21"}]
    assert scores(path, policy, messages).terms[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_model_without_a_template_reads_texts_and_refuses_messages(tmp_path, policy):
    path = save_tokenizer(save_classifier(tmp_path / "reward"), template="")
    expected = by_hand(path, policy, ["sort 2112", "sort 2121 or so"])
    assert scores(path, policy).terms[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(
        UsageError, match=r"reward has no chat template, and the prompt of row 0, .* is a list of messages"
    ):
        scores(path, policy, [{"role": "user", "content": "sort 21"}])
