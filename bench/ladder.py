"""What each step of overlapping gains, on real jobs by turns: ``python -m bench.ladder modes --engine vllm``.

A ladder is a list of rungs, and each rung is the same job file with a few other settings, so what is measured is what
users run. All rungs have the same model, data, optimizer and rows a step; they run one after the other, in the other
direction each second time; figures are over the steps after the first.

- *modes*: the modes of a job beside `bench.plain_loop`, the loop of a hundred lines that one would write without a
  queue, and with transformers beside TRL's GRPOTrainer, alone and with a queue that generates ahead of its requests.
  Responses end as the model ends them.
- *asyncflow*: AsyncFlow's ablation. An engine and a trainer with a core each, a reference and a reward model as
  processes; whole batches, then streamed steps, then asynchronous ones. Scoring streams in all of them.
- *streamrl*: StreamRL's ablation. Engine and trainer in turn on all cores, then two engines and a trainer: whole
  batches, streamed steps and asynchronous ones, each without dispatch by length and with it. Recall is the ranker's, of
  the longest fifth of rows that it had not seen, in the second half of the run.
- *elastic*: StreamRL's adjustment of the number of engines, asynchronous: one engine, one that may become three, and
  three. Engines are paced.
- *reward*: what asynchrony costs in reward at equal samples. Synchronous steps, then asynchronous ones one and four
  batches ahead, each with the correction of a job file (`algorithm.old = "trainer"`, `tis_max = 2`) and without
  (`old = "rollout"`); the built-in engine, a seed a turn; the reward of held-out prompts after the run, and that of all
  trained rows.
- *lora*: a job with adapters whose versions are merged weights, and one that publishes the adapters alone, which vLLM
  takes as LoRA requests and other engines merge: the same figures, and the bytes of a version. Synchronous steps, so
  that nothing depends on the time.
- *record*: what `queue.record` costs: asynchronous steps without it and with it. Only some steps overlap the writing of
  a file, so a second ratio, *all steps*, is of the seconds from the first step to the last.
- *sampler*: what prompts by pass rate gain: `data.sampler` and the order of the data, on prompts of which eight in
  twenty are solved by any response, eight by none before the end, and the others one after the other. Synchronous
  steps, a seed a turn; the steps, and the tokens generated in them, until an evaluation of held-out prompts has the
  reward ``--until``. There is one every two steps.
- *uses*: what rows that are trained again save: one, two and four uses (`pacing.uses`) of each row in batches of the
  same size, so with all, half and a quarter of the new prompts a step; two uses without the correction of a job file;
  and half of the prompts without further uses.
  Synchronous steps, a seed a turn; steps and tokens until a held-out reward as in *sampler*, and rewards as in
  *reward*.

In asyncflow and streamrl a response has a length that its prompt and seed decide (`bench.given_lengths`), ``--skew
published`` or ``mild``. ``--engine paced`` takes the published times of a 7B model and no core: then a run says what
waits for what.

Beside each rung of these two stands its bound, from the seconds that a step of whole batches spends in each stage:
their sum for whole batches, the longest of generation and training for streamed steps, and the longest of all for
asynchronous ones; for both at least what all stages compute, divided by the cores. And the planner's prediction
(`bench.predicted`), from a profile of the job with trials of 12 steps before the first run.
On a machine that does other work too, set ``OMP_NUM_THREADS=1``: threads that wait for each other say nothing.
``--keep FOLDER`` keeps the runs: the same command goes on after those that the folder has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from bench.given_lengths import ENGINES, SKEWS, texts
from bench.harness import ROOT
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.predicted import PROFILE, Prediction
from bench.run_record import into_option, save_record, show

PLAIN: Final = "plain loop"
TRL: Final = "TRL"
TRL_AHEAD: Final = "TRL, ahead"
SCRIPTS: Final = {PLAIN: "bench.plain_loop", TRL: "bench.trl_loop", TRL_AHEAD: "bench.trl_loop"}
"""Rungs that are no jobs: programs that train the same."""
WHOLE: Final = {"pacing.mode": "sync", "trainer.stream": "off"}
STREAMED: Final = {"pacing.mode": "sync", "trainer.stream": "on"}
AHEAD: Final = {"pacing.mode": "async"}
BY_LENGTH: Final = {"dispatch.kind": "length"}
FOUR_AHEAD: Final = AHEAD | {"pacing.depth": "4"}
CORRECTED: Final = {"algorithm.old": "trainer", "algorithm.tis_max": "2.0"}
UNCORRECTED: Final = {"algorithm.old": "rollout"}
EVALUATED_EXACTLY: Final = {"pacing.mode": "sync", "weights.keep": "128"}
"""Evaluations lag behind, and each needs the weights of its step."""
USES: Final = EVALUATED_EXACTLY | {"checkpoint.every": "10", "checkpoint.keep": "1"}
BY_RATE: Final = {"data.sampler.by": "pass_rate", "data.sampler.low": "0.1", "data.sampler.high": "0.9"}
LORA: Final = {"pacing.mode": "sync", "trainer.lora_rank": "8", "trainer.lora_alpha": "16.0"}
LADDERS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "modes": {
        PLAIN: {},
        TRL: {},
        TRL_AHEAD: {},
        "colocated": {"pacing.mode": "colocated"},
        "whole batches": WHOLE,
        "streamed": STREAMED,
        "delayed": {"pacing.mode": "delayed"},
        "asynchronous": AHEAD,
    },
    "asyncflow": {"whole batches": WHOLE, "streamed": STREAMED, "asynchronous": AHEAD},
    "streamrl": {
        "colocated": {"pacing.mode": "colocated"},
        "whole batches": WHOLE,
        "whole batches, dispatch": WHOLE | BY_LENGTH,
        "streamed": STREAMED,
        "streamed, dispatch": STREAMED | BY_LENGTH,
        "asynchronous": AHEAD,
        "asynchronous, dispatch": AHEAD | BY_LENGTH,
    },
    "elastic": {
        "one engine": AHEAD,
        "one to three engines": AHEAD | {"elastic.max": "3"},
        "three engines": AHEAD | {"engine.0.count": "3"},
    },
    "reward": {
        "synchronous": {"pacing.mode": "sync"},
        "asynchronous": AHEAD | CORRECTED,
        "asynchronous, uncorrected": AHEAD | UNCORRECTED,
        "four ahead": FOUR_AHEAD | CORRECTED,
        "four ahead, uncorrected": FOUR_AHEAD | UNCORRECTED,
    },
    "lora": {
        "merged": LORA | {"weights.lora": "merged"},
        "adapters alone": LORA | {"weights.lora": "adapter"},
    },
    "record": {"no record": AHEAD, "record": AHEAD | {"queue.record": "on"}},
    "sampler": {
        "in the order of the data": EVALUATED_EXACTLY,
        "by pass rate": EVALUATED_EXACTLY | BY_RATE,
    },
    "uses": {
        "one use": USES,
        "two uses": USES | {"pacing.uses": "2", "trainer.prompts_per_step": "4"},
        "four uses": USES | {"pacing.uses": "4", "trainer.prompts_per_step": "2"},
        "two uses, uncorrected": USES | UNCORRECTED | {"pacing.uses": "2", "trainer.prompts_per_step": "4"},
        "half of the prompts": USES | {"trainer.prompts_per_step": "4"},
    },
}
"""Rungs of each ladder, and the settings that each changes. Ratios are to the first."""
UNTIL_HELD_OUT: Final = ("sampler", "uses")
"""Ladders that count the steps and tokens until a held-out reward."""
REWARDED: Final = ("reward", "lora", *UNTIL_HELD_OUT)
"""Ladders that compare rewards."""
PLAIN_JOBS: Final = ("modes", "record", *REWARDED)
"""Ladders of jobs with an engine by its kind, one reward function, and responses that end as the model ends them."""
ENGINES_OF: Final = {
    "modes": ("vllm", "transformers"),
    "elastic": ("paced",),
    "reward": ("builtin", "vllm", "transformers"),
    "lora": ("vllm", "transformers"),
    "record": ("builtin", "vllm", "transformers"),
    "sampler": ("builtin", "vllm", "transformers"),
    "uses": ("builtin", "vllm", "transformers"),
}
"""Engines of the ladders that do not have all those of given lengths."""
SCORED: Final = ("asyncflow", "streamrl")
"""Ladders of jobs with a reference and a reward model."""
PUBLISHED: Final = {
    "asyncflow": "1.00, 2.01 with TransferQueue, 2.74 asynchronous (7B, 512 NPUs)",
    "streamrl": "1.00 colocated, 1.08 with dispatch, 1.23 streamed, 1.48 asynchronous (72B)",
}
UNTIL: Final = 0.58
"""Held-out reward until which `sampler` counts the steps: the prompts that any response solves and the four others
before the hardest give 0.6."""
USUAL: Final[Mapping[str, Any]] = {"engine": "transformers", "size": "rounds", "runs": 3, "steps": 12, "lr": 1e-4}
USUAL_OF: Final[Mapping[str, Mapping[str, Any]]] = {
    "modes": {"size": "tiny"},
    "elastic": {"engine": "paced", "size": "paced", "steps": 30},
    "reward": {"engine": "builtin", "size": "tiny", "runs": 5, "steps": 30},
    "lora": {"size": "tiny", "steps": 30, "lr": 4e-3},
    "record": {"engine": "builtin", "size": "tiny", "runs": 5, "steps": 30},
    "sampler": {"engine": "builtin", "size": "tiny", "steps": 80, "until": UNTIL},
    "uses": {"engine": "builtin", "size": "tiny", "steps": 60, "until": 0.9},
}
"""What a ladder takes where the command does not say."""
QUICK: Final = {"runs": 1, "steps": 2}
RUN_S: Final = 1800.0
PROMPT_TOKENS: Final = 40
LEAST: Final = (*[0] * 8, 14, 16, 18, 20, *[22] * 8)
"""Of twenty prompts of the ladder `sampler`: the even tokens that a response needs to solve each. A model that knows
nothing has about twelve, of 24 tokens."""
HELD_OUT: Final = 128
"""Prompts whose reward ends a run of a ladder that compares rewards, with two responses each."""
KEPT, SETTINGS = "runs.jsonl", "settings.json"
"""Files of ``--keep``: each run as a line, and what all of them have in common."""


@dataclass(frozen=True)
class Size:
    """A model (changes of the tiny one's configuration) and its task: prompts a step, responses to each, rows of an
    engine at once, tokens of the longest response."""

    model: Mapping[str, int]
    prompts: int
    group: int
    slots: int
    tokens: int

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.prompts * self.group


SIZES: Final = {
    "tiny": Size({}, 8, 8, 64, 24),
    "small": Size({"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 5}, 8, 8, 64, 64),
    "short": Size({"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 5}, 8, 8, 64, 8),
    "rounds": Size({"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4}, 16, 8, 16, 192),
    "paced": Size({}, 16, 8, 8, 192),
}
"""About 140,000, 9 million, 9 million, 2 million and 140,000 parameters. short: little to generate. rounds: a step
takes an engine several rounds of slots. paced: many rounds, and little to train."""

JOB: Final = """
name = "ladder"
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = {prompt_tokens} }}
engine = [{engines}]
sampling = {{ group_size = {group}, tokens_max = {tokens} }}
reward = [{rewards}]
algorithm = {{ kind = "grpo", kl = {kl} }}
trainer = {{ prompts_per_step = {prompts} }}
weights = {{ dtype = "float32" }}
checkpoint = {{ every = 0 }}
log = {{ samples = 0 }}
queue = {{ memory_gib = 0.25 }}
"""
EVALUATION: Final = f"""
evaluation = {{{{ path = "data", every = {{every}}, rows = {HELD_OUT}, samples = 2, temperature = 1.0 }}}}
"""
REWARD: Final = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def solved(completion_ids, least, **columns):
    return [float(sum(token % 2 == 0 for token in ids) >= wanted) for ids, wanted in zip(completion_ids, least)]
"""


