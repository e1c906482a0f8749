"""The stream generation service: prompts in, a stream of finished samples out, generators in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)

import transferqueue as tq
from tests.workflows.stream_engine import POISON, SAMPLING, Countdown, answer, count_down
from transferqueue.adapters.protocols import Completion, Prompt
from transferqueue.errors import DeadlineExceeded, SchemaError, UsageError
from transferqueue.workflows.service import CompletionStream, SamplesLost, Service, serve, stream_engines
from transferqueue.workflows.service.samples import GENERATE, completions

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


@contextmanager
def generators(count: int, *addresses: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that generate until their service is sealed."""
    command = [sys.executable, "-m", "tests.workflows.stream_engine", *addresses]
    running = [subprocess.Popen(command, cwd=ROOT) for _ in range(count)]
    try:
        yield running
        for one in running:
            one.wait(timeout=WAIT_S)
    finally:
        for one in running:
            one.kill()
            one.wait()


def prompts(last: Sequence[int], samples: int = 1) -> list[Prompt]:
    return [Prompt.of([7, one], samples) for one in last]


def places(found: Sequence[Completion]) -> list[tuple[int, int]]:
    return sorted((one.prompt, one.sample) for one in found)


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        yield found


@pytest.fixture
def service(queue: tq.Queue) -> Service:
    found = Service.init_engines(queue, stream_engines())
    found.update(count_down(1))
    return found


def generate_all(queue: tq.Queue, service: Service) -> None:
    """All that is asked for, in this process; then the service has ended."""
    service.seal()
    serve(queue, Countdown(), SAMPLING, stall_s=WAIT_S)


# ---------------------------------------------------------------- with processes


@pytest.mark.slow
def test_samples_stream_from_generators_in_other_processes_with_the_weights_of_each_update(queue: tq.Queue) -> None:
    service = Service.init_engines(queue, stream_engines(batch_rows=24, max_staleness=0, depth=0))
    with generators(2, queue.address) as running:
        for step in range(3):
            assert service.update(count_down(step + 1)) == step
            asked = prompts(range(20, 32), samples=2)
            with service.generate(asked, timeout_s=WAIT_S) as stream:
                found = list(stream)
            assert places(found) == [(prompt, sample) for prompt in range(12) for sample in range(2)]
            for one in found:
                assert one.ids.tolist() == answer(asked[one.prompt].ids, count_down(step + 1)["next"])
                assert one.spans == ((step, len(one.ids)),)
        service.seal()
    assert [one.returncode for one in running] == [0, 0]
    assert service.table.audit().rows_done == 72


@pytest.mark.slow
def test_the_next_request_is_generated_while_this_one_is_taken_and_staleness_is_bounded(queue: tq.Queue) -> None:
    service = Service.init_engines(queue, stream_engines(batch_rows=8, max_staleness=1, depth=1, groups=True))
    service.update(count_down(1))
    with generators(1, queue.address):
        ahead = service.generate(prompts([30, 40], samples=4), timeout_s=WAIT_S)
        for step in range(1, 4):
            stream, ahead = ahead, service.generate(prompts([30, 40], samples=4), timeout_s=WAIT_S)
            rows = 0
            for batch in stream.batches(8, at_least=4):
                with batch:
                    rows += len(batch)
                    assert set(Counter(batch.group_id.tolist()).values()) == {4}
                    assert (batch.version - batch.policy_version <= 1).all()
            assert rows == 8
            service.update(count_down(step + 1))
        assert ahead.cancel() == 8
        service.seal()
    assert service.table.audit().dropped == {"cancelled": 8}


@pytest.mark.slow
def test_a_generator_that_dies_loses_nothing_and_what_was_dropped_is_told(queue: tq.Queue) -> None:
    service = Service.init_engines(queue, stream_engines())
    service.update(count_down(1))
    asked = [*prompts(range(10, 14)), Prompt.of([POISON, 3])]
    with generators(1, queue.address) as running:
        stream = service.generate(asked, scores=[1, 2, 3, 4, 5], timeout_s=WAIT_S)
        assert running[0].wait(timeout=WAIT_S) == 1  # it had three others, too
    poisoned = service.table.read(where=tq.Compare("prompt", "==", 4), fields=[]).rows
    service.table.drop(poisoned, "poison")
    generate_all(queue, service)
    assert places([next(stream) for _ in range(4)]) == [(prompt, 0) for prompt in range(4)]
    with pytest.raises(SamplesLost, match=r"1 samples were still to come, and 0 are left.*say why"):
        next(stream)


# ---------------------------------------------------------------- order, and what is handed back


