"""Problem sets, the tokenizer and advantages: the parts of the GRPO job that need no torch."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferqueue.workflows.grpo.learning.problems import HELDOUT_PROBLEMS, PROBLEM_SETS, Problem, Split, problem_set
from transferqueue.workflows.grpo.learning.settings import SETTINGS, settings_for
from transferqueue.workflows.grpo.model.tokenizer import (
    ANSWER_ID,
    BOS_ID,
    EOS_ID,
    MISPLACED,
    PAD_ID,
    VOCABULARY_SIZE,
    decode,
    encode,
    encode_answer,
    encode_prompt,
)

NAMES = list(PROBLEM_SETS)


def stream(name: str, split: Split, count: int, *, seed: int = 0, first: int = 0) -> list[Problem]:
    problems = problem_set(name)
    return [problems.problem(split, seed=seed, ordinal=ordinal) for ordinal in range(first, first + count)]


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_the_same_wherever_it_is_entered(name: str) -> None:
    assert stream(name, Split.TRAIN, 20, seed=3)[15:] == stream(name, Split.TRAIN, 5, seed=3, first=15)


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_neighbouring_seeds_are_not_one_stream_shifted(name: str) -> None:
    first, second = (stream(name, Split.TRAIN, 40, seed=seed) for seed in (0, 1))
    assert first[1:] != second[:-1]
    assert sum(a == b for a, b in zip(first[1:], second[:-1], strict=True)) < 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", [Split.TRAIN, Split.WARMUP])
def test_no_trained_question_is_held_out(name: str, split: Split) -> None:
    heldout = problem_set(name).heldout()
    questions = {problem.entry["question"] for problem in heldout}
    assert len(heldout) == len(questions) == len({problem.prompt for problem in heldout}) == HELDOUT_PROBLEMS
    for seed in (0, 1):
        trained = {problem.entry["question"] for problem in stream(name, split, 1500, seed=seed)}
        assert not trained & questions


@pytest.mark.parametrize("name", NAMES)
def test_texts_stay_within_the_declared_lengths_and_the_context(name: str) -> None:
    problems = problem_set(name)
    for problem in [*problems.heldout(), *stream(name, Split.TRAIN, 2000)]:
        assert 0 < len(problem.prompt) <= problems.prompt_chars_max
        assert 0 < len(problem.answer) <= problems.answer_chars_max
        assert decode(encode_answer(problem.answer)) == problem.answer
    assert problems.prompt_chars_max + 2 + problems.answer_chars_max + 1 <= SETTINGS[name].context


@pytest.mark.parametrize("name", NAMES)
def test_the_right_answer_scores_one_and_no_answer_nothing(name: str) -> None:
    problems = problem_set(name)
    for problem in problems.heldout()[:50]:
        assert problems.score(problem, problem.answer) == 1.0
        assert problems.score(problem, "") == 0.0
        assert problems.score(problem, MISPLACED) == 0.0


def test_a_sum_pays_in_part_for_a_number_that_contains_the_right_one() -> None:
    sums = problem_set("chain_sum")
    problem = Problem("1 + 2 + 4", "7", {"answer": "7"})
    scores = {answer: sums.score(problem, answer) for answer in ("7", "07", "+7", "7.0", "8", "72", "-7", "abc")}
    assert scores == {"7": 1.0, "07": 1.0, "+7": 1.0, "7.0": 1.0, "8": 0.0, "72": 0.5, "-7": 0.5, "abc": 0.0}


def test_a_word_pays_for_each_letter_in_place_and_for_letters_too_many() -> None:
    words = problem_set("spell_backward")
    problem = Problem("sun", "nus", {"answer": "nus"})
    scores = {answer: round(words.score(problem, answer), 3) for answer in ("nus", "nu", "sun", "n", "nusa", "xyz")}
    assert scores == {"nus": 1.0, "nu": 0.667, "sun": 0.333, "n": 0.333, "nusa": 0.8, "xyz": 0.0}


def test_bounds_of_a_stream_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no problem set is called 'sudoku'; there are chain_sum, spell_backward"):
        problem_set("sudoku")
    with pytest.raises(ValueError, match="no settings for the data set 'sudoku'; there are chain_sum"):
        settings_for("sudoku")
    with pytest.raises(ValueError, match="ordinal -1 is outside"):
        problem_set("chain_sum").problem(Split.TRAIN, seed=0, ordinal=-1)
    with pytest.raises(ValueError, match="seed 4294967296 is outside"):
        problem_set("chain_sum").problem(Split.TRAIN, seed=2**32, ordinal=0)


def test_every_problem_set_has_settings_of_its_own() -> None:
    assert list(SETTINGS) == NAMES
    assert all(settings.dataset == name for name, settings in SETTINGS.items())
    assert settings_for("spell_backward", seed=5).seed == 5


@pytest.mark.slow
def test_what_a_reward_process_loads_has_no_torch() -> None:
    names = (
        "grpo.learning.problems",
        "grpo.model.tokenizer",
        "grpo.stages.advantage_stage",
        "job.algorithms.advantages",
    )
    imports = ", ".join(f"transferqueue.workflows.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- tokenizer


@given(st.text(alphabet="".join(map(chr, range(32, 127))) + "\n"))
def test_text_comes_back_from_its_tokens(text: str) -> None:
    assert decode(encode(text)) == text
    assert encode_prompt(text).tolist() == [BOS_ID, *encode(text).tolist(), ANSWER_ID]
    assert encode_prompt(text).dtype == encode_answer(text).dtype == np.int32
    assert all(ANSWER_ID < token < VOCABULARY_SIZE for token in encode(text))


def test_decoding_stops_at_eos_and_does_not_repair() -> None:
    one, two = encode("12").tolist()
    assert decode([one, EOS_ID, two]) == "1"
    assert decode([one, PAD_ID, BOS_ID, ANSWER_ID, two]) == f"1{3 * MISPLACED}2"
    assert decode([]) == ""


def test_what_is_not_in_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="contains 'é'; the tokenizer knows printable ASCII"):
        encode("café")
    for token in (-1, VOCABULARY_SIZE):
        with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary"):
            decode([token])