@dataclass(frozen=True)
class RungRun:
    """One run of a rung.

    Attributes:
        rows: Of a step.
        seconds: Of each step after the first.
        whole_s: From the start of the run's command to its end.
        stages: Seconds of a step that each stage computes; none for a program without a queue.
        reached_s: See `reached_s`.
        reward: Mean over all steps.
        held_out: Mean reward of the held-out prompts after the run; NaN: they were not evaluated.
        staleness: Versions between the weights of a row and those of the trainer, mean over all rows.
        recall: The ranker's; NaN: the rung has no dispatch, or too few steps.
        version_bytes: That the trainer wrote for a version, mean over all.
        reached_steps: Steps before the first evaluation with the reward; NaN: none had it.
        reached_tokens: That were generated in them.
    """

    rows: int
    seconds: Sequence[float]
    whole_s: float
    stages: Mapping[str, float]
    reached_s: float = math.nan
    reward: float = math.nan
    held_out: float = math.nan
    staleness: float = 0.0
    recall: float = math.nan
    version_bytes: float = 0.0
    reached_steps: float = math.nan
    reached_tokens: float = math.nan

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.rows / median(self.seconds)


# ---------------------------------------------------------------- the job


def prepare(place: Path, chosen: argparse.Namespace) -> None:
    """Write models, data, reward and job file."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    size = SIZES[chosen.size]
    if chosen.engine == "builtin":
        make(place / "model", kind="builtin", max_position_embeddings=PROMPT_TOKENS + size.tokens, **size.model)
    else:
        make(place / "model", tie_word_embeddings=False, **size.model)
    rewards = [f'{{ function = "even_reward:{"solved" if chosen.ladder == "sampler" else "even"}" }}']
    (place / "even_reward.py").write_text(REWARD)
    if chosen.ladder in PLAIN_JOBS:
        write_data(place / "data", train=2048, test=HELD_OUT)
        for file in (place / "data").glob("*.jsonl") if chosen.ladder == "sampler" else ():
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            with_least = [line | {"least": LEAST[at % len(LEAST)]} for at, line in enumerate(lines)]
            file.write_text("".join(json.dumps(line) + "\n" for line in with_least))
    else:
        (place / "data").mkdir()
        lines = [json.dumps({"question": text}) for text in texts(2048, seed=0)]
        (place / "data" / "train.jsonl").write_text("\n".join(lines))
    if chosen.ladder in SCORED:
        make(place / "judge", kind="classifier")
        rewards.append('{ model = "judge" }')
    terms = {"prompts": size.prompts, "group": size.group, "tokens": size.tokens, "rewards": ", ".join(rewards)}
    terms |= {"kl": 0.01 if chosen.ladder in SCORED else 0.0, "prompt_tokens": PROMPT_TOKENS}
    evaluation = EVALUATION.format(every=2 * (chosen.ladder in UNTIL_HELD_OUT)) if chosen.ladder in REWARDED else ""
    (place / "job.toml").write_text(JOB.format(engines=", ".join(_engines(chosen)), **terms) + evaluation)


def _engines(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the entries of ``engine``."""
    size = SIZES[chosen.size]
    if chosen.ladder in PLAIN_JOBS:
        options = f"{{ max_model_len = {size.tokens + 64} }}" if chosen.engine == "vllm" else "{}"
        yield f'{{ kind = "{chosen.engine}", slots = {size.slots}, options = {options} }}'
        return
    for core in range(2 if chosen.ladder == "streamrl" else 1):
        alone = "" if chosen.engine == "paced" else f", core = {core}"
        options = f'{{ longest = {size.tokens}, skew = "{chosen.skew}"{alone} }}'
        factory = f'kind = "factory", factory = "bench.given_lengths:{chosen.engine}"'
        yield f"{{ {factory}, slots = {size.slots}, options = {options} }}"