def test_the_longest_go_first_and_a_request_before_goes_before(queue: tq.Queue, service: Service) -> None:
    service.generate(prompts([3, 9, 5]), scores=[0.3, 0.9, 0.5])
    service.generate(prompts([20]), scores=[100.0])
    service.generate(prompts([8, 9]))
    with service.table.lease(GENERATE, rows=6) as batch:
        assert [int(ids[-1]) for ids in batch["prompt_ids"]] == [9, 5, 3, 20, 8, 9]
        batch.release()


def test_closing_hands_back_what_was_not_taken_and_another_goes_on(queue: tq.Queue, service: Service) -> None:
    with service.generate(prompts(range(10, 30)), timeout_s=WAIT_S) as stream:
        generate_all(queue, service)
        taken = [next(stream) for _ in range(5)]
    assert list(stream) == []
    with tq.connect(queue.address) as elsewhere:
        rest = list(Service.join(elsewhere).resume(stream.request, timeout_s=WAIT_S))
    assert places([*taken, *rest]) == [(prompt, 0) for prompt in range(20)]
    assert list(service.resume(stream.request)) == []
    assert service.table.audit().rows_done == 20


def use_one(stream: CompletionStream, used: list[Completion]) -> None:
    """The second cannot be used."""
    with stream:
        used.append(next(stream))
        next(stream)
        raise ZeroDivisionError


def test_a_sample_that_could_not_be_used_comes_again(queue: tq.Queue, service: Service) -> None:
    stream = service.generate(prompts(range(10, 14)), timeout_s=WAIT_S)
    generate_all(queue, service)
    first: list[Completion] = []
    with pytest.raises(ZeroDivisionError):
        use_one(stream, first)
    rest = list(service.resume(stream.request))
    assert places([*first, *rest]) == [(prompt, 0) for prompt in range(4)]


def test_batches_are_dynamic_and_what_is_released_comes_again(queue: tq.Queue, service: Service) -> None:
    stream = service.generate(prompts(range(10, 16)), timeout_s=WAIT_S)
    generate_all(queue, service)
    sizes, found = [], []
    for batch in stream.batches(4, at_least=2):
        sizes.append(len(batch))
        if len(sizes) == 1:
            batch.release()
            continue
        found += completions(batch)
        batch.ack()
    assert sizes == [4, 2, 4]
    assert places(found) == [(prompt, 0) for prompt in range(6)]


def test_a_stream_ends_at_its_deadline_and_can_be_asked_again(queue: tq.Queue, service: Service) -> None:
    stream = service.generate(prompts([5]), timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match="response_ids"):
        next(stream)
    generate_all(queue, service)
    assert next(stream).ids.tolist() == [4, 3, 2, 1, 0]


def test_a_cancelled_request_is_dropped_while_it_is_generated(queue: tq.Queue, service: Service) -> None:
    stream = service.generate(prompts(range(4)))
    being_generated = service.table.lease(GENERATE, rows=2)
    assert stream.cancel() == 4
    assert being_generated.ack() == 0
    assert service.table.audit().dropped == {"cancelled": 4}
    assert stream.cancel() == 0


# ---------------------------------------------------------------- refusals


def test_requests_that_make_no_sense_put_nothing(queue: tq.Queue, service: Service) -> None:
    begun = Completion(
        prompt=0,
        sample=0,
        ids=np.ones(1, np.int32),
        logprobs=np.ones(1, np.float32),
        finish_reason="abort",
        spans=((0, 1),),
    )
    with pytest.raises(UsageError, match="no prompts: give at least one"):
        service.generate([])
    with pytest.raises(UsageError, match=r"something begun.*give begun=None"):
        service.generate([Prompt(ids=np.ones(2, np.int32), begun=begun)])
    for scores in ([1.0], [1.0, float("nan")]):
        with pytest.raises(UsageError, match=r"scores \(\d,\) for 2 prompts: give one number a prompt"):
            service.generate(prompts([1, 2]), scores=scores)
    assert service.table.audit().rows_put == 0


def test_a_table_without_the_stages_is_refused(queue: tq.Queue) -> None:
    queue.create_table("other", tasks=[tq.Task("train")])
    with pytest.raises(SchemaError, match=r'"other" has stages train; .*: declare the job with stream_engines'):
        Service.join(queue, name="other").generate(prompts([1]))
    with pytest.raises(SchemaError, match='"other" has stages train'):
        serve(queue, Countdown(), SAMPLING, name="other")


def test_a_generator_without_weights_says_what_is_missing(queue: tq.Queue) -> None:
    Service.init_engines(queue, stream_engines())
    with pytest.raises(DeadlineExceeded, match=r"version 0 or later did not come within 0.05 s.*update the service"):
        serve(queue, Countdown(), SAMPLING, stall_s=0.05)
