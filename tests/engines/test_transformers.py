from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.conform import against, conform
from tests.engines.tiny import TinySubject, model
from transferqueue.adapters.protocols import Generator
from transferqueue.adapters.transformers import TransformersGenerator
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
