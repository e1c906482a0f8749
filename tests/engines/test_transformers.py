from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

import transferqueue as tq
from tests.engines.conform import against, conform
from tests.engines.tiny import TinySubject, model
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Generator, Sampling
from transferqueue.adapters.stages.generation import BEGUN, Generate
from transferqueue.testing.conformance.generators import GENERATOR_CHECKS, GeneratorSubject


class Subject(TinySubject):
    def open(self) -> Generator:
        return TransformersGenerator(model(0), version=0)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject()


@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_transformers(check: Callable[[GeneratorSubject], None], subject: Subject) -> None:
    conform("generator", "transformers", against("transformers", "torch"), check, subject)


def test_a_row_is_completed_in_parts_by_two_leases_or_more(subject: Subject) -> None:
    """The stage: what a lease did not finish goes back with what it has; another lease goes on under newer weights."""
    sampling = Sampling(tokens_max=12, stop_ids=subject.stop_ids)
    task = tq.Task("generate", needs=["prompt_ids", *BEGUN], gives=["response_ids"])
    with tq.connect() as queue, closing(subject.open()) as engine:
        table = queue.create_table("t", tasks=[task], retention=tq.Manual())
        generate = Generate(engine, sampling, token_versions=True, budget=5)
        empty = {name: [np.empty(0, np.float32 if name == "begun_logprobs" else np.int32)] * 8 for name in BEGUN}
        table.put(prompt_ids=list(subject.prompts()), **empty)
        table.seal()
        while True:
            try:
                batch = table.lease("generate", rows=8, at_least=1, timeout_s=10)
            except tq.EndOfTable:
                break
            for part in generate(batch):
                verb = batch.release if part.unfinished else batch.ack
                verb(batch.rows[part.at], **part.facts, **part.columns)
            engine.update_weights(subject.weights(1), 1)
        rows = table.read(fields=["prompt_ids", "response_ids", "rollout_logprobs", "token_versions", "finish_reason"])
        assert len(rows) == 8
        for prompt, ids, logprobs, versions, reason in zip(
            *(rows[name] for name in ("prompt_ids", "response_ids", "rollout_logprobs", "token_versions")),
            rows["finish_reason"].list(),
            strict=True,
        ):
            assert len(ids) == 12 or reason == "stop"
            assert versions.tolist() == [0] * min(5, len(ids)) + [1] * max(0, len(ids) - 5)
            truth = [subject.logprobs(which, prompt, ids, sampling) for which in (0, 1)]
            wanted = [truth[version][at] for at, version in enumerate(versions)]
            np.testing.assert_allclose(logprobs, wanted, atol=1e-3)
