"""The processes of TRL's GRPOTrainer in `bench.crash_cost`: the trainer, and with a queue the one that generates.

    python -m bench.crash_cost.trl_processes trainer SETTINGS
    python -m bench.crash_cost.trl_processes generator SETTINGS

SETTINGS is a file that `bench.crash_cost` writes. The trainer goes on from its newest checkpoint, if there is one. Its
reward function and callbacks note what it was given and what it trained.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

import transferqueue as tq
from bench.crash_cost.costs import Response, response_of
from bench.crash_cost.process_log import ProcessLog
from bench.crash_cost.run_settings import RunSettings
from transferqueue.adapters.trainers.trl import BehaviourRatio, QueueRollouts, rollout_pacing, rollout_tasks
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Context, Stage, Work

TABLE: Final = "rollouts"
FACTORY: Final = "bench.crash_cost.trl_processes:rollouts"


# ---------------------------------------------------------------- generator


@contextmanager
def rollouts(context: Context) -> Iterator[Work]:
    """Generate under the newest weights: a stage of a flow."""
    from bench.crash_cost.counting_engine import engine
    from transferqueue.adapters.protocols import Sampling
    from transferqueue.adapters.stages.generation import Generate
    from transferqueue.adapters.weights import WeightUpdater

    settings = context.settings(RunSettings)
    generator = engine(str(settings.place / "model"), slots=settings.rows, log=str(settings.log))
    end = _tokenizer(settings).eos_token_id
    follower = WeightUpdater(context.queue, "policy", generator.update_weights)
    follower.follow(timeout_s=300)
    work = Generate(generator, Sampling(tokens_max=settings.tokens, stop_ids=(end,)))

    def newest(batch: tq.Batch) -> Any:
        follower.follow()
        return work(batch)

    yield newest


def generate(settings: RunSettings) -> None:
    """Supervise the generating process until the table is sealed."""
    with tq.connect(settings.address, label="generators") as queue:
        table = queue.create_table(TABLE, tasks=rollout_tasks(), pacing=rollout_pacing(settings.rows), exist_ok=True)
        job = StageJob(
            name="rollout",
            table=TABLE,
            factory=FACTORY,
            stage=Stage(task=table.tasks["rollout"], rows=settings.rows, at_least=1),
            settings=msgspec.to_builtins(settings),
        )
        with Flow(queue, [job], directory=settings.folder / "logs", observe=lambda label, event: None) as flow:
            flow.run()


# ---------------------------------------------------------------- trainer


def train(settings: RunSettings) -> None:
    """Train to the last step, on rows that the trainer generates or takes from the queue."""
    if not settings.address:
        _train(settings, None)
        return
    with tq.connect(settings.address, label="trainer") as queue:
        table = queue.table(TABLE, timeout_s=120)
        _train(settings, QueueRollouts(queue, table=TABLE, ahead=1))
        table.seal()


def _train(settings: RunSettings, ahead: QueueRollouts | None) -> None:
    import datasets
    import transformers
    import trl

    checkpoints = settings.folder / "trainer"
    log, tokenizer, given = ProcessLog(settings.log), _tokenizer(settings), list[Response]()

    def even(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        given[:] = [response_of(tokenizer(prompt)["input_ids"], ids) for prompt, ids in _zip(prompts, completion_ids)]
        if ahead is None:
            for prompt, ids in _zip(prompts, completion_ids):
                log.responded(tokenizer(prompt)["input_ids"], ids)
        return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]

    class Notes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            log.trained(state.global_step, given)

    arguments = trl.GRPOConfig(
        output_dir=str(checkpoints),
        use_cpu=True,
        bf16=False,
        max_steps=settings.steps,
        learning_rate=1e-4,
        per_device_train_batch_size=settings.rows,
        num_generations=settings.group,
        max_completion_length=settings.tokens,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="steps",
        save_steps=settings.checkpoint_every,
        logging_steps=1,
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.place / "model", dtype="float32")
    if ahead is None:
        _count_tokens(model, tokenizer.eos_token_id, log)
    kind = trl.GRPOTrainer if ahead is None else type("Trainer", (BehaviourRatio, trl.GRPOTrainer), {})
    trainer = kind(
        model=model,
        reward_funcs=even,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": questions(settings.place)}),
        processing_class=tokenizer,
        rollout_func=ahead,
        callbacks=[Notes()] if ahead is None else [ahead, Notes()],
    )
    saved = any(checkpoints.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if saved else None)


def _count_tokens(model: Any, end: int, log: ProcessLog) -> None:
    """Have the generation of a model note each token that it draws for a row that has not ended."""
    import transformers

    class Count(transformers.LogitsProcessor):  # type: ignore[misc]
        width: int | None = None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.width = input_ids.shape[1] if self.width is None else self.width
            log.drew(int((input_ids[:, self.width :] != end).all(dim=1).sum()))
            return scores

    own = model.generate

    def generate(*inputs: Any, **options: Any) -> Any:
        return own(*inputs, logits_processor=transformers.LogitsProcessorList([Count()]), **options)

    model.generate = generate


def questions(place: Path) -> list[str]:
    """Return the prompts of the data, each once."""
    return [msgspec.json.decode(line)["question"] for line in (place / "data" / "train.jsonl").open("rb")]


def _zip(prompts: Sequence[str], ids: Sequence[list[int]]) -> Iterator[tuple[str, list[int]]]:
    return zip(prompts, ids, strict=True)


def _tokenizer(settings: RunSettings) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(settings.place / "model")


def main() -> None:
    """Be one of the processes."""
    what, path = sys.argv[1:]
    warnings.simplefilter("ignore")
    settings = msgspec.json.decode(Path(path).read_bytes(), type=RunSettings)
    {"trainer": train, "generator": generate}[what](settings)


if __name__ == "__main__":
    main()