def changes(rung: str, chosen: argparse.Namespace) -> dict[str, str]:
    """Return the settings of a rung. In mode colocated there is one engine, without a core of its own. vLLM takes
    adapters alone as LoRA requests."""
    found = dict(LADDERS[chosen.ladder][rung])
    if chosen.engine == "vllm" and found.get("weights.lora") == "adapter":
        found["engine.0.options.enable_lora"] = "true"
    if chosen.ladder == "streamrl" and found["pacing.mode"] == "colocated":
        found["engine"] = _one_engine(chosen).replace(", core=0", "")
    return found


def _one_engine(chosen: argparse.Namespace) -> str:
    """Return the first engine alone, as ``--set`` takes it."""
    return f"[{next(_engines(chosen))}]".replace(" = ", "=")


def predicted(place: Path, chosen: argparse.Namespace) -> Prediction | None:
    """Return the planner's prediction from a profile of the job, which it measures if the folder has none; None for
    ladders without bounds, and for paced engines."""
    if chosen.ladder not in SCORED or chosen.engine == "paced":
        return None
    if not (place / PROFILE).exists():
        values = {"engine": _one_engine(chosen), "trainer.lr": str(chosen.lr)}
        _command(place, ["bench.predicted", ".", *(f"{key}={value}" for key, value in values.items())])
    return Prediction.read(place / PROFILE, engines=len([*_engines(chosen)]))


