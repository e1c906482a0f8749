"""A plain job with each engine by its bare kind: prompts of 12 to 400 tokens, 60 steps with updates in flight. It runs,
learns, and no process is started again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

pytest.importorskip("transformers", reason="make test-engines installs it")

from tests.engines.served import serve_model
from tests.scale import only_long
from transferqueue.workflows.flow.events import RESTART, Event, Figures
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.tiny_model.make import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.filterwarnings("ignore")]  # of the stacks
STEPS = 60
SHORTEST, LONGEST, TOKENS = 12, 400, 16
REWARD = """
def even(completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
KINDS = ["builtin", "transformers", "vllm", "vllm_server", "openai"]


@contextmanager
def engine_of(kind: str, model: Path) -> Iterator[dict[str, Any]]:
    """The entry of a job: the kind, and the address of a server if it needs one."""
    if kind not in ("vllm_server", "openai"):
        yield {"kind": kind}
        return
    with serve_model(model) as url:
        yield {"kind": kind, "url": url} | ({"url": f"{url}/v1", "model": "tiny"} if kind == "openai" else {})


@pytest.mark.parametrize("kind", only_long(*KINDS))
def test_a_plain_job_runs_and_learns_with_an_engine_by_its_kind_alone(kind: str, tmp_path: Path) -> None:
    if kind not in ("builtin", "transformers"):
        pytest.importorskip("vllm")
    sizes: dict[str, Any] = {"kind": "builtin", "max_position_embeddings": 512 + TOKENS} if kind == "builtin" else {}
    make(tmp_path / "model", **sizes)
    draws, lengths = np.random.default_rng(0), np.linspace(SHORTEST, LONGEST, 128).astype(int)
    texts = ["".join(map(chr, draws.integers(97, 123, length))) for length in draws.permutation(lengths)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"question": text}) for text in texts))
    (tmp_path / "even_reward.py").write_text(REWARD)
    restarts: list[str] = []

    def hear(label: str, event: Event) -> None:
        if isinstance(event, Figures) and event.kind == RESTART:
            restarts.append(f"{label}: {event.values}")

    with engine_of(kind, tmp_path / "model") as engine:
        job = job_from_values(
            {
                "name": "bare",
                "steps": STEPS,
                "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
                "data": {
                    "path": str(tmp_path / "data.jsonl"),
                    "template": "{question}",
                    "prompt_tokens_max": 512,
                    "overlong": "refuse",
                },
                "engine": [engine],
                "sampling": {"tokens_max": TOKENS},
                "reward": [{"function": "even_reward:even"}],
                "algorithm": {"kind": "grpo"},
                "trainer": {"prompts_per_step": 8, "lr": 1e-3},
                "pacing": {"max_staleness": STEPS - 1} if kind == "openai" else {},  # its weights stay
                "weights": {"dtype": "float32"},
                "queue": {"memory_gib": 0.25},
            }
        )
        outcome = run_job(job, folder=RunFolder(tmp_path / "run"), code=tmp_path, observe=hear)
    assert restarts == []
    assert outcome.audit.done == STEPS * 8 * 8
    first, last = outcome.summary.figures["reward"]
    assert last - first > 0.1 or kind == "openai", (first, last)
