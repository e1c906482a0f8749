"""The kits find what is broken, and the matrix says what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.engines import matrix
from transferqueue.adapters.engines.completion import completed
from transferqueue.adapters.protocols import (
    ABORT,
    LENGTH,
    Completion,
    Generator,
    Ids,
    Logprobs,
    PartialResult,
    Pause,
    Prompt,
    Sampling,
    StageFunction,
    Unsupported,
    WeightSource,
)
from transferqueue.adapters.weights import ChannelWeights, TensorWeights
from transferqueue.errors import UsageError
from transferqueue.testing.conformance.generators import (
    GeneratorSubject,
    adapters_that_travel_alone,
    another_goes_on_under_other_weights,
    pause_aborts_and_another_goes_on,
    weights_change_in_flight,
)
from transferqueue.testing.conformance.report import CheckOutcome, RuleBroken, Verdict, run
from transferqueue.testing.conformance.stages import STAGE_CHECKS

ROOT = Path(__file__).parents[2]


class Lengths:
    """A stage that is right."""

    needs: Sequence[str] = ("text",)
    gives: Sequence[str] = ("length",)

    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterator[PartialResult]:
        return {"length": [len(text) for text in batch["text"].list()]}


class InParts(Lengths):
    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterator[PartialResult]:
        for at, text in enumerate(batch["text"].list()):
            yield PartialResult(at=[at], columns={"length": [len(text)]})  # type: ignore[arg-type]


class Forgets(Lengths):
    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterator[PartialResult]:
        yield PartialResult(at=[0], columns={"length": [1]})  # type: ignore[arg-type]


class GivesMore(Lengths):
    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterator[PartialResult]:
        return {"length": [1] * len(batch), "extra": [1] * len(batch)}


class Ranks(Lengths):
    """What a row gets depends on the others."""

    def __call__(self, batch: tq.Batch) -> Mapping[str, Any] | Iterator[PartialResult]:
        return {"length": list(range(len(batch)))}


class Subject:
    def __init__(self, stage: StageFunction, repeats: bool = True) -> None:
        self.stage, self.repeats = stage, repeats

    def open(self) -> StageFunction:
        return self.stage

    def columns(self) -> Mapping[str, Any]:
        return {"text": ["", "a", "bb", "ccc", "dddd", "eeeee"]}


def verdicts(stage: StageFunction, repeats: bool = True) -> list[Verdict]:
    return [outcome.verdict for outcome in run(STAGE_CHECKS, Subject(stage, repeats))]


@pytest.mark.parametrize("stage", [Lengths(), InParts()])
def test_a_stage_that_is_right_passes(stage: StageFunction) -> None:
    assert verdicts(stage) == [Verdict.PASSED] * len(STAGE_CHECKS)


@pytest.mark.parametrize("stage", [Forgets(), GivesMore(), Ranks()])
def test_a_stage_that_is_not_fails(stage: StageFunction) -> None:
    assert Verdict.FAILED in verdicts(stage)


def test_a_stage_that_draws_at_random_says_so() -> None:
    assert verdicts(Ranks(), repeats=False).count(Verdict.UNSUPPORTED) == 1


class SeenLate:
    """A generator that has finished its first `ahead` completions whenever the first is seen, as one of a busy machine
    has."""

    version = 0

    def __init__(self, ahead: int) -> None:
        self.ahead, self.cut = ahead, False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = 0) -> Iterator[Completion]:
        asked = [(at, sample) for at, prompt in enumerate(prompts) for sample in range(prompt.samples)]
        for place, (at, sample) in enumerate(asked):
            begun = prompts[at].begun
            left = sampling.tokens_max - (len(begun.ids) if begun else 0)
            begun_with = min(2, left)
            spans, reason = [(0, left)], LENGTH
            if place >= self.ahead and self.cut:
                spans, reason = [(0, begun_with)], ABORT
            elif place >= self.ahead and self.version:
                spans = [(0, begun_with), (self.version, left - begun_with)]
            elif self.version:
                spans = [(self.version, left)]
            tokens = sum(count for _, count in spans)
            yield completed(at, sample, prompts[at], [7] * tokens, [0.0] * tokens, reason, spans)

    def pause(self, mode: Pause, *, timeout_s: float = 0) -> None:
        self.cut = True

    def resume(self) -> None:
        self.cut = False

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = 0) -> None:
        self.version = version

    def close(self) -> None: ...


class SeenLateSubject:
    """Its subject: every token has the log-probability 0."""

    stop_ids = (1, 2, 3, 4)

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def open(self) -> Generator:
        return SeenLate(self.ahead)

    def prompts(self) -> Sequence[Ids]:
        return [np.full(length, 5, np.int32) for length in range(1, 9)]

    def weights(self, which: int) -> WeightSource:
        return TensorWeights({})

    def misfit(self) -> WeightSource:
        return TensorWeights({})

    def logprobs(self, which: int, context: Ids, ids: Ids, sampling: Sampling) -> Logprobs:
        return np.zeros(len(ids), np.float32)


IN_FLIGHT = (weights_change_in_flight, pause_aborts_and_another_goes_on, another_goes_on_under_other_weights)


@pytest.mark.parametrize("check", IN_FLIGHT, ids=lambda check: check.__name__)
def test_a_generator_whose_first_completions_are_seen_late_passes(check: Callable[[GeneratorSubject], None]) -> None:
    """Each try asks for more, so that some are running when the first is seen."""
    check(SeenLateSubject(ahead=64))


@pytest.mark.parametrize("check", IN_FLIGHT, ids=lambda check: check.__name__)
def test_a_generator_that_is_never_cut_fails(check: Callable[[GeneratorSubject], None]) -> None:
    with pytest.raises(RuleBroken, match="some were"):
        check(SeenLateSubject(ahead=1 << 20))


class Weighed(SeenLate):
    """Each token has the sum of the weights as its log-probability. follows False: of the versions of a channel it
    takes the first alone."""

    def __init__(self, follows: bool) -> None:
        super().__init__(ahead=0)
        self.follows, self.total, self.followed = follows, 0.0, 0

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = 0) -> None:
        self.followed += isinstance(source, ChannelWeights)
        if self.follows or self.followed <= 1:
            self.total = sum(float(tensor.double().sum()) for _, tensor in source)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = 0) -> Iterator[Completion]:
        for at, prompt in enumerate(prompts):
            yield completed(at, 0, prompt, [7], [self.total], LENGTH, [(0, 1)])


class WeighedSubject(SeenLateSubject):
    def __init__(self, follows: bool) -> None:
        super().__init__(ahead=0)
        self.follows = follows

    def open(self) -> Generator:
        return Weighed(self.follows)

    def weights(self, which: int) -> WeightSource:
        import torch

        return TensorWeights({"up.weight": torch.full((6, 4), 0.5), "up.bias": torch.ones(6)})


def test_a_generator_that_does_not_follow_adapters_fails() -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    adapters_that_travel_alone(WeighedSubject(follows=True))
    with pytest.raises(RuleBroken, match="the same as its whole weights; seen: 1"):
        adapters_that_travel_alone(WeighedSubject(follows=False))


def passes(_: object) -> None: ...


def refuses(_: object) -> None:
    raise Unsupported("the engine has no pause; stop it")


def breaks(_: object) -> None:
    raise RuleBroken("rule")


def record(kind: str = "generator", adapter: str = "mine") -> matrix.MatrixRecord:
    outcomes = tuple(run((passes, refuses, breaks), object()))
    return matrix.MatrixRecord(adapter=adapter, kind=kind, against="engine 1.0", on="2026-11-21", outcomes=outcomes)


def test_records_are_kept_and_rendered(tmp_path: Path) -> None:
    matrix.save(record(), tmp_path)
    matrix.save(matrix.MatrixRecord(adapter="other", kind="generator", against="", on="", outcomes=()), tmp_path)
    found = matrix.load(tmp_path)
    assert [each.adapter for each in found] == ["mine", "other"]
    text = matrix.render(found)
    for line in ("| passes | yes | not run |", "| refuses | no | not run |", "| breaks | FAILED | not run |"):
        assert line in text
    assert "`mine`: the engine has no pause; stop it" in text


def test_a_page_is_written_between_its_markers(tmp_path: Path) -> None:
    matrix.save(record(), tmp_path / "records")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    arguments = ["--records", str(tmp_path / "records"), "--into", str(page)]
    assert matrix.main([*arguments, "--check"]) == 1
    assert matrix.main(arguments) == 0
    assert matrix.main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_what_is_no_record_and_what_is_no_page_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="'oracle' is not one of generator"):
        record(kind="oracle")
    with pytest.raises(UsageError, match="give it the lines"):
        matrix.written("nothing", "")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match=r"x\.json is not a conformance record"):
        matrix.load(tmp_path)
    assert matrix.main(["--records", str(tmp_path), "--into", str(tmp_path / "absent.md")]) == 2
    assert "absent.md" in capsys.readouterr().err


def test_the_page_of_engines_is_as_its_records_say() -> None:
    assert (
        matrix.main(
            ["--records", str(ROOT / "docs/conformance"), "--into", str(ROOT / "docs/reference/engines.md"), "--check"]
        )
        == 0
    )


def test_an_outcome_keeps_the_traceback() -> None:
    found = run((breaks,), object())[0]
    assert isinstance(found, CheckOutcome)
    assert "Broken: rule" in found.text