# ---------------------------------------------------------------- runs


def run(place: Path, rung: str, turn: int, chosen: argparse.Namespace) -> RungRun:
    """Run one rung whole. `SystemExit` with its last lines if it fails."""
    size, name = SIZES[chosen.size], f"{rung.replace(', ', '-').replace(' ', '-')}-{turn}"
    if rung in SCRIPTS:
        shape: dict[str, Any] = {"steps": chosen.steps, "prompts": size.prompts, "group": size.group}
        shape |= {"tokens": size.tokens, "seed": turn, "lr": chosen.lr}
        shape |= {"engine": chosen.engine} if rung == PLAIN else {"ahead": int(rung == TRL_AHEAD)}
        words = [SCRIPTS[rung], ".", *(f"--{key}={value}" for key, value in shape.items())]
    else:
        words = ["transferqueue.cli", "train", "job.toml", "--out", name, "--no-page"]
        values = {"steps": str(chosen.steps), "seed": str(turn), "trainer.lr": str(chosen.lr)} | changes(rung, chosen)
        words += [f"--set={key}={value}" for key, value in values.items()]
        shutil.rmtree(place / name, ignore_errors=True)  # of a run that was stopped
    began = time.monotonic()
    done = _command(place, words)
    whole_s = time.monotonic() - began
    steps = done.stdout if rung in SCRIPTS else (place / name / "steps.jsonl").read_text()
    lines = [json.loads(line) for line in steps.splitlines() if line.startswith('{"')]
    seconds = [later["at"] - earlier["at"] for earlier, later in pairwise(lines)]
    reward = mean(line["reward"] for line in lines)
    rows = lines[-1].get("rows", size.rows) + lines[-1].get("reused_rows", 0)
    found = RungRun(rows, seconds, whole_s, {}, reached_s(lines, chosen.until), reward)
    return found if rung in SCRIPTS else replace(found, **_of_job(place / name, lines, chosen.until))


