"""The GRPO job as a value: its settings, its table and its stages. Runs nothing and needs no torch.

::

    prompts --put--> [ rollouts ] --rollout--> response_ids, rollout_logprobs, finish_reason
                                  --reward---> rewards
                                  --advantage> advantages            whole groups
                                  --reference> ref_logprobs          only with KL
                                  --train----> new weights           whole groups, paces the table

New weights reach `rollout` through the weight channel `POLICY`, whose versions are the clock of the table.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

import transferqueue as tq
from transferqueue.adapters.stages.generation import BEGUN
from transferqueue.errors import Impossible, UsageError
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Stage
from transferqueue.workflows.grpo.learning.settings import LearningSettings

TABLE: Final = "rollouts"
POLICY: Final = f"{TABLE}/policy"
"""Weight channel of the trained policy and clock of the table; its name starts with the table's, so both have the same home coordinator."""
REFERENCE: Final = "reference"
"""Weight channel of the reference policy for the KL term; one version, kept for ever."""

Mode = Literal["sync", "delayed", "async"]
Engine = Literal["builtin", "transformers", "vllm"]
"""What generates: the job's own sampler, or a real engine with the same model as a Llama."""

_HERE: Final = "transferqueue.workflows.grpo"
_FACTORIES: Final = {
    "prompts": f"{_HERE}.stages.problem_stages:prompts",
    "rollout": f"{_HERE}.stages.model_stages:rollout",
    "reward": f"{_HERE}.stages.problem_stages:reward",
    "advantage": f"{_HERE}.stages.advantage_stage:advantage",
    "reference": f"{_HERE}.stages.model_stages:reference",
    "train": f"{_HERE}.stages.model_stages:train",
}
"""Factory of each stage. A process imports that module only, so that only stages with a model load torch."""

