"""How many rows and bytes a job holds at most, by arithmetic alone. No torch here."""

from __future__ import annotations

from typing import Final

from transferqueue.workflows.job import names
from transferqueue.workflows.job.settings.defaults import advantage_columns, columns_of, tasks_of
from transferqueue.workflows.job.settings.job import IN_TURN, AlgorithmSettings, EngineSettings, Job

GIB: Final = 1 << 30
MIB: Final = 1 << 20
_TOKEN_BYTES: Final = {
    "response_ids": 4,
    "token_versions": 4,
    "rollout_logprobs": 4,
    "loss_mask": 1,
    "ref_logprobs": 4,
    "prox_logprobs": 4,
    "values": 4,
    "returns": 4,
    "token_advantages": 4,
}
"""Bytes of one response token in each column that has a value for each token."""
_EPISODE_BYTES: Final = 13
"""Bytes of a token in the column `names.EPISODE`."""
_PAIR_BYTES: Final = 8
"""Bytes of a teacher's token: its id and its log-prob."""

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's option ``max_lora_rank``."""


def gib(size: int) -> str:
    """Return bytes as terms of a sum, with two decimals.

    >>> gib(3 << 29)
    '1.50 GiB'
    """
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / MIB:.2f} MiB"


def publishes_adapters(job: Job) -> bool:
    """Whether a job publishes its adapters apart from the weights that they belong to."""
    if not job.trainer.lora_rank or job.weights.lora == "merged":
        return False
    return job.weights.lora == "adapter" or not (merged_for(job) or any(e.kind == "vllm_server" for e in job.engine))


def lora_requests(engine: EngineSettings, job: Job) -> dict[str, int]:
    """Options of vLLM by which it takes the adapters of a job as LoRA requests, where `enable_lora` is given alone.

    In mode ``async`` requests of two versions run together; else all of a version end before the next.
    """
    if not engine.options.get("enable_lora"):
        return {}
    rank = next((rank for rank in LORA_RANKS if rank >= job.trainer.lora_rank), LORA_RANKS[-1])
    return {"max_lora_rank": rank} | ({"max_loras": 2} if job.pacing.mode == "async" else {})


def merged_for(job: Job) -> str:
    """What of a job takes merged weights alone; empty: nothing."""
    if job.trainer.parallel == "fsdp2":
        return 'trainer.parallel="fsdp2"'
    if job.pacing.mode == "colocated":
        return 'pacing.mode="colocated"'
    parallel = next((place for place, engine in enumerate(job.engine) if engine.tensor_parallel > 1), None)
    return "" if parallel is None else f"engine.{parallel}.tensor_parallel={job.engine[parallel].tensor_parallel}"


def group_rows(job: Job) -> int:
    """Rows of a prompt: the samples of its group; for sft, the example."""
    return 1 if job.algorithm.kind == "sft" else job.sampling.group_size


def batch_rows(job: Job) -> int:
    """Rows of a trainer step."""
    return job.trainer.prompts_per_step * group_rows(job)


def depth(job: Job) -> float:
    """Batches that may be outstanding beyond the current one: the depth of the mode, and the surplus of
    over-sampling."""
    by_mode = 0 if job.pacing.mode in IN_TURN else 1
    return (by_mode if job.pacing.depth is None else job.pacing.depth) + surplus_prompts(
        job
    ) / job.trainer.prompts_per_step


def has_step_versions(job: Job) -> bool:
    """Whether the step of a row decides its version: of a job that generates ahead and repeats bit for bit."""
    return job.reproducible and job.pacing.mode not in IN_TURN and job.algorithm.kind != "sft"


