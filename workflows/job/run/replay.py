"""Computes steps of a run again, and says whether they come out equal or what differs first.

The run has all that this needs: a checkpoint before the step, the recorded rows from there on, and for each step the
order in which its trainer took its rows, with digests (`STEP_ROWS`). The functions are the run's own.

1. Stages of each step, in order: ``rows`` (the recorded rows are those that the trainer read), ``reward``,
   ``advantage``, ``loss`` (with all other figures of the step), ``gradient`` (its norm), ``weights`` (of a step with a
   checkpoint: weights and moments, bit for bit). The first stage that differs ends the replay.
2. Steps between the checkpoint and the one that is asked for are computed too, and compared likewise.
3. Not computed again: generation, rewards of environments, scores of models (log-probs, values), advantages that were
   whitened over rows that the time chose, and the critic's own steps. `Replay.left_out` says which of them the run has.
4. Packages and a device that are not those of the run are said before anything is computed: sums depend on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

import transferqueue as tq
from transferqueue.adapters.weight_files import host_bytes
from transferqueue.errors import Corruption, NotFound, UsageError
from transferqueue.storage.elements.values import decode
from transferqueue.workflows.job import graph, names
from transferqueue.workflows.job.algorithms.advantages import advantage_columns_of
from transferqueue.workflows.job.data.tokenizer import load_tokenizer
from transferqueue.workflows.job.reward_terms.scorer import RewardScorer
from transferqueue.workflows.job.run.folder import RunFolder, RunStart, installed_packages
from transferqueue.workflows.job.run.preflight import importable
from transferqueue.workflows.job.run_files import (
    CHECKPOINTS,
    STEP_ROWS,
    STEPS,
    checkpoint_path,
    checkpoint_steps,
    json_lines,
)
from transferqueue.workflows.job.settings.defaults import advantage_columns, filled, tasks_of
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.resolve import resolve
from transferqueue.workflows.job.stages.advantage import scored_rows
from transferqueue.workflows.job.training.checkpoint import checkpoint_state, checkpoint_tensors, load_checkpoint
from transferqueue.workflows.job.training.checkpoint_files import saved_tensors
from transferqueue.workflows.job.training.columns import RowColumns, select
from transferqueue.workflows.job.training.learner import PolicyLearner
from transferqueue.workflows.job.training.passes import Passes
from transferqueue.workflows.job.training.process import policy_learner, resumed
from transferqueue.workflows.job.training.step_rows import TakenRows, computes_on

_NOT_COMPARED: Final = frozenset({"passes_s", "update_s", "training_tokens_per_s", "rows"})
"""Figures of an update that another run measures otherwise, and its rows: a step tells the new ones alone."""
_GRADIENT: Final = "gradient_norm"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs first. row: its id; None: of the whole step."""

    step: int
    stage: str
    text: str
    row: int | None = None


class Replay(msgspec.Struct, kw_only=True):
    """A replay of a step. begun: the step of the checkpoint that it began with; 0: the model of the job. compared: the
    stages of the step that came out equal. left_out: what was not computed again. differs: None: nothing does."""

    step: int
    begun: int
    compared: list[str] = []
    left_out: list[str] = []
    differs: Difference | None = None

    @property
    def text(self) -> str:
        """The outcome in words."""
        if self.differs is None:
            return f"step {self.step} is equal: {', '.join(self.compared)}"
        row = "" if self.differs.row is None else f", row {self.differs.row}"
        return f"step {self.differs.step} differs at stage {self.differs.stage}{row}: {self.differs.text}"


class BeforeStep(NamedTuple):
    """A run as it was before a step.

    Args:
        job: its settings.
        learner: the trainer's, with the weights (`model`) and the optimizer.
        rows: the columns that the trainer read, by name, in the order in which it took the rows.
        recorded: these rows as an Arrow table, in this order, with all their columns and their lineage.
        figures: of the step, as the run wrote them.
    """

    job: Job
    learner: PolicyLearner
    rows: RowColumns
    recorded: Any
    figures: Mapping[str, Any]


