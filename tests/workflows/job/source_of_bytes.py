"""The source of prompts in a process that starts fast: its tokens are bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.workflows.flow.stage import Context, Produce
from transferqueue.workflows.job.data.source import source_with


@contextmanager
def prompts(context: Context) -> Iterator[Produce]:
    """Factory of the source."""
    with source_with(context, ByteTokenizer()) as produce:
        yield produce