_LEASE_S: Final = 30.0
_ROLLOUT_ROWS: Final = 128
"""Rows of one request: larger batches decode little faster, and smaller ones get newer weights sooner."""


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """How the job runs; `learning` says how it learns.

    engine: what generates. mode: *sync* generates a batch, trains on it, then generates the next one with the new weights. *delayed* generates
    the next batch during a training step, with the weights before that step (the delayed parameter update
    of AsyncFlow, arXiv 2507.01663, section 4). *async* generates up to `depth` batches ahead, with weights at most
    `max_staleness` versions old, loaded as soon as they are published. rollouts: number of generating processes.

    partial: tokens that one lease adds to a response at most (0: no bound). An unfinished response is released with its
    tokens, and any rollout process continues it under its current weights (partial rollouts; Kimi k1.5,
    arXiv 2501.12599, section 2.6.2). over_sample: a synchronous job begins this multiple of a batch; when the batch is full, the
    rest is released and continued under the next weights (`flow.loop.full_batches`). filter_zero_advantage: groups with equal rewards are
    dropped, and other prompts are admitted in their place (dynamic sampling; DAPO, arXiv 2503.14476, section 3.2). replace_lost:
    groups whose bytes are lost with a shard are replaced too; without it the run ends that much shorter, or waits for ever for the rest
    of a batch. replicas: shards that store each row; at least so many must lend memory.

    Raises `Impossible` for a sync job with depth, or with staleness unless it over-samples; for an async job without depth; and for a
    delayed job with depth or staleness other than 1, or with a real engine, whose weights change in flight.
    """

    learning: LearningSettings = field(default_factory=LearningSettings)
    mode: Mode = "async"
    max_staleness: int = 1
    depth: int = 1
    rollouts: int = 1
    engine: Engine = "builtin"
    partial: int = 0
    over_sample: float = 1.0
    filter_zero_advantage: bool = False
    replace_lost: bool = False
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.partial < 0:
            raise UsageError(f"partial={self.partial} is not a number of tokens; 0 is no bound")
        self._check_over_sample()
        if self.rollouts < 1:
            raise UsageError(f"rollouts={self.rollouts} is not a positive number of processes")
        if self.mode == "sync" and (self.depth or (self.max_staleness and self.over_sample == 1)):
            raise Impossible(
                f"mode sync with depth={self.depth} and max_staleness={self.max_staleness}: a synchronous job has 0 of both; "
                "one that over-samples may have staleness"
            )
        if self.mode == "delayed":
            self._check_delayed()
        if self.mode == "async" and self.depth < 1:
            raise Impossible(f"mode async with depth={self.depth}: nothing could be generated ahead; give at least 1")

    def _check_over_sample(self) -> None:
        if not 1 <= self.over_sample < math.inf:
            raise UsageError(
                f"over_sample={self.over_sample} is not a finite number from 1 on; 1 begins what a batch needs"
            )
        if self.over_sample == 1:
            return
        if self.mode != "sync" or self.engine != "builtin":
            raise Impossible(
                f"over_sample={self.over_sample} with mode {self.mode} and engine {self.engine}: it is for a synchronous job "
                "with the builtin engine; a job with depth begins more than a batch anyway, and never stops"
            )
        if self.over_sample > self.max_staleness + 1:
            raise Impossible(
                f"over_sample={self.over_sample} with max_staleness={self.max_staleness}: the last rows begun would be trained "
                f"{math.ceil(self.over_sample) - 1} versions later; give at least that as max_staleness"
            )

    def _check_delayed(self) -> None:
        if (self.depth, self.max_staleness) != (1, 1):
            raise Impossible(
                f"mode delayed with depth={self.depth} and max_staleness={self.max_staleness}: "
                "a one-step delay is 1 of both; mode async takes others"
            )
        if self.engine != "builtin":
            raise Impossible(
                f"mode delayed with engine {self.engine}: its weights change in flight, and a delayed job changes them "
                "between two batches; use mode async, or the builtin engine"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of one trainer step."""
        return self.learning.prompts_per_step * self.learning.group_size

    @property
    def groups_total(self) -> int:
        """Groups of the whole run."""
        return self.learning.steps * self.learning.prompts_per_step

    @property
    def rows_total(self) -> int:
        """Rows of the whole run."""
        return self.groups_total * self.learning.group_size

    @property
    def surplus_groups(self) -> int:
        """Groups that over-sampling begins beyond those of a batch."""
        return math.ceil(self.over_sample * self.learning.prompts_per_step) - self.learning.prompts_per_step

    @property
    def batches_ahead(self) -> float:
        """Depth of the pacing: batches outstanding beyond the current one, with the surplus of over-sampling as a fraction of a batch."""
        return self.depth + self.surplus_groups / self.learning.prompts_per_step if self.surplus_groups else self.depth

    @property
    def in_parts(self) -> bool:
        """Whether a response may be generated in several leases, under several versions."""
        return bool(self.partial or self.surplus_groups)

    @property
    def groups_per_request(self) -> int:
        """Groups of one request to a rollout process, so that every process gets some of each step."""
        share = math.ceil(self.learning.prompts_per_step / self.rollouts)
        return max(1, min(share, _ROLLOUT_ROWS // self.learning.group_size))

    @property
    def replaces(self) -> bool:
        """Whether dropped groups are replaced. The source then puts prompts until the trainer seals the table."""
        return self.filter_zero_advantage or self.replace_lost

    @property
    def rows_per_put(self) -> int:
        """Rows of one put: those of a request; fewer if they do not divide the room; one group if groups are replaced.

        Room for a larger put might otherwise never come.
        """
        if self.replaces:
            return self.learning.group_size
        if not self.surplus_groups:
            return self.groups_per_request * self.learning.group_size
        even = math.gcd(self.groups_per_request, self.learning.prompts_per_step, self.surplus_groups)
        return even * self.learning.group_size

    @property
    def with_reference(self) -> bool:
        """Whether the loss has a KL term, which needs a reference stage."""
        return self.learning.kl_weight > 0


def fields(settings: JobSettings) -> list[tq.Field]:
    """Return the columns of the table."""
    columns = [
        tq.Field("prompt_ids", "int32", (None,)),
        tq.Field("problem", "value"),
        tq.Field("response_ids", "int32", (None,)),
        tq.Field("rollout_logprobs", "float32", (None,)),
        tq.Field("finish_reason", "str"),
        tq.Field("rewards", "float32"),
        tq.Field("advantages", "float32"),
        tq.Field("ref_logprobs", "float32", (None,)),
    ]
    if settings.in_parts:
        dtypes = ("int32", "float32", "int32", "int32")
        columns += [
            tq.Field(name, dtype, (None,)) for name, dtype in zip((*BEGUN, "token_versions"), dtypes, strict=True)
        ]
    return columns


def stages(settings: JobSettings) -> list[Stage]:
    """Return the stages, one for each task of the table, in the order in which a row passes them."""
    generated = ("prompt_ids", "response_ids", "rollout_logprobs")
    reference = ("ref_logprobs",) if settings.with_reference else ()
    begun, versions = (BEGUN, ("token_versions",)) if settings.in_parts else ((), ())
    per_request = settings.groups_per_request * settings.learning.group_size
    some = settings.rows_per_step
    all_stages = [
        Stage(
            task=_task("rollout", needs=("prompt_ids", *begun), gives=(*generated[1:], "finish_reason", *versions)),
            rows=per_request,
            at_least=1,
        ),
        Stage(task=_task("reward", needs=("response_ids", "problem"), gives=("rewards",)), rows=some, at_least=1),
        Stage(
            task=_task("advantage", needs=("rewards",), gives=("advantages",), groups=tq.Complete()),
            groups=settings.learning.prompts_per_step,
            at_least=1,
        ),
        Stage(
            task=_task(
                "train",
                needs=(*generated, "rewards", "advantages", *versions, *reference),
                groups=tq.Complete(),
                selector=tq.OldestVersionFirst(),
            ),
            groups=settings.learning.prompts_per_step,
        ),
    ]
    if settings.with_reference:
        task = _task("reference", needs=generated[:2], gives=reference)
        all_stages.append(Stage(task=task, rows=per_request, at_least=1))
    return all_stages


def pacing(settings: JobSettings) -> tq.Pacing:
    """Return how far generation runs ahead of training. A row that is too old to train on is generated again."""
    return tq.Pacing(
        "train",
        batch_rows=settings.rows_per_step,
        depth=settings.batches_ahead,
        max_staleness=settings.max_staleness,
        on_stale=tq.Requeue("rollout"),
        channel=POLICY,
    )


def create_table(queue: tq.Queue, settings: JobSettings) -> tq.Table:
    """Create the table of the job."""
    ahead = pacing(settings)
    return queue.create_table(
        TABLE,
        fields=fields(settings),
        tasks=[stage.task for stage in stages(settings)],
        limits=tq.Limits(rows=ahead.rows_ahead_max),
        pacing=ahead,
        replicas=settings.replicas,
    )


def jobs(settings: JobSettings) -> list[StageJob]:
    """Return the processes of the job."""
    plain = asdict(settings)
    stage_jobs = [StageJob(name="prompts", table=TABLE, factory=_FACTORIES["prompts"], settings=plain)]
    for stage in stages(settings):
        name = stage.task.name
        processes = settings.rollouts if name == "rollout" else 1
        stage_jobs += [
            StageJob(
                name=name, table=TABLE, factory=_factory(name, settings), stage=stage, settings=plain, instance=instance
            )
            for instance in range(processes)
        ]
    return stage_jobs


def _factory(stage: str, settings: JobSettings) -> str:
    with_engine = stage == "rollout" and settings.engine != "builtin"
    return f"{_HERE}.stages.engine_stages:rollout" if with_engine else _FACTORIES[stage]


def _task(
    name: str,
    *,
    needs: tuple[str, ...],
    gives: tuple[str, ...] = (),
    groups: tq.Complete | None = None,
    selector: tq.Selector = tq.Fifo(),  # noqa: B008  (a frozen value)
) -> tq.Task:
    return tq.Task(name, needs=needs, gives=gives, groups=groups, selector=selector, lease_s=_LEASE_S)