class _Differs(Exception):
    def __init__(self, stage: str, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.stage, self.text, self.row = stage, text, row


def replay(
    folder: Path,
    step: int,
    *,
    tell: Callable[[str], None] = lambda text: None,
    look: Callable[[BeforeStep], None] | None = None,
) -> Replay:
    """Compute a step of the run in `folder` again.

    Blocks for the steps since the checkpoint before it. Call it where nothing else computes with torch: meanwhile the
    number of threads, the working directory and ``PYTHONPATH`` are those of the run.

    Args:
        folder: of the run, finished or not.
        step: its number.
        tell: gets what differs from the run's packages, and what is left out, before anything is computed.
        look: is called before the step is computed, once the steps before it came out equal; it may change the
            trainer. Default None: nothing is called.

    Raises:
        NotFound: no folder of a run; or it has no checkpoint before the step, or lacks rows or their order.
        UsageError: the run's trainer had several ranks.
        Corruption: the checkpoint to begin with is damaged.
    """
    run = RunFolder(folder.absolute())
    job = resolve(run.job())
    if job.trainer.ranks > 1:
        raise UsageError(
            f"the run has trainer.ranks={job.trainer.ranks}, which add gradients in an order of their own; a replay "
            "has one rank"
        )
    taken = _taken(run.path, step)
    begun = _begun(run.path, taken, step)
    table = tq.open_run(run.path).table(names.TABLE)
    _check_recorded(table, [taken[number] for number in range(begun + 1, step + 1)], job.pacing.uses)
    outcome = Replay(step=step, begun=begun, left_out=_left_out(job))
    for text in (*_other_packages(run.starts()), *_other_device(taken[step]), *outcome.left_out):
        tell(text)
    with _as_the_run(run), _scorer(job) as scorer:
        steps = _Steps(run.path, table, job, scorer, begun)
        for number in range(begun + 1, step + 1):
            outcome.compared = []
            if look is not None and number == step:
                look(steps.before(number, taken[number]))
            try:
                steps.again(number, taken[number], outcome.compared)
            except _Differs as found:
                outcome.differs = Difference(step=number, stage=found.stage, row=found.row, text=found.text)
                break
    return outcome


@contextmanager
def _as_the_run(run: RunFolder) -> Iterator[None]:
    """Work where the run's paths and modules are, and leave this process as it was."""
    code = next((start.code for start in reversed(run.starts()) if start.code), "")
    found = importable(Path(code) if code else None)
    before = dict(os.environ)
    threads, repeats = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    os.environ.update(found)
    try:
        with run.at_its_place():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(mode=repeats)


class _TakenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `STEP_ROWS`."""

    step: int
    version: int
    device: str
    threads: int
    parts: list[list[int]]
    digests: list[int]
    columns: dict[str, int]

    @property
    def rows(self) -> list[int]:
        return [row for part in self.parts for row in part]


def _taken(folder: Path, step: int) -> dict[int, _TakenStep]:
    """The rows of each step. A step that was trained again has its last ones."""
    lines = [msgspec.convert(line, _TakenStep) for line in json_lines(folder / STEP_ROWS)]
    taken = {line.step: line for line in lines}
    if step not in taken:
        which = f"it has {min(taken)} to {max(taken)}" if taken else "it has none: its job recorded no rows"
        raise NotFound(f"{folder / STEP_ROWS} has no step {step}; {which}")
    return taken


def _begun(folder: Path, taken: Mapping[int, _TakenStep], step: int) -> int:
    begun = max((each for each in checkpoint_steps(folder / CHECKPOINTS / names.TRAIN) if each < step), default=0)
    for number in range(begun + 1, step):
        if number not in taken:
            raise NotFound(
                f"step {step} cannot be computed again: the newest checkpoint before it is of step {begun}, and "
                f"{folder / STEP_ROWS} lacks step {number} between; keep more by checkpoint.keep, or set a smaller "
                "checkpoint.every"
            )
    return begun


def _check_recorded(table: Any, steps: Sequence[_TakenStep], uses: int) -> None:
    """Raise `NotFound` unless the record has all rows of these steps."""
    import pyarrow.compute as pc

    last = pc.field("_step")  # a row that is trained in several steps has the last one
    found = table.arrow(["_row"], filter=(last >= steps[0].step) & (last < steps[-1].step + uses))
    recorded = set(found["_row"].to_pylist())
    for taken in steps:
        if missing := [row for row in taken.rows if row not in recorded]:
            raise NotFound(
                f"{len(missing)} of the {len(taken.rows)} rows of step {taken.step} are not in the record, such as row "
                f"{missing[0]}: rows come there with the next checkpoint, the oldest files go beyond "
                "queue.record_gib, and a damaged file counts as none; wait for the checkpoint, or give another step"
            )


def _left_out(job: Job) -> list[str]:
    found = ["generation is not computed again: the recorded tokens are taken as they are"]
    if graph.has_episodes(job):
        found.append("rewards are not computed again: they come from an environment")
    if not _scores_again(job) and names.REWARD in graph.task_names(job):
        found.append("rewards are not computed again: the time chose which rows a model scored together")
    if scored := [task for task in tasks_of(job.algorithm) if task in _SCORING]:
        found.append(f"the columns of {', '.join(scored)} are not computed again")
    if names.TRAIN_CRITIC in graph.task_names(job):
        found.append("the critic's own steps are not computed again")
    if _is_whitened_by_time(job):
        found.append("advantages are not computed again: they were whitened over rows that the time chose")
    return found


_SCORING: Final = (names.REFERENCE, names.PROXIMAL, names.VALUE, names.TEACHER)


def _is_whitened_by_time(job: Job) -> bool:
    return bool(filled(job.algorithm).whiten) and (not job.reproducible or job.pacing.uses > 1)


def _other_packages(starts: Sequence[RunStart]) -> list[str]:
    then, now = starts[-1].packages if starts else {}, installed_packages()
    return [
        f"{name} is {now.get(name, 'not installed')}, and was {then[name]}: sums may differ"
        for name in then
        if then[name] != now.get(name)
    ]


def _other_device(taken: _TakenStep) -> list[str]:
    then, now = taken.device, computes_on()["device"]
    return [] if now == then else [f"the trainer computed on {then}, and this is {now}: sums may differ"]


def _scorer(job: Job) -> AbstractContextManager[RewardScorer | None]:
    return RewardScorer(job, load_tokenizer(job.model)) if _scores_again(job) else nullcontext()


def _scores_again(job: Job) -> bool:
    """Whether rewards can be computed again: by functions, or by models that score each row apart."""
    apart = job.reproducible or not any(reward.model for reward in job.reward)
    return apart and names.REWARD in graph.task_names(job)


class _Steps:
    """The run's trainer, step after step."""

    def __init__(self, folder: Path, table: Any, job: Job, scorer: RewardScorer | None, begun: int) -> None:
        self._folder, self._table, self._job, self._scorer = folder, table, job, scorer
        self._figures = {int(line["step"]): line for line in json_lines(folder / STEPS)}
        self._learner: PolicyLearner = policy_learner(job)
        if begun:
            load_checkpoint(self._checkpoint(begun), self._learner)
        else:
            resumed(job, self._learner, None)
        self._passes = Passes(self._learner, job.algorithm, seed=job.seed)

    def _checkpoint(self, step: int) -> Path:
        return checkpoint_path(self._folder / CHECKPOINTS / names.TRAIN, step)

    def before(self, step: int, taken: _TakenStep) -> BeforeStep:
        """The run as it is before a step that is to be computed."""
        torch.set_num_threads(taken.threads)
        rows = _RecordedStep(self._table, taken, step, self._job)
        figures = self._figures.get(step, {})
        return BeforeStep(self._job, self._learner, rows.read(taken.columns), rows.table, figures)

    def again(self, step: int, taken: _TakenStep, compared: list[str]) -> None:
        """Compute a step. compared: gets the stages that are equal. Raises `_Differs` at the first that is not."""
        torch.set_num_threads(taken.threads)
        rows = _RecordedStep(self._table, taken, step, self._job)
        _compare_rows(rows, taken)
        compared.append("rows")
        if self._scorer is not None:
            _compare_rewards(rows, self._scorer)
            compared.append("reward")
        if names.ADVANTAGE in tasks_of(self._job.algorithm) and not _is_whitened_by_time(self._job):
            _compare_advantages(rows, self._job)
            compared.append("advantage")
        figures = self._update(rows, taken)
        compared += self._compare_figures(step, figures)
        if self._checkpoint(step).is_dir():
            self._compare_weights(step)
            compared.append("weights")

    def _update(self, rows: _RecordedStep, taken: _TakenStep) -> dict[str, float]:
        self._passes.version = taken.version
        read, first = rows.read(taken.columns), 0
        for part in taken.parts:
            at = range(first, first + len(part))
            self._passes.compute(select(read, at), part)
            first += len(part)
        return self._passes.update()

    def _compare_figures(self, step: int, figures: Mapping[str, float]) -> list[str]:
        written = self._figures.get(step, {})
        for name in sorted(figures.keys() & written.keys() - _NOT_COMPARED, key=lambda name: name == _GRADIENT):
            if written[name] is not None and written[name] != figures[name]:
                stage = "gradient" if name == _GRADIENT else "loss"
                raise _Differs(stage, f"{name} was {written[name]!r}, and is {figures[name]!r} now")
        return ["loss", "gradient"]

    def _compare_weights(self, step: int) -> None:
        path = self._checkpoint(step)
        try:
            written = checkpoint_tensors(path, checkpoint_state(path))
        except Corruption as error:
            raise _Differs("weights", str(error)) from error
        for name, tensor in saved_tensors(self._learner).items():
            before = written.tensor(name) if written.shape(name) else written.piece(name, 0)
            if not torch.equal(host_bytes(before), host_bytes(tensor)):
                raise _Differs("weights", f"{name} of {path} has other bits")


# ---------------------------------------------------------------- rows


class _RecordedStep:
    """The recorded rows of a step, in the order in which its trainer took them."""

    def __init__(self, table: Any, taken: _TakenStep, step: int, job: Job) -> None:
        import pyarrow.compute as pc

        last = pc.field("_step")
        found = table.arrow(filter=(last >= step) & (last < step + job.pacing.uses))
        place = {row: at for at, row in enumerate(found["_row"].to_pylist())}
        self.ids = taken.rows
        self.table: Final = found.take([place[row] for row in self.ids])
        self._fields = {field.name: field for field in graph.fields(job) if field.name in self.table.column_names}

    @property
    def fields(self) -> Collection[str]:
        """Names of the columns of the table."""
        return self._fields.keys()

    def column(self, name: str) -> list[Any]:
        """The values of a column, one a row, as a trainer reads them."""
        field, values = self._fields[name], self.table[name].to_pylist()
        if field.dtype == "value":
            return [decode(value, f"row {row}") for value, row in zip(values, self.ids, strict=True)]
        return values if field.dtype == "str" or not field.shape else [np.array(value, field.dtype) for value in values]

    def read(self, names_: Mapping[str, int]) -> RowColumns:
        """These columns by name."""
        return {name: self.column(name) for name in names_}

    def fact(self, name: str) -> Any:
        """A numeric fact of each row."""
        return self.table[name].to_numpy()


def _compare_rows(rows: _RecordedStep, taken: _TakenStep) -> None:
    now, read = TakenRows(), rows.read(taken.columns)
    now.add(read, rows.ids)
    for row, before, digest in zip(rows.ids, taken.digests, now.digests, strict=True):
        if before != digest:
            other = [name for name, value in now.columns.items() if value != taken.columns[name]]
            raise _Differs("rows", f"{', '.join(other)} of the record is not what the trainer read", row)


def _compare_rewards(rows: _RecordedStep, scorer: RewardScorer) -> None:
    scores = scorer.score(
        ids=rows.ids,
        data=rows.column(names.DATA),
        prompt_ids=rows.column("prompt_ids"),
        response_ids=rows.column("response_ids"),
    )
    terms = zip(rows.column(names.REWARD_TERMS), scores.terms, strict=True)
    pairs = zip(rows.ids, rows.column("rewards"), scores.rewards, terms, strict=True)
    for row, before, reward, (terms_before, terms_now) in pairs:
        if not _same(before, reward) or not _same(terms_before, terms_now):
            raise _Differs(
                "reward",
                f"the reward was {float(before):g} ({_numbers(terms_before)}), and is {float(reward):g} "
                f"({_numbers(terms_now)}) now",
                row,
            )


def _compare_advantages(rows: _RecordedStep, job: Job) -> None:
    order = np.argsort(rows.fact("_ordinal"), kind="stable")
    inputs = scored_rows(job, rows.column, rows.fact("_group_id"), order.tolist(), rows.fields)
    columns = advantage_columns_of(inputs, filled(job.algorithm), tokens_max=job.sampling.tokens_max)
    for name in advantage_columns(job.algorithm):
        before = rows.column(name)
        for at, now in zip(order.tolist(), columns[name], strict=True):
            if not _same(before[at], now):
                raise _Differs(
                    "advantage", f"{name} was {_numbers(before[at])}, and is {_numbers(now)} now", rows.ids[at]
                )


def _same(before: Any, now: Any) -> bool:
    return np.asarray(before).tobytes() == np.asarray(now, np.asarray(before).dtype).tobytes()


def _numbers(values: Any) -> str:
    shown = [f"{value:g}" for value in np.atleast_1d(np.asarray(values, np.float64))[:4]]
    return ", ".join(shown) + (", ..." if np.size(values) > len(shown) else "")