def versions_of_uses(job: Job) -> int:
    """Versions that a row grows older from its first use to its last, at most."""
    every = job.weights.every
    return -(-(job.pacing.uses - 1) // every) * every


def staleness_when_new(job: Job) -> int | None:
    """Most versions between the weights of a row and the step that trains it first; None: open. The rest of
    `pacing.max_staleness` is for its further uses."""
    staleness = job.pacing.max_staleness
    return None if staleness is None else max(0, staleness - versions_of_uses(job))


def version_lag(job: Job) -> int:
    """Steps from the weights of a row to the step that trains it, where its step decides its version. Versions that are
    published every few steps may be older by the others."""
    ahead = int(depth(job))
    staleness = staleness_when_new(job)
    return max(1, min(ahead, (ahead if staleness is None else staleness) - job.weights.every + 1))


def versions_kept(job: Job) -> int:
    """Versions of the weights that the queue keeps: all that rows may still need, where their step decides it. A row
    that is not generated or scored belongs to a step whose weights are not published, so it needs none older than the
    newest by more than the lag."""
    needed = -(-version_lag(job) // job.weights.every) + 1 if has_step_versions(job) else 1
    return max(job.weights.keep, needed)


def surplus_prompts(job: Job) -> int:
    """Prompts that over-sampling begins beyond those of a batch."""
    prompts = job.trainer.prompts_per_step
    return -int(-job.pacing.over_sample * prompts // 1) - prompts


def records_rows(job: Job) -> bool:
    """Whether all rows of the job are recorded."""
    return job.queue.record != "off"


def rows_ahead(job: Job) -> int:
    """Rows that may be live and not yet trained."""
    return round((depth(job) + 1) * batch_rows(job))


def rows_kept(job: Job) -> int:
    """Rows that may be live: those ahead, and those trained that wait for further uses and their checkpoint."""
    return (job.checkpoint.every + job.pacing.uses - 1) * batch_rows(job) + rows_ahead(job)


def row_bytes(job: Job, *, route_bytes: int = 0) -> int:
    """Bytes of a row whose prompt and response have all the tokens that they may have. route_bytes: of the routes of a
    token, which the model decides."""
    masked = _TOKEN_BYTES["loss_mask"] if has_loss_mask(job) else 0
    response = job.sampling.tokens_max * (token_bytes(job.algorithm) + masked)
    return 4 * job.data.prompt_tokens_max + response + tokens_of_row(job) * route_bytes


def play_bytes(job: Job) -> int:
    """Bytes of the turns that rows in play keep, without the states of their environments. Only a factory's environment
    may give one, and where it finds no memory, nothing is kept."""
    slots = sum(engine.slots * engine.count for engine in job.engine)
    keeps = any(environment.factory for environment in job.environment)
    return min(rows_ahead(job), slots) * tokens_of_row(job) * _EPISODE_BYTES * keeps


def has_loss_mask(job: Job) -> bool:
    """Whether rows say which tokens of their response are learned: those of episodes, and of conversations whose turns
    sft learns."""
    return job.data.turns == "all" or bool(job.environment)


def token_bytes(algorithm: AlgorithmSettings) -> int:
    """Bytes that the columns of a row hold for each token of its response."""
    columns = {column for read in columns_of(algorithm).values() for column in read}
    if names.ADVANTAGE in tasks_of(algorithm):
        columns |= set(advantage_columns(algorithm))
    columns |= {"response_ids"} if algorithm.kind == "sft" else {"response_ids", "rollout_logprobs", "token_versions"}
    pairs = teacher_tokens(algorithm) * _PAIR_BYTES if algorithm.kind == "distill" else 0
    return sum(_TOKEN_BYTES.get(column, 0) for column in columns) + pairs


def teacher_tokens(algorithm: AlgorithmSettings) -> int:
    """Tokens of the teacher for each token of a response: its most probable ones, or the drawn one alone."""
    return max(1, algorithm.top_k)


def tokens_of_row(job: Job) -> int:
    """Tokens of the longest row."""
    return job.data.prompt_tokens_max + job.sampling.tokens_max


def pass_tokens(job: Job, tokens: int) -> int:
    """Return the most tokens of a forward pass of a scoring process.

    In the order of the data each row has a pass of its own (1: no two rows fit). Which rows are ready together depends
    on the time, and the last bits of a row's numbers on the rows beside it: a run would not repeat bit for bit.
    """
    return 1 if job.reproducible else tokens
