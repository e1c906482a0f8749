"""Processes of a job that start fast: their tokens are bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.workflows.flow.stage import Context, Produce, Work
from transferqueue.workflows.job.data.source import source_with
from transferqueue.workflows.job.stages.reward import reward_with


@contextmanager
def prompts(context: Context) -> Iterator[Produce]:
    """Factory of the source."""
    with source_with(context, ByteTokenizer()) as produce:
        yield produce


@contextmanager
def reward(context: Context) -> Iterator[Work]:
    """Factory of the reward stage."""
    with reward_with(context, ByteTokenizer()) as score:
        yield score