def reached_s(lines: Sequence[Mapping[str, Any]], until: float | None) -> float:
    """Return the seconds from the first step to that after which the mean reward of three steps is `until`; NaN: it was
    not reached, or none was asked for."""
    rewards = [line["reward"] for line in lines]
    for place in range(3, len(rewards) + 1):
        if until is not None and sum(rewards[place - 3 : place]) / 3 >= until:
            return float(lines[place - 1]["at"] - lines[0]["at"])
    return math.nan


def _of_job(folder: Path, lines: Sequence[Mapping[str, Any]], until: float | None) -> dict[str, Any]:
    """Return what the folder of a run says beside its steps."""
    summary = json.loads((folder / "summary.json").read_text())
    step_s = summary["trained_s"] / summary["steps"]
    stages = {name: share * step_s for name, share in summary["busy"].items()}
    stages |= {"train": median(line["passes_s"] + line["update_s"] for line in lines[1:])}
    rows = summary["staleness"]
    staleness = sum(int(versions) * count for versions, count in rows.items()) / sum(rows.values())
    held_out = math.nan if summary["after"] is None else summary["after"]
    reached = _reached_steps(folder / "evaluations.jsonl", until)
    return {
        "stages": stages,
        "staleness": staleness,
        "held_out": held_out,
        "recall": _recall(folder / "ranker.jsonl"),
        "version_bytes": summary["publications"].get("train-0", {}).get("bytes", 0.0),
        "reached_steps": reached,
        "reached_tokens": sum(line["rows"] * line["length_mean"] for line in lines if line["step"] <= reached)
        or math.nan,
    }


