"""Records the first steps of verl's synchronous trainer, then ends its run.

`Runner` is the Ray actor that `run_ppo` starts in the place of verl's own task runner, which it runs: the trainer that
is registered for ``sync`` is `recorder`'s. Its public methods `on_train_begin` and `step` record. The schedule of the
learning rate is that of the whole run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import ray
from msgspec.structs import replace

from transferqueue.workflows.adopt.trial.of_verl.rows import FIELDS, recorded
from transferqueue.workflows.job.reward_terms.piped_process import write_message

_FIGURES: Final = {
    "actor/loss": "loss",
    "actor/kl_loss": "kl",
    "actor/grad_norm": "gradient_norm",
    "actor/lr": "lr",
}
"""verl's figures, by their names in `compare.FIGURES`. Its rate is that of the step after."""


@ray.remote
class Runner:
    """Runs a configuration. path: file that gets the steps, a message each. steps: to take."""

    def __init__(self, path: str, steps: int) -> None:
        self.path, self.steps = Path(path), steps

    def run(self, config: Any) -> None:
        """Train, as verl's task runner does."""
        from verl.trainer.main_ppo import TaskRunnerV1
        from verl.trainer.ppo.v1 import trainer_base, trainer_sync

        trainers = trainer_base.TRAINER_REGISTRY
        trainers["sync"] = recorder(trainer_sync.PPOTrainerSync, self.path, self.steps)
        TaskRunnerV1.__ray_metadata__.modified_class().run(config)


def recorder(trainer: Any, path: Path, steps: int) -> Any:
    """Return a class that writes each of its first steps to `path`, then ends."""
    import transfer_queue

    class Recorder(trainer):  # type: ignore[misc]
        total_training_steps: int
        steps_of_run: int

        def on_train_begin(self) -> None:
            super().on_train_begin()
            self.steps_of_run = self.total_training_steps
            self.total_training_steps = min(steps, self.steps_of_run)

        def step(self, metrics: Any, timing_raw: Any) -> Any:
            batch = super().step(metrics, timing_raw)
            chosen = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
            keys = [batch.keys[place] for place in chosen]
            prompt = self.config.data.prompt_key
            columns = [name for name in self.train_dataset.dataframe.column_names if name != prompt]
            stored = transfer_queue.kv_batch_get(
                keys=keys, partition_id=batch.partition_id, select_fields=[*FIELDS, *columns]
            )
            rows = {name: _plain(stored[name]) for name in stored.keys()}  # noqa: SIM118  (of a TensorDict)
            figures = {ours: float(metrics[name]) for name, ours in _FIGURES.items() if name in metrics}
            step = recorded(self.global_steps, self.steps_of_run, keys, rows, figures, prompt)
            with path.open("ab") as file:
                write_message(file.write, replace(step, queue=transfer_queue.__name__))
            return batch

    return Recorder


def _plain(column: Any) -> list[Any]:
    """Return the values of a field: lists of numbers of a tensor, else what was put."""
    if getattr(column, "is_nested", False):
        return [row.tolist() for row in column.unbind()]
    return list(column.tolist() if hasattr(column, "tolist") else column)
