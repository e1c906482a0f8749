"""A short job whose whole run is `transferqueue train` in a process, for tests that watch it from outside or kill its
processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.markdown import ROOT
from transferqueue.workflows.job.data.tokenizer import CLASS_VARIABLE

STEPS = 4
ROWS = 32
"""Rows of the whole run."""
BOTH = f"""
name = "short"
reproducible = true
steps = {STEPS}
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 32 }}
engine = [{{ kind = "transformers", slots = 16 }}]
reward = [{{ function = "any_rewards:spread" }}]
pacing = {{ mode = "sync" }}
checkpoint = {{ every = 2 }}
weights = {{ dtype = "float32" }}
evaluation = {{ path = "data", every = 2, rows = 8 }}
queue = {{ memory_gib = 0.125, record = "on" }}
"""
GRPO = (
    BOTH
    + """
sampling = { group_size = 2, tokens_max = 6 }
algorithm = { kind = "grpo" }
trainer = { prompts_per_step = 4, lr = 1e-3 }
"""
)
PPO = (
    BOTH
    + """
sampling = { group_size = 1, tokens_max = 6 }
algorithm = { kind = "ppo", whiten = false }
critic = { path = "critic", lr = 1e-3 }
trainer = { prompts_per_step = 8, lr = 1e-3 }
"""
)
TOKENIZER = "transformers.tokenization_utils_tokenizers:TokenizersBackend model"
"""What a run finds out for its processes by `AutoTokenizer`, for which it loads torch: it is told, and starts four
seconds sooner."""
AHEAD = {
    'kind = "transformers", slots = 16': 'kind = "transformers", slots = 4, count = 2',
    "any_rewards:spread": 'any_rewards:spread", processes = 2, weight = 1.0, on_error = "stop',
    'mode = "sync"': 'mode = "async", max_staleness = 2',
}
"""Two generators and two reward processes, and two batches generated ahead."""


def ahead(job: str) -> str:
    """The job in mode async, with several processes of a kind."""
    for old, new in AHEAD.items():
        job = job.replace(old, new)
    return job


AGENT = GRPO.replace(
    'reward = [{ function = "any_rewards:spread" }]', 'environment = [{ factory = "any_rewards:TwoTurns" }]'
).replace("tokens_max = 6", "tokens_max = 24")
SAMPLER = '{ by = "pass_rate", low = 0.2, high = 0.8, share = 0.75, pass_reward = 0.5 }'
"""Prompts come again of whose two responses one passed."""
JOBS = {
    "grpo": GRPO,
    "ppo": PPO,
    "ppo-whitened": PPO.replace("whiten = false", "whiten = true"),
    "colocated": GRPO.replace('mode = "sync"', 'mode = "colocated"'),
    "sampled": GRPO.replace("prompt_tokens_max = 32", f"prompt_tokens_max = 32, sampler = {SAMPLER}"),
    "async-uses": ahead(GRPO).replace("max_staleness = 2", "max_staleness = 4, uses = 3"),
    "delayed": GRPO.replace('mode = "sync"', 'mode = "delayed"'),
    "async": ahead(GRPO),
    "async-ppo": ahead(PPO.replace("whiten = false", "whiten = true")),
    "async-agent": ahead(AGENT),
}
"""Fixed seeds, rows in order: each ends with the same weights, whatever is killed, and whatever is generated ahead."""

LOOK_S = 0.01
"""Time between two looks at a run from outside: a phase may be over in a tenth of a second."""

REWARDS = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class TwoTurns:
    def reset(self, *, seed, options):
        self.turn = 0
        return None, {}

    def step(self, action):
        self.turn += 1
        return "again", sum(map(ord, action)) % 7 / 7, self.turn == 2, False, {}

    def close(self):
        pass
"""
"""A reward that differs between responses of an untrained model, so that each step changes the weights; and an
environment with such a reward in each of two turns."""


def make_place(folder: Path, kind: str = "grpo", *, builtin: bool = False) -> Path:
    """Write model, data, rewards and ``job.toml`` into `folder`, which is made. builtin: a model and an engine without
    transformers, which each of their processes loads for three seconds."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    folder.mkdir(parents=True, exist_ok=True)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    size |= {"max_position_embeddings": 64} if builtin else {"num_key_value_heads": 1, "head_dim": 8}
    make(folder / "model", kind="builtin" if builtin else "qwen3", **size)
    if "ppo" in kind:
        make(folder / "critic", kind="value", **size)
    write_data(folder / "data", train=64, test=16)
    job = JOBS[kind].replace('kind = "transformers"', 'kind = "builtin"') if builtin else JOBS[kind]
    (folder / "job.toml").write_text(job)
    (folder / "any_rewards.py").write_text(REWARDS)
    return folder


def train(place: Path, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`transferqueue train`, whose output is kept for `finished`. environment: more variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "transferqueue.cli", "train", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", CLASS_VARIABLE: TOKENIZER}
        | dict(environment or {}),
    )


def undisturbed(place: Path) -> dict:
    """The summary of a run in the folder ``whole``, of which nothing is killed."""
    return finished(train(place, "job.toml", "--out", "whole", "--json"))


def finished(process: subprocess.Popen[str], timeout_s: float = 500) -> dict:
    """The summary of a run that must end with success."""
    stdout, stderr = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def lines(path: Path) -> list[dict]:
    """The lines of a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(process: subprocess.Popen[str], path: Path, rows: int) -> None:
    """Wait until a file of the run has so many lines. Fails if the run ends before, or takes too long."""
    deadline = time.monotonic() + 400
    while path.read_bytes().count(b"\n") < rows if path.exists() else rows:
        assert time.monotonic() < deadline, f"{path} has {len(lines(path))} lines, not {rows}"
        assert not ends_within(process, LOOK_S), process.communicate()


def ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    """Wait so long for the end of a process; return whether it came."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def final_weights(folder: Path) -> dict[str, bytes]:
    """The weights of a run's trainers, by task: those of their last checkpoints, which must be of the last step."""
    newest = {
        task.name: max(task.glob("step-*")) for task in sorted((folder / "checkpoints").iterdir()) if task.is_dir()
    }
    assert {path.name for path in newest.values()} == {f"step-{STEPS:08}"}, newest
    files = {task: sorted(path.glob("model*.safetensors")) for task, path in newest.items()}
    return {task: b"".join(file.read_bytes() for file in of_task) for task, of_task in files.items()}


# ---------------------------------------------------------------- processes of a run


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`; none if it is gone."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, children first."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def pid_of(run: int, name: str) -> int | None:
    """The process id of a task, of ``server`` (the serving process), of its ``supervisor``, or of the ``run`` itself;
    None if there is none."""
    if name == "run":
        return run
    direct = children(run)
    for pid in direct:
        words = _words(pid)
        if f'"name":"{name}"' in words:
            return pid
        if "\0serve\0" in words and name in ("server", "supervisor"):
            return pid if name == "supervisor" else next(iter(children(pid)), None)
    return None


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
