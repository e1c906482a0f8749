"""Tasks of reasoning-gym: their questions, and their own scorers as rewards. No torch."""

import random
import subprocess
import sys
from itertools import islice

import pytest

pytest.importorskip("reasoning_gym")

from transferqueue.adapters.builtin.tokenizer import MISPLACED, CharacterTokenizer
from transferqueue.workflows.job.demo import TASK
from transferqueue.workflows.job.tiny_model.gym_tasks import GYM_TASKS, score
from transferqueue.workflows.job.tiny_model.tasks import TASKS, problems

NAMES = list(GYM_TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_texts_stay_within_the_declared_lengths(name: str) -> None:
    tokenizer = CharacterTokenizer()
    for question in islice(problems(name, "train"), 1000):
        assert 0 < len(question.question) <= GYM_TASKS[name].question_chars_max
        assert 0 < len(question.answer) <= GYM_TASKS[name].answer_chars_max
        assert tokenizer.decode(tokenizer(question.answer, add_special_tokens=False)["input_ids"]) == question.answer


@pytest.mark.parametrize("name", NAMES)
def test_the_right_answer_scores_one_and_no_answer_nothing(name: str) -> None:
    drawn = list(islice(problems(name, "test"), 50))
    entries = [question.columns["entry"] for question in drawn]
    assert score([question.answer for question in drawn], entries, task=name) == [1.0] * 50
    assert score([""] * 50, entries, task=name) == score([MISPLACED] * 50, entries, task=name) == [0.0] * 50


def test_a_sum_pays_in_part_for_a_number_that_contains_the_right_one() -> None:
    answers = ("7", "07", "+7", "7.0", "8", "72", "-7", "abc")
    scores = score(answers, [{"answer": "7"}] * len(answers), task="chain_sum")
    assert scores == [1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.0]


def test_a_word_pays_for_each_letter_in_place_and_for_letters_too_many() -> None:
    answers = ("nus", "nu", "sun", "n", "nusa", "xyz")
    scores = score(answers, [{"answer": "nus"}] * len(answers), task="spell_backward")
    assert [round(each, 3) for each in scores] == [1.0, 0.667, 0.333, 0.333, 0.8, 0.0]


def test_every_task_is_one_of_a_tiny_model_and_the_demo_has_one() -> None:
    assert TASK in NAMES
    assert set(NAMES) <= TASKS.keys()
    assert TASKS["chain_sum"](random.Random(1)) == TASKS["chain_sum"](random.Random(1))


@pytest.mark.slow
def test_what_a_reward_process_loads_has_no_torch() -> None:
    names = (
        "tiny_model.gym_tasks",
        "stages.reward",
        "stages.advantage",
        "data.source",
        "algorithms.advantages",
        "demo",
    )
    imports = ", ".join(f"transferqueue.workflows.job.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit(bool({{'torch', 'reasoning_gym'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
