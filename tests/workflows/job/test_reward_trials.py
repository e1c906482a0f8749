"""Reward functions are tried before a job starts, in a process that may hang or crash."""

import msgspec
import numpy as np
import pytest

from tests.workflows.job import jobs
from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.adapters.stages.reward_functions import RewardFailed
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.sequence import NumberedPrompt
from transferqueue.workflows.job.reward_terms.function_process import FunctionProcess
from transferqueue.workflows.job.reward_terms.trials import try_rewards
from transferqueue.workflows.job.settings.job import EnvironmentSettings

pytestmark = pytest.mark.slow

REWARDS = """
import os, time
def exact(completions, answer):
    print("printed")
    return [float(text == right) for text, right in zip(completions, answer)]
def raises(completions):
    raise ValueError("never")
def hangs(completions):
    time.sleep(600)
def dies(completions):
    os._exit(7)

class Digit:
    def __init__(self, high):
        self.high = high
    def reset(self, *, seed=None, options=None):
        self.answer = options["answer"]
        return None, {}
    def step(self, action):
        return "", float(action == self.answer), True, False, {}
    def close(self):
        pass

def digit(high=9):
    return Digit(high)

class Broken(Digit):
    def step(self, action):
        return self.nowhere

class Useless(Digit):
    def state(self):
        return self.answer
    def restore(self, state):
        raise RuntimeError("no such sandbox")

async def asks(data, base_url):
    import aiohttp
    messages = [{"role": "user", "content": data["prompt"]}]
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
    return float(said == data["answer"])
"""
PROMPTS = [
    NumberedPrompt(number=at, ids=np.array([1], np.int32), text="", data={"prompt": f"p{at}", "answer": answer})
    for at, answer in enumerate(["42", "43"])
]


def tried(tmp_path, function, **more):
    (tmp_path / "tried_rewards.py").write_text(REWARDS)
    settings = jobs.job("grpo", *[f"reward.0.{key}={value}" for key, value in more.items()])
    reward = msgspec.structs.replace(settings.reward[0], function=f"{tmp_path / 'tried_rewards.py'}:{function}")
    return try_rewards(msgspec.structs.replace(settings, reward=(reward,)), PROMPTS, ByteTokenizer())


def test_a_trial_has_the_scores_of_dummy_rows(tmp_path):
    (trial,) = tried(tmp_path, "exact")
    assert trial.scores == [1.0, 0.0]
    assert trial.name.endswith(":exact")


def test_a_function_that_raises_is_refused_unless_its_rows_may_be_dropped(tmp_path):
    with pytest.raises(
        RewardFailed, match=r"raised ValueError: never; it was tried with row 0, prompt 'p0', completion '42'"
    ):
        tried(tmp_path, "raises")
    (trial,) = tried(tmp_path, "raises", on_error="drop")
    assert "raised ValueError: never" in trial.failure


def test_a_function_that_hangs_or_dies_is_refused(tmp_path):
    with pytest.raises(RewardFailed, match=r"hangs did not return within reward.0.timeout_s=0.1 s.*it was tried"):
        tried(tmp_path, "hangs", timeout_s=0.1)
    with pytest.raises(RewardFailed, match="dies ended its process with code 7; it was tried with row 0"):
        tried(tmp_path, "dies")


def test_a_module_whose_error_is_no_whole_text_is_named(tmp_path):
    path = tmp_path / "half.py"
    path.write_text("raise ValueError('a' + chr(0xD800))")
    refused = pytest.raises(UsageError, match=r"its module raised ValueError: a\\ud800")
    with FunctionProcess(f"{path}:exact", {}, timeout_s=60.0) as process, refused:
        process.parameters()


def tried_environment(tmp_path, environment, args, kind="factory"):
    (tmp_path / "tried_rewards.py").write_text(REWARDS)
    given = EnvironmentSettings(args=args, **{kind: f"{tmp_path / 'tried_rewards.py'}:{environment}"})
    settings = msgspec.structs.replace(jobs.job("grpo"), reward=(), environment=(given,))
    return try_rewards(settings, PROMPTS, ByteTokenizer())


def test_an_environment_is_made_and_takes_a_turn(tmp_path):
    (trial,) = tried_environment(tmp_path, "digit", {"high": 3})
    assert trial.scores == [1.0, 0.0]
    assert trial.text().startswith("1, 0 for a first turn of '42' to each prompt")


def test_an_agent_is_started_and_gets_an_answer(tmp_path):
    (trial,) = tried_environment(tmp_path, "asks", {}, kind="agent")
    assert trial.scores == [1.0, 0.0]


def test_an_environment_that_cannot_be_made_or_stepped_is_refused(tmp_path):
    with pytest.raises(RewardFailed, match=r"environment digit: the factory\(\) raised TypeError: .*'hihg'"):
        tried_environment(tmp_path, "digit", {"hihg": 3})
    with pytest.raises(RewardFailed, match=r"environment Broken: step\('42'\) raised AttributeError: .*'nowhere'"):
        tried_environment(tmp_path, "Broken", {"high": 3})


def test_an_environment_that_cannot_be_restored_is_refused(tmp_path):
    with pytest.raises(
        RewardFailed, match=r"environment Useless: restore\(\) after turn 0 raised RuntimeError: no such"
    ):
        tried_environment(tmp_path, "Useless", {"high": 3})