def _reached_steps(file: Path, until: float | None) -> float:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return min(
        (float(line["step"]) for line in lines if until is not None and line["reward"] >= until), default=math.nan
    )


def _recall(file: Path) -> float:
    """Return the mean recall of the later half of a run's refits."""
    refits = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    recalls = [refit["recall_20"] for refit in refits[len(refits) // 2 :] if "recall_20" in refit]
    return mean(recalls) if recalls else math.nan


def _command(place: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # as a job's engine has them
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=place,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return done


def measured(place: Path, chosen: argparse.Namespace) -> dict[str, list[RungRun]]:
    """Run all rungs in turns, but for the runs that the folder has."""
    have = kept(place)
    found: dict[str, list[RungRun]] = {rung: [] for rung in chosen.rungs}
    for turn in range(chosen.runs):
        for rung in chosen.rungs if turn % 2 == 0 else chosen.rungs[::-1]:
            last = have.get((rung, turn)) or run(place, rung, turn, chosen)
            found[rung].append(last)
            if (rung, turn) not in have:
                keep(place, rung, turn, last)
            print(f"{rung} {turn}: {_said(last)}", flush=True)
    return found


def _said(last: RungRun) -> str:
    """Return the line that tells of a run."""
    said = f"{last.rate:.2f} samples/s, {last.whole_s:.0f} s in all"
    said += "" if math.isnan(last.held_out) else f"; reward {last.reward:.3f}, held out {last.held_out:.3f}"
    return "; ".join([said, *(f"{stage} {seconds:.2f}" for stage, seconds in last.stages.items())])


def keep(place: Path, rung: str, turn: int, last: RungRun) -> None:
    """Add a run to those that a folder has."""
    with (place / KEPT).open("a") as file:
        file.write(json.dumps({"rung": rung, "turn": turn, **asdict(last)}) + "\n")


def kept(place: Path) -> dict[tuple[str, int], RungRun]:
    """Return the runs that a folder has, by rung and turn."""
    file = place / KEPT
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(line.pop("rung"), line.pop("turn")): RungRun(**line) for line in lines}


def begin(place: Path, settings: Mapping[str, Any], chosen: argparse.Namespace) -> None:
    """Prepare a folder, or go on with one of the same settings. `SystemExit` for one of others."""
    file = place / SETTINGS
    if not file.exists():
        place.mkdir(parents=True, exist_ok=True)
        prepare(place, chosen)
        file.write_text(json.dumps(settings))
    elif (before := json.loads(file.read_text())) != settings:
        raise SystemExit(f"{place} has runs of {before}, and these are of {dict(settings)}; give another folder")


# ---------------------------------------------------------------- results

REWARDS: Final[Mapping[str, Callable[[RungRun], float]]] = {
    "held-out reward": lambda run: run.held_out,
    "reward of the run": lambda run: run.reward,
}
"""What `REWARDED` compare: the policy at the end, and the mean over all trained rows."""


def bound_s(settings: Mapping[str, str], stages: Mapping[str, float], cores: float, *, paced: bool = False) -> float:
    """Return the least seconds of a step.

    Args:
        settings: of the rung.
        stages: seconds of a step that each stage computes, where they take turns.
        cores: that all stages share.
        paced: the engine needs no core.
    """
    mode, generated, trained = settings["pacing.mode"], stages["rollout"], stages["train"]
    computed = sum(stages.values()) - generated * paced
    if mode == "async":
        return max(*stages.values(), computed / cores)
    streams = mode == "sync" and settings.get("trainer.stream") == "on"
    return max(generated, trained, computed / cores) if streams else generated + trained


def _of_rung(rung: str, runs: Sequence[RungRun], ladder: str) -> Iterator[MeasuredResult]:
    """Give the figures of a rung alone."""
    yield summarize(f"{rung}: samples a second", "1/s", [each.rate for each in runs])
    yield summarize(f"{rung}: whole run", "s", [each.whole_s for each in runs])
    if reached := [each.reached_s for each in runs if not math.isnan(each.reached_s)]:
        yield summarize(f"{rung}: until the reward, {len(reached)} of {len(runs)} runs", "s", reached)
    for unit in ("steps", "tokens"):
        values = [getattr(each, f"reached_{unit}") for each in runs]
        if reached := [value for value in values if not math.isnan(value)]:
            name = f"{rung}: {unit} until the held-out reward, {len(reached)} of {len(runs)} runs"
            yield summarize(name, "count", reached)
    if stages := [each.stages for each in runs if each.stages.keys() >= {"rollout", "train"}]:
        yield summarize(f"{rung}: generation", "s", [each["rollout"] for each in stages])
        yield summarize(f"{rung}: training", "s", [each["train"] for each in stages])
    if recalls := [each.recall for each in runs if not math.isnan(each.recall)]:
        yield summarize(f"{rung}: recall", "ratio", recalls)
    if ladder in REWARDED:
        for name, value in REWARDS.items():
            yield summarize(f"{rung}: {name}", "ratio", [value(each) for each in runs])
        yield summarize(f"{rung}: staleness", "ratio", [each.staleness for each in runs])
    if ladder == "lora":
        yield summarize(f"{rung}: bytes a version", "bytes", [each.version_bytes for each in runs])


def results(
    found: Mapping[str, Sequence[RungRun]],
    ladder: str,
    cores: float,
    *,
    paced: bool = False,
    prediction: Prediction | None = None,
) -> Iterator[MeasuredResult]:
    """Give samples a second of each rung, and their ratios to the first rung's by turns, to their `bound_s` and to the
    planner's prediction."""
    rungs = LADDERS[ladder]
    base = next((rung for rung in rungs if rung in found), "")
    for rung, runs in found.items():
        yield from _of_rung(rung, runs, ladder)
    for rung, runs in found.items():
        if rung != base:
            ratios = [each.rate / first.rate for each, first in zip(runs, found[base], strict=True)]
            yield summarize(f"{rung}: over {base}", "ratio", ratios)
        if rung != base and ladder == "record":
            wholes = [sum(first.seconds) / sum(each.seconds) for each, first in zip(runs, found[base], strict=True)]
            yield summarize(f"{rung}: all steps over {base}", "ratio", wholes)
        if rung != base and ladder in REWARDED:
            for name, value in REWARDS.items():
                costs = [value(first) - value(each) for each, first in zip(runs, found[base], strict=True)]
                yield summarize(f"{rung}: {name} below {base}", "ratio", costs)
        for unit in ("steps", "tokens") if rung != base else ():
            pairs = [
                [getattr(each, f"reached_{unit}") for each in pair] for pair in zip(runs, found[base], strict=True)
            ]
            shares = [own / first if first else math.nan for own, first in pairs]
            if not any(map(math.isnan, shares)):
                yield summarize(f"{rung}: {unit} until the held-out reward over {base}", "ratio", shares)
    alone = found.get("whole batches", ())
    for rung, runs in found.items():
        if alone and rung not in SCRIPTS and ladder not in PLAIN_JOBS:
            least = [bound_s(rungs[rung], first.stages, cores, paced=paced) for first in alone]
            bounds = [each.rows / seconds for each, seconds in zip(runs, least, strict=True)]
            yield summarize(f"{rung}: bound", "1/s", bounds)
            shares = [each.rate / bound for each, bound in zip(runs, bounds, strict=True)]
            yield summarize(f"{rung}: of its bound", "ratio", shares)
    for rung, runs in found.items():
        step_s = prediction.step_s(rungs[rung]) if prediction else math.nan
        if not math.isnan(step_s):
            rate = runs[0].rows / step_s
            yield single(f"{rung}: predicted", "1/s", round(rate, 3))
            yield summarize(f"{rung}: of the prediction", "ratio", [each.rate / rate for each in runs])


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ladder", choices=tuple(LADDERS))
    parser.add_argument(
        "--engine",
        choices=("builtin", *ENGINES),
        help="default: transformers; for elastic paced, for reward, record, sampler and uses builtin",
    )
    parser.add_argument(
        "--size",
        choices=tuple(SIZES),
        help="default: paced for elastic, tiny for most, rounds for asyncflow and streamrl",
    )
    parser.add_argument("--skew", choices=tuple(SKEWS), default="published", help="of lengths (default: published)")
    parser.add_argument(
        "--runs", type=int, help="of each rung (default: 3, for reward and record 5; one takes some minutes)"
    )
    parser.add_argument("--steps", type=int, help="of each run (default: 12, 30, 60 or 80)")
    parser.add_argument("--lr", type=float, help="learning rate (default: 1e-4, for lora 4e-3)")
    parser.add_argument(
        "--until",
        type=float,
        help="mean reward: the seconds until three steps have it, and the steps until held-out prompts have it "
        f"(default for sampler: {UNTIL}, for uses: {USUAL_OF['uses']['until']})",
    )
    parser.add_argument("--rungs", nargs="+", help="default: all")
    parser.add_argument("--quick", action="store_true", help="one run of two steps a rung: to try the command")
    parser.add_argument("--keep", type=Path, help="folder for the runs; the same command goes on after those it has")
    into_option(parser)
    chosen = parser.parse_args()
    _fill_in(chosen)
    if unknown := [rung for rung in chosen.rungs if rung not in LADDERS[chosen.ladder]]:
        parser.error(f"no rung {unknown[0]!r} in {chosen.ladder}; there are {', '.join(LADDERS[chosen.ladder])}")
    if chosen.engine not in (engines := ENGINES_OF.get(chosen.ladder, tuple(ENGINES))):
        parser.error(f"{chosen.ladder} has no engine {chosen.engine}; there are {', '.join(engines)}")
    measurement = Measurement()
    settings = {name: getattr(chosen, name) for name in ("ladder", "engine", "size", "skew", "steps", "lr", "until")}
    with tempfile.TemporaryDirectory(prefix="transferqueue-ladder-") as folder:
        place = (chosen.keep or Path(folder)).absolute()
        begin(place, settings, chosen)
        prediction = predicted(place, chosen)
        found, cores = measured(place, chosen), len(os.sched_getaffinity(0))
        lines = [*results(found, chosen.ladder, cores, paced=chosen.engine == "paced", prediction=prediction)]
    show(lines)
    details: dict[str, Any] = settings | {"threads": os.environ.get("OMP_NUM_THREADS", "by the mode")}
    details["published"] = PUBLISHED.get(chosen.ladder, "")
    name = f"ladder-{chosen.ladder}-{chosen.engine}-{chosen.size}"
    save_record(measurement, chosen.into, "ladder", lines, details, name=name)


def _fill_in(chosen: argparse.Namespace) -> None:
    """Set what the command did not say."""
    for name, value in {**USUAL, **USUAL_OF.get(chosen.ladder, {}), **(QUICK if chosen.quick else {})}.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    alone = {TRL, TRL_AHEAD} if chosen.engine == "vllm" else set()
    chosen.rungs = chosen.rungs or [rung for rung in LADDERS[chosen.ladder] if rung not in alone]


if __name__ == "__main__":
    main()
