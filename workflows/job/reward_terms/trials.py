"""Tries the reward functions of a job on a row before anything starts, in a process of its own: a function that hangs
or crashes ends that alone.

``python -m transferqueue.workflows.job.reward_terms.trials REQUEST REPLY`` is that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import RewardFailed, load_callable, load_reward
from transferqueue.errors import DeadlineExceeded, TransferQueueError, UsageError
from transferqueue.workflows.job.data.sequence import NumberedPrompt
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.reward_terms.functions import FunctionTerm, no_limit
from transferqueue.workflows.job.reward_terms.reward_rows import RewardRows
from transferqueue.workflows.job.settings.job import Job, RewardSettings

COMPLETION: Final = "42"
"""The answer of the dummy rows."""
IMPORT_S: Final = 60.0
"""Seconds for the import of a function's module, beside the time that one call may take."""
_OUTPUT_CHARS: Final = 2000


class RewardTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reward function for dummy rows. scores: None where it does not apply. failure: why it gave none,
    if rows may be dropped. environment: whether it was the first turn of an environment.
    """

    name: str
    scores: list[float | None] = []
    seconds: float = 0.0
    failure: str = ""
    environment: bool = False

    def text(self) -> str:
        """Return it for people."""
        if self.failure:
            return f"rows like these are dropped: {self.failure}"
        scores = ", ".join("none" if score is None else f"{score:g}" for score in self.scores)
        said = "a first turn" if self.environment else "a response"
        return f"{scores} for {said} of {COMPLETION!r} to each prompt, in {self.seconds * 1000:.1f} ms"


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    function: str
    args: dict[str, Any]
    columns: dict[str, list[Any]] = {}
    rows: int
    episodes: list[dict[str, Any]] = []
    """Of an environment: the options of each episode."""


def try_rewards(job: Job, prompts: list[NumberedPrompt], tokenizer: TextTokenizer) -> list[RewardTrial]:
    """Call each reward function with a response "42" to each of these prompts, and take one such turn in each
    environment.

    Blocks while a module is imported and called: at most `IMPORT_S` and the function's ``timeout_s``. Raises
    `RewardFailed` if a function or an environment raises or gives no score (unless its rows may be dropped),
    `DeadlineExceeded` if it hangs, and what `load_reward` raises.
    """
    return [
        _tried(settings, f"reward.{at}", prompts, tokenizer)
        for at, settings in enumerate(job.reward)
        if settings.function or settings.environment
    ]


def _tried(settings: RewardSettings, key: str, prompts: list[NumberedPrompt], tokenizer: TextTokenizer) -> RewardTrial:
    rows = _dummy_rows(prompts, tokenizer)
    if settings.environment:
        episodes = [dict(prompt.data) for prompt in prompts]
        request = _Request(function=settings.environment, args=settings.args, rows=len(rows), episodes=episodes)
    else:
        request = _function_request(settings, rows)
    trial = _in_process(request, settings, key)
    if trial.failure and settings.on_error == "stop":
        raise RewardFailed(f"{trial.failure}; it was tried with {rows.described(0)}", name=trial.name)
    return trial


def _function_request(settings: RewardSettings, rows: RewardRows) -> _Request:
    term = FunctionTerm(load_reward(settings.function, settings.args), limit=no_limit, timeout_s=0)
    return _Request(function=settings.function, args=settings.args, columns=term.columns(rows), rows=len(rows))


def _dummy_rows(prompts: list[NumberedPrompt], tokenizer: TextTokenizer) -> RewardRows:
    ids: Ids = np.asarray(tokenizer([COMPLETION], add_special_tokens=False)["input_ids"][0], np.int32)
    return RewardRows(
        ids=[prompt.number for prompt in prompts],
        data=[prompt.data for prompt in prompts],
        prompt_ids=[prompt.ids for prompt in prompts],
        response_ids=[ids] * len(prompts),
        tokenizer=tokenizer,
    )


def _in_process(request: _Request, settings: RewardSettings, key: str) -> RewardTrial:
    with tempfile.TemporaryDirectory(prefix="transferqueue-reward-") as directory:
        asked, replied = Path(directory, "request"), Path(directory, "reply")
        asked.write_bytes(msgspec.json.encode(request))
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(asked), str(replied)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=IMPORT_S + settings.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"reward {request.function} did not return within {key}.timeout_s={settings.timeout_s:g} s (and "
                f"{IMPORT_S:g} s for its import) for {request.rows} dummy rows; make it faster, or set a longer limit"
            ) from error
        if done.returncode or not replied.exists():
            output = done.stdout.decode(errors="replace").strip()[-_OUTPUT_CHARS:]
            raise UsageError(
                f"reward {request.function} ended its process with code {done.returncode} when it was tried; its last "
                f"output: {output}"
            )
        return msgspec.json.decode(replied.read_bytes(), type=RewardTrial)


def main(asked: str, replied: str) -> None:
    """Call one function as the file `asked` says, and write its trial to `replied`."""
    request = msgspec.json.decode(Path(asked).read_bytes(), type=_Request)
    started = time.monotonic()
    try:
        scores = _first_turns(request) if request.episodes else _scores(request)
    except TransferQueueError as error:
        trial = RewardTrial(name=request.function, failure=str(error))
    else:
        listed = [None if np.isnan(score) else float(score) for score in scores]
        seconds, environment = time.monotonic() - started, bool(request.episodes)
        trial = RewardTrial(name=request.function, scores=listed, seconds=seconds, environment=environment)
    Path(replied).write_bytes(msgspec.json.encode(trial))


def _scores(request: _Request) -> Sequence[float]:
    scores: list[float] = load_reward(request.function, request.args)(request.columns, rows=request.rows).tolist()
    return scores


def _first_turns(request: _Request) -> Sequence[float]:
    """The reward of the first turn of each episode. `RewardFailed` for an environment that raises."""
    make, doing, rewards = load_callable(request.function, "reward.environment"), "made", []
    try:
        for number, options in enumerate(request.episodes):
            doing = "made"
            with closing(make(**request.args)) as environment:
                doing = "reset"
                environment.reset(seed=number, options=options)
                doing = "stepped"
                rewards.append(float(environment.step(COMPLETION)[1]))
    except Exception as error:
        text = f"environment {request.function} raised {type(error).__name__} when it was {doing}: {error}"
        raise RewardFailed(text, name=request.function) from error
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:])
