"""TRL's side of a trial: ``trl grpo`` by its own script, with its first steps recorded.

The trainer is TRL's own class. Three of its public seams record: a reward function that has no weight gets the rows of
the data and the responses; `compute_loss` has the prompts' tokens and the advantages; a callback gets the figures, and
ends the run. The schedule is that of the whole run. It sees one GPU at most: with several the trainer would spread a
batch over them, and so train another number of rows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transferqueue.errors import UsageError
from transferqueue.workflows.adopt.mapping import Settings
from transferqueue.workflows.adopt.trial.compare import SideStep
from transferqueue.workflows.adopt.trial.side import Send, carried, run_side

MODULE: Final = __name__
PACKAGE: Final = "trl"
MODEL: Final = "model_name_or_path"
_OURS: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "bf16": False,
    "fp16": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": "none",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "log_completions": False,
    "disable_tqdm": True,
}
"""Options of a trial, whatever the job has: numbers in float32, nothing saved, every step logged."""
_LEFT_OUT: Final = (
    *("num_processes", "num_machines", "config_file", "accelerate_config", "config", "overwrite_output_dir"),
    *("torch_dtype", "resume_from_checkpoint", "run_name", "logging_dir", "hub_model_id"),
)
_LISTS: Final = ("reward_funcs", "reward_weights")
"""Options with a list, which a command line may give as one word."""
_FIGURES: Final = {
    "reward": "reward",
    "loss": "loss",
    "kl": "kl",
    "grad_norm": "gradient_norm",
    "learning_rate": "lr",
}
"""TRL's figures, by their names in `compare.FIGURES`."""
_NOT_DATA: Final = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a reward function that are no columns of the data."""


def check(settings: Settings) -> None:
    """Raise `UsageError` for a job whose losses on the same rows depend on what a trial cannot hold equal."""
    accumulated = settings.whole("gradient_accumulation_steps")
    parts, one_update = settings.whole("steps_per_generation") or accumulated, f"--steps_per_generation {accumulated}"
    if settings["generation_batch_size"] is not None:
        rows = settings.whole("per_device_train_batch_size")
        parts = settings.whole("generation_batch_size") // max(1, rows)
        one_update = f"--generation_batch_size {rows * accumulated}"
    given = {
        "--num_processes 1": (settings.whole("num_processes") > 1, "a trial has one process of each side"),
        "--use_vllm false": (settings.is_on("use_vllm"), "the loss would depend on vLLM's log-probs"),
        "--use_peft false": (settings.is_on("use_peft"), "adapters begin with random numbers of each side's own"),
        one_update: (
            parts != accumulated,
            "each side deals the rows of a generation to its updates by a draw of its own",
        ),
    }
    for option, (is_needed, why) in given.items():
        if is_needed:
            raise UsageError(f"--try: {why}; give {option} after the file and --")


def options(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the configuration of TRL's side, whose files go to `folder`."""
    given: dict[str, Any] = {}
    for key, value in settings.given.items():
        table, dot, name = key.partition(".")
        if dot:
            given.setdefault(table, {})[name] = value
        elif key not in _LEFT_OUT:
            given[key] = [value] if key in _LISTS and not isinstance(value, list) else value
    return {**given, **_OURS, "output_dir": str(folder)}


def first_visible(devices: str | None) -> str:
    """Return the first of the visible GPUs. devices: their list as CUDA reads it; None: all of them.

    >>> first_visible("3,1"), first_visible(None), first_visible("")
    ('3', '0', '')
    """
    return "0" if devices is None else devices.partition(",")[0]


class _Enough(Exception):
    """The steps are taken."""


def run(words: list[str], send: Send) -> None:
    """Train by TRL's script. words: its configuration, and the number of steps."""
    os.environ["CUDA_VISIBLE_DEVICES"] = first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    trl: Any = importlib.import_module("trl")
    script: Any = importlib.import_module("trl.scripts.grpo")
    config, steps = words
    trl.GRPOTrainer = _recorder(trl.GRPOTrainer, importlib.import_module("transformers"), int(steps), send)
    try:
        script.main(*script.make_parser().parse_args_and_config(["--config", config], fail_with_unknown_args=True))
    except _Enough:
        return


def _recorder(trainer: Any, transformers: Any, steps: int, send: Send) -> Any:
    """Return a trainer class that sends each of its first steps, then ends. A step is one generation, with all its
    updates."""
    from transferqueue.workflows.job.training.passes import of_updates as means

    class Recorder(trainer):  # type: ignore[misc]
        def __init__(self, *, reward_funcs: list[Any], args: Any, **others: Any) -> None:
            args.reward_weights = [*(args.reward_weights or [1.0] * len(reward_funcs)), 0.0]
            self.step_rows, self.step_figures, self.taken = _StepRows(args), list[dict[str, float]](), 0
            super().__init__(reward_funcs=[*reward_funcs, self.step_rows.drawn], args=args, **others)
            self.add_callback(_callback(transformers.TrainerCallback, self.logged))

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **others: Any) -> Any:
            self.step_rows.trained(inputs)
            return super().compute_loss(model, inputs, *given, **others)

        def logged(self, logs: Mapping[str, Any], updates: int) -> None:
            self.step_figures.append({ours: logs[name] for name, ours in _FIGURES.items() if name in logs})
            each = max(1, self.args.steps_per_generation // self.args.gradient_accumulation_steps)
            each *= self.args.num_iterations
            if len(self.step_figures) < each:
                return
            self.taken += 1
            send(self.step_rows.step(self.taken, means(self.step_figures), updates // each))
            self.step_rows, self.step_figures = self.step_rows.cleared(), []
            if self.taken == steps:
                raise _Enough

    return Recorder


def _callback(base: Any, logged: Any) -> Any:
    class Logged(base):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **others: Any) -> None:
            if "loss" in logs:
                logged(logs, state.max_steps)

    return Logged()


class _StepRows:
    """The rows of a step."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._drawn: Mapping[str, Any] = {}
        self._prompts: list[list[int]] = []
        self._rows: list[tuple[list[int], float]] = []

    def cleared(self) -> _StepRows:
        """Forget the rows."""
        self._prompts, self._rows = [], []
        return self

    def drawn(self, **given: Any) -> list[None]:
        """A reward function without a reward: it gets the columns of the data, and the responses."""
        self._drawn = given
        return [None] * len(given["prompts"])

    def trained(self, inputs: Mapping[str, Any]) -> None:
        """Add the rows of a pass. Later updates of a step have the same ones."""
        if len(self._prompts) >= len(self._drawn["prompts"]):
            return
        for row, advantage in enumerate(inputs["advantages"].tolist()):
            prompt, response = (
                inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row].bool()].tolist()
                for part in ("prompt", "completion")
            )
            self._prompts.append(prompt)
            if response:
                self._rows.append((response, advantage))

    def step(self, number: int, figures: dict[str, float], steps: int) -> SideStep:
        """Return the step with its rows."""
        columns = {name: values for name, values in self._drawn.items() if name not in _NOT_DATA}
        data = [
            {
                "prompt": self._drawn["prompts"][row],
                **{name: carried(name, values[row]) for name, values in columns.items()},
            }
            for row in range(0, len(self._drawn["prompts"]), self._args.num_generations)
        ]
        completions = [[int(token) for token in ids] for ids in self._drawn["completion_ids"]]
        return SideStep(
            step=number,
            figures=figures,
            prompts=self._prompts,
            rows=self._rows,
            steps=steps,
            data=data,
            completions=completions,
        )


if __name__ == "__main__":
    run_side(run)
