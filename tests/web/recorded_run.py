"""A small run with a record, as a job leaves it: groups, an episode that calls a tool, rows that were dropped, a lease
that failed. `python -m tests.web.recorded_run DIRECTORY` makes one, to be looked at by ``transferqueue page``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from tests.client.test_recorded import wait_until_recorded
from transferqueue.adapters.builtin import MARK
from transferqueue.adapters.builtin.tokenizer import CharacterTokenizer

TABLE: Final = "rollouts"
MARKUP: Final = "<img src=x onerror=alert(1)>"
"""Stands in a prompt, a response, a tool call, the name of a column of the data."""
WAIT_S: Final = 60.0
GROUP: Final = 4
STEPS: Final = 2
EPISODE: Final = (
    ('I look it up.\n<tool_call>{"name": "search", "arguments": {"query": "<b>17</b> * 3"}}</tool_call>', True),
    ("\n17 * 3 = 51\n", False),
    ("The answer is 51.", True),
)
ANSWERS: Final = ("17 * 3 = 51", "17 * 3 is 41", "I add: 17 + 17 + 17 = 51", "It is " + MARKUP)
REWARDS: Final = (1.0, 0.0, 1.0, -0.5)
JOB: Final = """
steps = 2
[model]
path = "{model}"
[data]
path = "data.jsonl"
prompt_tokens_max = 64
[[engine]]
kind = "builtin"
[[reward]]
function = "rewards:exact"
[[reward]]
function = "rewards:short"
weight = 0.5
[sampling]
group_size = 4
tokens_max = 128
[algorithm]
kind = "grpo"
[trainer]
prompts_per_step = 1
"""
_TOKENS: Final = CharacterTokenizer()
_DRAW: Final = np.random.default_rng(7)


def make(folder: Path) -> None:
    """Make the run in `folder`: two steps of a group each, a group with equal rewards that was dropped, and an
    episode."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({MARK: 1}))
    (folder / "job.toml").write_text(JOB.format(model=model))
    with (
        tempfile.TemporaryDirectory(prefix="tq-") as runtime,
        tq.connect(runtime=runtime, arena_bytes="64MiB", label="prompts") as queue,
        tq.connect(queue.address, label="generator-0") as first,
        tq.connect(queue.address, label="generator-1") as second,
        tq.connect(queue.address, label="trainer") as trainer,
    ):
        table = queue.create_table(
            TABLE,
            tasks=[
                tq.Task("rollout", needs=["prompt_ids"], gives=["response_ids", "rewards"], retry=tq.Retry(first_s=0)),
                tq.Task("train", needs=["response_ids", "rewards"], retry=tq.Retry(first_s=0)),
            ],
            retention=tq.Recorded(str(folder / "rows")),
        )
        for step in range(STEPS):
            _put(table, f"What is 17 * 3? {MARKUP}" if step else "What is 17 * 3?", step, GROUP)
            first.table(TABLE).lease("rollout", rows=GROUP, timeout_s=WAIT_S).release(
                failed=True, reason="the engine was restarted"
            )
            _answer(second.table(TABLE), [[(text, True)] for text in ANSWERS], REWARDS, step)
            with trainer.table(TABLE).lease("train", rows=GROUP, timeout_s=WAIT_S) as batch:
                batch.ack(step=step + 1)
        equal = _put(table, "What is 1 + 1?", STEPS, GROUP)
        _answer(first.table(TABLE), [[("2", True)]] * GROUP, [1.0] * GROUP, STEPS)
        table.drop(equal, reason="zero_advantage")
        _put(table, "Use the tool: what is 17 * 3?", STEPS, 1, group=STEPS + 1)
        _answer(first.table(TABLE), [EPISODE], [1.0], STEPS)
        with trainer.table(TABLE).lease("train", rows=1, timeout_s=WAIT_S) as batch:
            batch.ack(step=STEPS)
        table.checkpointed(STEPS, task="train")
        wait_until_recorded(table, (STEPS + 1) * GROUP + 1)


def _put(table: tq.Table, prompt: str, version: int, rows: int, group: int | None = None) -> list[int]:
    """Put a group of prompts."""
    ids = np.array(_TOKENS([prompt])["input_ids"][0], np.int32)
    return list(
        table.put(
            prompt_ids=[ids] * rows,
            data=[{"prompt": prompt, "answer": "51", MARKUP: MARKUP}] * rows,
            group_id=version if group is None else group,
            group_size=rows,
            policy_version=version,
        )
    )


def _answer(
    table: tq.Table, texts: Sequence[Sequence[tuple[str, bool]]], rewards: Sequence[float], version: int
) -> None:
    """Generate and score: each text in pieces that the model drew, or read."""
    with table.lease("rollout", rows=len(texts), timeout_s=WAIT_S) as batch:
        ids = [np.array([token for text, _ in each for token in _encoded(text)], np.int32) for each in texts]
        drawn = [np.array([mine for text, mine in each for _ in _encoded(text)]) for each in texts]
        lengths = [len(each) for each in ids]
        columns: dict[str, Any] = {
            "response_ids": ids,
            "rollout_logprobs": [
                np.where(mine, -_DRAW.exponential(0.8, len(mine)), 0.0).astype(np.float32) for mine in drawn
            ],
            "token_versions": [np.where(np.arange(count) < count // 2, version, version + 1) for count in lengths],
            "token_advantages": [_DRAW.normal(size=count).astype(np.float32) for count in lengths],
            "loss_mask": drawn,
            "turn_rewards": [np.array([0.0, reward], np.float32) for reward in rewards],
            "rewards": np.array(rewards, np.float32),
            "reward_terms": [np.array([reward, 0.25], np.float32) for reward in rewards],
            "finish_reason": ["stop" if len(each) > 1 else "length" for each in texts],
        }
        batch.ack(**columns)


def _encoded(text: str) -> list[int]:
    return list(_TOKENS([text], add_special_tokens=False)["input_ids"][0])


if __name__ == "__main__":
    make(Path(sys.argv[1]))
