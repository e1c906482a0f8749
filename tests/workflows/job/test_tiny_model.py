"""The tiny models that examples and tests of jobs train: they load, repeat, and know a little of their task."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from transferqueue.errors import NotFound, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transferqueue.workflows.job.stages.chat_turns import ChatTurns  # noqa: E402
from transferqueue.workflows.job.tiny_model import warmup  # noqa: E402
from transferqueue.workflows.job.tiny_model.__main__ import main  # noqa: E402
from transferqueue.workflows.job.tiny_model.answers import (  # noqa: E402
    TOKENS_MAX,
    DrawnAnswers,
    MistakenAnswers,
    ids_of,
    right_answers,
)
from transferqueue.workflows.job.tiny_model.make import make, write_data  # noqa: E402
from transferqueue.workflows.job.tiny_model.tasks import TASKS, exact, problems, split_of  # noqa: E402
from transferqueue.workflows.job.tiny_model.tokenizer import build_tokenizer  # noqa: E402


def test_any_text_is_tokens_and_comes_back() -> None:
    tokenizer = build_tokenizer()
    chat = [{"role": "user", "content": "sort 31 äß"}, {"role": "assistant", "content": "13"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|im_start|>user\nsort 31 äß<|im_end|>\n<|im_start|>assistant\n13<|im_end|>\n"
    tokens = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode(tokens["input_ids"]) == text
    said = [token for token, said in zip(tokens["input_ids"], tokens["assistant_masks"], strict=True) if said]
    assert tokenizer.decode(said) == "13<|im_end|>"
    assert said[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("qwen3", "Qwen3ForCausalLM"),
        ("classifier", "Qwen3ForSequenceClassification"),
        ("value", "Qwen3ForTokenClassification"),
    ],
)
def test_a_directory_loads_by_its_class(tmp_path: Path, kind: str, architecture: str) -> None:
    make(tmp_path, kind=kind)  # type: ignore[arg-type]
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == [architecture]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    model, info = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 500_000


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make(tmp_path / name, steps=2, until=1.0)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
def test_the_warm_up_ends_where_it_is_told(tmp_path: Path) -> None:
    figure = make(tmp_path, steps=200, until=0.1)
    assert 0.1 <= figure < 0.4


def test_no_test_question_is_trained(tmp_path: Path) -> None:
    write_data(tmp_path, task="sum", train=300, test=100)
    rows = {
        split: [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    questions = {split: {row["question"] for row in rows[split]} for split in rows}
    assert (len(questions["train"]), len(questions["test"])) == (300, 100)
    assert not questions["train"] & questions["test"]
    assert all(eval(row["question"].rstrip("=")) == int(row["answer"]) for row in rows["test"])
    assert {split_of(problem.question) for problem in islice(problems("sum", "train", seed=5), 200)} == {"train"}


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_rewarded_and_nothing_else(task: str) -> None:
    question, answer, *_ = next(problems(task, "test", seed=3))
    rewards = exact([answer, f" {answer}\n", question, ""], answer=[answer] * 4)
    assert rewards == [1.0, 1.0, float(question == answer), 0.0]
    with pytest.raises(UsageError, match="1 completions for 2 answers"):
        exact([answer], answer=[answer] * 2)


def test_later_turns_are_shown_with_the_tokens_of_an_episode() -> None:
    tokenizer = build_tokenizer()
    turns = ChatTurns(tokenizer, (tokenizer.eos_token_id,), "tool")
    problem = next(problem for problem in problems("tool", "train", seed=1) if problem.history)
    asked, said, read = problem.chat()
    shown = tokenizer.apply_chat_template(problem.chat(), add_generation_prompt=True, return_dict=False)
    prompt = tokenizer.apply_chat_template([asked], add_generation_prompt=True, return_dict=False)
    drawn = np.array(ids_of(tokenizer, said["content"]), np.int32)
    assert [*prompt, *drawn.tolist(), *turns.encode(read["content"], 1, drawn).tolist()] == shown


def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "model"
    with pytest.raises(NotFound, match='kind "gpt" is unknown; there are'):
        make(place, kind="gpt")  # type: ignore[arg-type]
    with pytest.raises(NotFound, match='task "chess" is unknown; there are'):
        make(place, task="chess")
    with pytest.raises(NotFound, match='task "chess" is unknown'):
        write_data(place, task="chess")
    assert main([str(place), "--warm-up", "-1"]) == 2
    assert "steps=-1" in capsys.readouterr().err
    assert not place.exists()


def test_a_task_with_too_few_questions_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'task "sum" has only about \d+ test questions, not 2100'):
        write_data(tmp_path, task="sum", train=1, test=2100)


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m"), "--warm-up", "1", "--data", str(tmp_path / "d")]) == 0
    assert "qwen3, expected reward 0.00 on held-out questions" in capsys.readouterr().out
    assert (tmp_path / "m/tokenizer.json").exists()
    assert (tmp_path / "d/test.jsonl").exists()


def test_wrong_answers_have_one_mistake_and_say_where() -> None:
    drawn, tokenizer = list(islice(problems("sort", "train"), 40)), build_tokenizer()
    rows = warmup.rows_of(tokenizer, drawn, MistakenAnswers(tokenizer, random.Random(0))(drawn))
    assert rows.right()[0::2].all()
    assert not rows.right()[1::2].any()
    for row in range(0, 40, 2):
        assert torch.equal(rows.right_RT[row] > 0, rows.is_response_RT[row])
    assert (rows.right_RT[1::2].sum(1) < rows.is_response_RT[1::2].sum(1)).all()


def test_a_policy_draws_every_second_answer_that_a_judge_sees(tmp_path: Path) -> None:
    make(tmp_path)
    drawn, tokenizer = list(islice(problems("sort", "train"), 8)), build_tokenizer()
    right = right_answers(tokenizer)
    torch.manual_seed(0)
    answers = DrawnAnswers(tmp_path, right, alone=False)(drawn)
    assert answers[1::2] == right(drawn[1::2])
    assert all(0 < len(answer) <= TOKENS_MAX for answer in answers)
    assert all(tokenizer.eos_token_id not in answer[:-1] for answer in answers)
    rows = warmup.rows_of(tokenizer, drawn, answers)
    assert rows.right()[1::2].all()
    assert not rows.right()[::2].any()  # the weights are random
    alone = DrawnAnswers(tmp_path, right, alone=True)(drawn)
    assert not any(answer == wanted for answer, wanted in zip(alone, right(drawn), strict=True))


def test_a_judge_of_a_policy_is_made_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, judge = str(tmp_path / "policy"), str(tmp_path / "judge")
    assert main([policy]) == 0
    assert main([judge, "--kind", "value", "--warm-up", "1", "--policy", policy]) == 0
    assert "share of variance explained" in capsys.readouterr().out
    assert main([str(tmp_path / "none"), "--kind", "value", "--policy", str(tmp_path / "missing")]) == 2
    assert "there is no model; make one first" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--policy", policy]) == 2
    assert "only a judge learns from drawn answers" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "figure"), [("classifier", 0.9), ("value", 0.35)])
def test_a_judge_knows_right_answers_from_wrong_ones(tmp_path: Path, kind: str, figure: float) -> None:
    assert make(tmp_path, kind=kind, steps=500) > figure  # type: ignore[arg-type]
