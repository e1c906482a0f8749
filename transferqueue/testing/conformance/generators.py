"""Checks that every generator must pass, and the subject that they test.

Use it in the tests of an adapter::

    @pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check, subject):  # a fixture that yields a `GeneratorSubject`
        check(subject)

A check raises `RuleBroken` with the rule that does not hold. It raises `Unsupported` if the engine did, which a test
may turn into a skip: the capability matrix then says no.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

import transferqueue as tq
from transferqueue.adapters.lora_weights import LORA_A, LORA_B, LORA_SCALE, with_product
from transferqueue.adapters.protocols import (
    ABORT,
    LENGTH,
    STOP,
    Caches,
    Completion,
    Generator,
    Ids,
    Logprobs,
    Pause,
    Prompt,
    Sampling,
    Unsupported,
    WeightSource,
)
from transferqueue.adapters.weights import TensorWeights, WeightUpdater
from transferqueue.errors import DeadlineExceeded, TransferQueueError, UsageError
from transferqueue.limits import DELTA_BYTES_MIN
from transferqueue.testing.conformance.report import RuleBroken, require

if TYPE_CHECKING:
    import torch

_TOLERANCE: Final = 1e-3
"""Log-probabilities of two implementations of one model in float32 differ by less."""
_CHANNEL: Final = "policy"
_LONG_TOKENS: Final = 200
_TRIES: Final = 5
"""Tries of a check that needs running completions."""
_GONE_ON_WITH: Final = 16
"""Of the completions that were cut short, a check goes on with as many, those with most tokens."""


class GeneratorSubject(Protocol):
    """An engine under test, with reference results of its model."""

    stop_ids: tuple[int, ...]
    """Four tokens that end a completion, likely enough that one in about ten to forty draws is one of them."""

    def open(self) -> Generator:
        """Return the engine with weights 0 as version 0. It may be the same engine every time, reset."""

    def prompts(self) -> Sequence[Ids]:
        """Return eight prompts or more, of different lengths; 200 tokens after the longest fit the engine's context."""

    def weights(self, which: int) -> WeightSource:
        """Return weights 0 or 1: so different that the same prompt gives other tokens."""

    def misfit(self) -> WeightSource:
        """Return weights with a tensor of a wrong shape."""

    def logprobs(self, which: int, context: Ids, ids: Ids, sampling: Sampling) -> Logprobs:
        """Return log-probabilities of `ids` after `context` under weights `which`, computed by a reference."""


@contextmanager
def opened(subject: GeneratorSubject) -> Iterator[Generator]:
    """The engine, ready; resumed at the end in any case."""
    engine = subject.open()
    try:
        yield engine
    finally:
        engine.resume()


def _prompts(subject: GeneratorSubject, count: int = 8, samples: int = 1) -> list[Prompt]:
    return [Prompt(ids=ids, samples=samples) for ids in subject.prompts()[:count]]


def _crowds(subject: GeneratorSubject) -> Iterator[list[Prompt]]:
    """Prompts for the tries of a check that needs running completions, with twice as many samples each time: a fast
    engine, or a busy machine, may have finished all completions of the first tries."""
    return (_prompts(subject, samples=2 << attempt) for attempt in range(_TRIES))


def _asked(prompts: Sequence[Prompt]) -> int:
    """The number of completions of these prompts."""
    return sum(prompt.samples for prompt in prompts)


def _short(subject: GeneratorSubject) -> Sampling:
    return Sampling(tokens_max=12, stop_ids=subject.stop_ids)


def _long(subject: GeneratorSubject) -> Sampling:
    """Requests whose first completion ends early and whose last ends late, so that a call in between finds completions
    running."""
    return Sampling(tokens_max=_LONG_TOKENS, stop_ids=subject.stop_ids[:1])


def _all(engine: Generator, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
    completions = list(engine.generate(prompts, sampling))
    return sorted(completions, key=lambda completion: (completion.prompt, completion.sample))


def _check_logprobs(subject: GeneratorSubject, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
    """Every token has the log-probability that the weights of its version give it after all tokens before it."""
    sampling = _short(subject)
    for completion in completions:
        context = prompts[completion.prompt].ids
        start = 0
        for version, tokens in completion.spans:
            truth = subject.logprobs(version, context, completion.ids, sampling)[start : start + tokens]
            logprobs = completion.logprobs[start : start + tokens]
            require(
                bool(np.allclose(logprobs, truth, atol=_TOLERANCE)),
                f"log-probs are those of the weights of version {version}, within {_TOLERANCE}",
                float(np.abs(logprobs - truth).max(initial=0.0)),
            )
            start += tokens


# ---------------------------------------------------------------- the checks


def completes_every_sample_once(subject: GeneratorSubject) -> None:
    """Each sample of each prompt comes once, ended for the reason it gives."""
    with opened(subject) as engine:
        prompts, sampling = _prompts(subject, samples=2), _short(subject)
        finished = _all(engine, prompts, sampling)
    require(
        [(each.prompt, each.sample) for each in finished] == [(p, s) for p in range(len(prompts)) for s in range(2)],
        "each sample of each prompt comes once",
        [(each.prompt, each.sample) for each in finished],
    )
    for each in finished:
        require(each.ids.dtype == np.int32 and each.logprobs.dtype == np.float32, "int32 ids, float32 log-probs")
        require(len(each.ids) == len(each.logprobs) == sum(tokens for _, tokens in each.spans), "one of each a token")
        stopped = int(each.ids[-1]) in sampling.stop_ids
        require(each.finish_reason == (STOP if stopped else LENGTH), "the reason is true", each)
        require(stopped or len(each.ids) == sampling.tokens_max, "it ends by a stop token or at the limit", each)
        require(not set(each.ids[:-1].tolist()) & set(sampling.stop_ids), "nothing comes after a stop token", each)


def logprobs_equal_a_reference(subject: GeneratorSubject) -> None:
    """Log-probabilities are the model's."""
    with opened(subject) as engine:
        prompts = _prompts(subject)
        _check_logprobs(subject, prompts, _all(engine, prompts, _short(subject)))


def greedy_is_one_answer(subject: GeneratorSubject) -> None:
    """Temperature 0 gives the same tokens every time."""
    with opened(subject) as engine:
        sampling = replace(_short(subject), temperature=0.0)
        first, second = (_all(engine, _prompts(subject), sampling) for _ in range(2))
    require([e.ids.tolist() for e in first] == [e.ids.tolist() for e in second], "greedy repeats itself")


def a_seed_gives_the_same_again(subject: GeneratorSubject) -> None:
    """The same seed gives the same completions, another seed others."""
    with opened(subject) as engine:
        drawn = [
            [each.ids.tolist() for each in _all(engine, _prompts(subject), replace(_short(subject), seed=seed))]
            for seed in (1, 1, 2)
        ]
    require(drawn[0] == drawn[1], "a seed gives the same again")
    require(drawn[0] != drawn[2], "another seed gives others")


def new_weights_are_stamped_and_used(subject: GeneratorSubject) -> None:
    """After an update, versions and log-probabilities are those of the new weights."""
    with opened(subject) as engine:
        prompts = _prompts(subject)
        before = _all(engine, prompts, _short(subject))
        engine.update_weights(subject.weights(1), 1)
        require(engine.version == 1, "the engine names its version", engine.version)
        after = _all(engine, prompts, _short(subject))
    require(all(each.policy_version == each.policy_version_max == 0 for each in before), "stamped 0 before", before)
    require(all(each.policy_version == each.policy_version_max == 1 for each in after), "stamped 1 after", after)
    _check_logprobs(subject, prompts, before + after)


def weights_change_in_flight(subject: GeneratorSubject) -> None:
    """Completions begun under the old weights go on under the new, each token stamped with its own."""
    finished: list[Completion] = []
    for prompts in _crowds(subject):
        with opened(subject) as engine:
            before = getattr(engine, "prefilled_again", None)
            finished = _updated_in_flight(subject, engine, prompts)
            after = getattr(engine, "prefilled_again", None)
        require(len(finished) == _asked(prompts), "none is lost by an update", len(finished))
        _check_logprobs(subject, prompts, finished)
        if any(len(each.spans) == 2 for each in finished):
            require(before is None or after > before, "tokens that are read again are counted", (before, after))
            return
    require(False, "some were begun before and ended after", [each.spans for each in finished])


def _updated_in_flight(subject: GeneratorSubject, engine: Generator, prompts: list[Prompt]) -> list[Completion]:
    with closing(engine.generate(prompts, _long(subject))) as completions:
        finished = [next(completions)]
        engine.update_weights(subject.weights(1), 1)
        return [*finished, *completions]


def caches_stay_over_an_update(subject: GeneratorSubject) -> None:
    """With `kv` at keep and salt, running completions go on without being read again, each log-prob as its token was
    drawn. With salt, later requests with the same prompts have the log-probs of the new weights alone."""
    for kv in (Caches.KEEP, Caches.SALT):
        finished, crossing = list[Completion](), list[Completion]()
        for prompts in _crowds(subject):
            with opened(subject) as engine, _treating_caches(engine, kv):
                before = getattr(engine, "prefilled_again", 0)
                finished = _updated_in_flight(subject, engine, prompts)
                require(getattr(engine, "prefilled_again", 0) == before, f"{kv.value}: nothing is read again")
                later = _all(engine, prompts[:8], _short(subject)) if kv is Caches.SALT else []
            require(len(finished) == _asked(prompts), "none is lost by an update", len(finished))
            _check_logprobs(subject, prompts, later)
            if crossing := [each for each in finished if len(each.spans) == 2]:
                break
        else:
            require(False, "some were begun before and ended after", [each.spans for each in finished])
        cut = [replace(each, ids=each.ids[:n], spans=((0, n),)) for each in crossing for n in [each.spans[0][1]]]
        _check_logprobs(subject, prompts, [replace(each, logprobs=each.logprobs[: len(each.ids)]) for each in cut])
        require(
            any(_error(subject, prompts, each) > _TOLERANCE for each in crossing),
            f"{kv.value}: tokens after the update have read states of the weights before",
        )


def _error(subject: GeneratorSubject, prompts: Sequence[Prompt], completion: Completion) -> float:
    """How far the log-probs after an update are from those of the new weights alone."""
    at = completion.spans[0][1]
    truth = subject.logprobs(1, prompts[completion.prompt].ids, completion.ids, _short(subject))[at:]
    return float(np.abs(completion.logprobs[at:] - truth).max(initial=0.0))


@contextmanager
def _treating_caches(engine: Any, kv: Caches) -> Iterator[None]:
    if not hasattr(engine, "kv"):
        raise Unsupported(f"{type(engine).__name__} has no attribute kv: caches are computed again")
    engine.kv = kv
    try:
        yield
    finally:
        engine.kv = Caches.RECOMPUTE


def versions_that_change_little(subject: GeneratorSubject) -> None:
    """Of versions of a channel that change a few elements of each tensor, or those of one tensor, the engine ends with
    the same weights as of the whole version."""
    with opened(subject) as engine, tq.connect("embedded") as queue:
        tensors = {name: tensor.clone() for name, tensor in subject.weights(1)}
        largest = max(tensors, key=lambda name: tensors[name].numel())
        versions = [_nudged(tensors, tensors), _nudged(tensors, [largest]), tensors]
        _check_followed(subject, engine, queue, versions, versions)
        if tensors[largest].nbytes >= DELTA_BYTES_MIN:
            require(queue.stats().channels[_CHANNEL].deltas > 0, "these versions are differences")
        _check_logprobs(subject, _prompts(subject), _all(engine, _prompts(subject), _short(subject)))


def adapters_that_travel_alone(subject: GeneratorSubject) -> None:
    """Of versions of a channel that have adapters beside the weights that stay, the engine ends with the same weights
    as of merged versions."""
    with opened(subject) as engine, tq.connect("embedded") as queue:
        tensors = {name: tensor.clone() for name, tensor in subject.weights(1)}
        adapters = [_adapters(tensors, number) for number in range(2)]
        if len(adapters[0]) == 1:
            raise Unsupported("the model has no matrix named LAYER.weight, beside which an adapter has its name")
        merged = [_merged(tensors, each) for each in adapters]
        _check_followed(subject, engine, queue, [tensors | each for each in adapters], merged)


def _check_followed(
    subject: GeneratorSubject,
    engine: Generator,
    queue: tq.Queue,
    published: Sequence[Mapping[str, torch.Tensor]],
    whole: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Check that the engine draws with each version that it follows on a channel as it does with the whole weights."""
    prompts, seeded = _prompts(subject), replace(_short(subject), seed=1)
    followed, loaded = list[list[Completion]](), list[list[Completion]]()
    for weights in whole:
        engine.update_weights(TensorWeights(weights), 1)
        loaded.append(_all(engine, prompts, seeded))
    channel = queue.weights(_CHANNEL)
    reads_channel = getattr(engine, "reads_channel", False)
    updater = WeightUpdater(
        queue, _CHANNEL, lambda source, _: engine.update_weights(source, 1), reads_channel=reads_channel
    )
    for number, version in enumerate(published):
        channel.publish(number, version)
        require(updater.follow(), "a version that was published is there")
        followed.append(_all(engine, prompts, seeded))
    for number, (one, other) in enumerate(zip(followed, loaded, strict=True)):
        require(_are_alike(one, other), "a version that is followed gives the same as its whole weights", number)


def _nudged(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors, with every fortieth element of some of them moved."""
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        moved[name].view(-1)[::40] += 0.5
    return moved


def _adapters(tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Adapters of rank 2 for all matrices, as a channel has them beside the weights; others for another number."""
    import torch

    draws = torch.Generator().manual_seed(number)
    made = {LORA_SCALE: torch.tensor(2.0)}
    for name, tensor in tensors.items():
        layer, dot, part = name.rpartition(".")
        if tensor.ndim == 2 and dot and part == "weight":
            made[f"{layer}.{LORA_A}"] = torch.randn(2, tensor.shape[1], generator=draws).to(tensor.dtype) / 8
            made[f"{layer}.{LORA_B}"] = torch.randn(tensor.shape[0], 2, generator=draws).to(tensor.dtype) / 8
    return made


def _merged(tensors: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for name in adapters:
        layer, _, part = name.rpartition(".")
        if part == LORA_A:
            weight, a, b = tensors[f"{layer}.weight"], adapters[name], adapters[f"{layer}.{LORA_B}"]
            found[f"{layer}.weight"] = with_product(weight, a, b, float(adapters[LORA_SCALE])).to(weight.dtype)
    return found


def _are_alike(these: Sequence[Completion], those: Sequence[Completion]) -> bool:
    return all(
        one.ids.tolist() == other.ids.tolist() and np.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        for one, other in zip(these, those, strict=True)
    )


def misfitting_weights_change_nothing(subject: GeneratorSubject) -> None:
    """Weights that do not fit are refused, and the old ones stay."""
    with opened(subject) as engine:
        try:
            engine.update_weights(subject.misfit(), 7)
        except Unsupported:
            raise
        except UsageError:
            pass
        else:
            require(False, "weights of a wrong shape are refused with UsageError")
        require(engine.version == 0, "the version stays", engine.version)
        prompts = _prompts(subject, 2)
        _check_logprobs(subject, prompts, _all(engine, prompts, _short(subject)))


def pause_keeps(subject: GeneratorSubject) -> None:
    """`KEEP`: running completions stop, and continue after resume. A second pause changes nothing."""
    _keep(subject, lambda engine: None)


def weights_change_while_paused(subject: GeneratorSubject) -> None:
    """Completions that `KEEP` stopped continue under weights that were loaded meanwhile."""
    _keep(subject, lambda engine: engine.update_weights(subject.weights(1), 1))


def _keep(subject: GeneratorSubject, meanwhile: Callable[[Generator], None]) -> None:
    with opened(subject) as engine:
        prompts = _prompts(subject, samples=2)
        with closing(engine.generate(prompts, _long(subject))) as completions:
            finished = [next(completions)]
            engine.pause(Pause.KEEP)
            engine.pause(Pause.KEEP)
            meanwhile(engine)
            engine.resume()
            engine.resume()
            finished += completions
    require(len(finished) == 2 * len(prompts), "none is lost by a pause", len(finished))
    require(all(each.finish_reason in (STOP, LENGTH) for each in finished), "each is finished")
    _check_logprobs(subject, prompts, finished)


def requests_wait_while_paused(subject: GeneratorSubject) -> None:
    """A request that comes during a pause waits for the end of it, or for its own deadline."""
    with opened(subject) as engine:
        engine.pause(Pause.KEEP)
        try:
            list(engine.generate(_prompts(subject, 1), _short(subject), timeout_s=0.2))
        except DeadlineExceeded:
            pass
        else:
            require(False, "a request during a pause raises DeadlineExceeded when its time is up")
        engine.resume()
        require(len(_all(engine, _prompts(subject, 1), _short(subject))) == 1, "and the engine works afterwards")


def pause_aborts_and_another_goes_on(subject: GeneratorSubject) -> None:
    """`ABORT`: running completions are returned as they are. Continued later, each is one completion."""
    _abort(subject, lambda engine: None)


def another_goes_on_under_other_weights(subject: GeneratorSubject) -> None:
    """A completion that was cut short and continued after an update is one completion under two versions."""
    _abort(subject, lambda engine: engine.update_weights(subject.weights(1), 1))


def _abort(subject: GeneratorSubject, meanwhile: Callable[[Generator], None]) -> None:
    with opened(subject) as engine:
        prompts = _prompts(subject)
        cut = sorted(_cut(subject, engine), key=lambda each: -len(each.ids))[:_GONE_ON_WITH]
        meanwhile(engine)
        again = [replace(prompts[each.prompt], begun=each) for each in cut]
        ended = _all(engine, again, _long(subject))
    for each in ended:
        before = cut[each.prompt]
        require(
            each.ids[: len(before.ids)].tolist() == before.ids.tolist(), "the completion begins with its earlier tokens"
        )
        require(each.sample == before.sample, "it is the same sample")
        require(each.spans[0][0] == 0 or not len(before.ids), "older tokens keep their version", each.spans)
    _check_logprobs(subject, again, ended)


def _cut(subject: GeneratorSubject, engine: Generator) -> list[Completion]:
    """Completions that a pause cut short."""
    for prompts in _crowds(subject):
        with closing(engine.generate(prompts, _long(subject))) as completions:
            finished = [next(completions)]
            engine.pause(Pause.ABORT)
            finished += completions
        engine.resume()
        require(len(finished) == _asked(prompts), "each is handed out, finished or not", len(finished))
        if cut := [each for each in finished if each.finish_reason == ABORT]:
            return cut
    raise RuleBroken("some were cut short by a pause while they ran")


def goes_on_in_parts_under_newer_weights(subject: GeneratorSubject) -> None:
    """A completion that a length limit ended continues after an update. The limit counts its earlier tokens, and each
    token keeps its version."""
    with opened(subject) as engine:
        prompts, sampling = _prompts(subject), replace(_short(subject), tokens_max=4)
        begun = [
            replace(each, finish_reason=ABORT)
            for each in _all(engine, prompts, sampling)
            if each.finish_reason == LENGTH
        ]
        engine.update_weights(subject.weights(1), 1)
        again = [replace(prompts[each.prompt], begun=each) for each in begun]
        ended = _all(engine, again, replace(sampling, tokens_max=8))
    require(len(ended) == len(begun) > 0, "each that was begun is gone on with", len(begun))
    for each in ended:
        before = begun[each.prompt]
        require(each.ids[:4].tolist() == before.ids.tolist(), "the completion begins with its earlier tokens")
        require(each.logprobs[:4].tolist() == before.logprobs.tolist(), "with its log-probs")
        require(each.spans == ((0, 4), (1, len(each.ids) - 4)), "each token has the version that drew it", each.spans)
        require(len(each.ids) == 8 or each.finish_reason == STOP, "the limit counts earlier tokens", len(each.ids))
    _check_logprobs(subject, again, ended)


def pause_waits(subject: GeneratorSubject) -> None:
    """`WAIT`: running completions are finished first."""
    with opened(subject) as engine:
        prompts = _prompts(subject, samples=2)
        with closing(engine.generate(prompts, _long(subject))) as completions:
            finished = [next(completions)]
            with _pausing(engine, Pause.WAIT):
                finished += completions
        engine.resume()
    require(len(finished) == 2 * len(prompts), "none is lost", len(finished))
    require(all(each.finish_reason in (STOP, LENGTH) for each in finished), "each is finished")


def a_deadline_ends_a_request(subject: GeneratorSubject) -> None:
    """A request that takes too long raises, and the engine goes on."""
    with opened(subject) as engine:
        try:
            list(engine.generate(_prompts(subject), replace(_long(subject), stop_ids=()), timeout_s=0.0))
        except DeadlineExceeded:
            pass
        else:
            require(False, "a request of no time raises DeadlineExceeded")
        require(len(_all(engine, _prompts(subject), _short(subject))) == 8, "the engine works afterwards")


def closing_aborts_the_rest(subject: GeneratorSubject) -> None:
    """Closing the iterator early ends the request, not the engine."""
    with opened(subject) as engine:
        with closing(engine.generate(_prompts(subject), _long(subject))) as completions:
            next(completions)
        engine.pause(Pause.WAIT)
        engine.resume()
        require(len(_all(engine, _prompts(subject), _short(subject))) == 8, "the engine works afterwards")


def threads_share_the_engine(subject: GeneratorSubject) -> None:
    """Two threads iterate at once, and each gets its own completions."""

    def work(engine: Generator, number: int) -> list[Completion]:
        return _all(engine, [Prompt(ids=subject.prompts()[number], samples=4)], _short(subject))

    with opened(subject) as engine, ThreadPoolExecutor(2) as threads:
        working = [threads.submit(work, engine, number) for number in range(2)]
        for number, each in enumerate(working):
            finished = each.result(120)
            require(len(finished) == 4, "each thread gets its completions", finished)
            _check_logprobs(subject, [Prompt(ids=subject.prompts()[number])], finished)


def what_cannot_be_done_is_refused(subject: GeneratorSubject) -> None:
    """No prompts, or a length beyond the context: `UsageError`, and the engine goes on."""
    with opened(subject) as engine:
        for prompts, sampling in (([], _short(subject)), (_prompts(subject), Sampling(tokens_max=10_000_000))):
            try:
                list(engine.generate(prompts, sampling))
            except UsageError:
                continue
            require(False, "a request that cannot be done raises UsageError", (len(prompts), sampling))
        require(len(_all(engine, _prompts(subject), _short(subject))) == 8, "the engine works afterwards")


GENERATOR_CHECKS: Final[tuple[Callable[[GeneratorSubject], None], ...]] = (
    completes_every_sample_once,
    logprobs_equal_a_reference,
    greedy_is_one_answer,
    a_seed_gives_the_same_again,
    new_weights_are_stamped_and_used,
    weights_change_in_flight,
    caches_stay_over_an_update,
    versions_that_change_little,
    adapters_that_travel_alone,
    misfitting_weights_change_nothing,
    pause_keeps,
    weights_change_while_paused,
    requests_wait_while_paused,
    pause_aborts_and_another_goes_on,
    another_goes_on_under_other_weights,
    goes_on_in_parts_under_newer_weights,
    pause_waits,
    a_deadline_ends_a_request,
    closing_aborts_the_rest,
    threads_share_the_engine,
    what_cannot_be_done_is_refused,
)


# ---------------------------------------------------------------- a pause from another thread


@contextmanager
def _pausing(engine: Generator, mode: Pause) -> Iterator[None]:
    """Pause from another thread: a pause that waits for completions takes effect only while they are consumed."""
    failures: list[TransferQueueError] = []

    def pause() -> None:
        try:
            engine.pause(mode)
        except TransferQueueError as error:
            failures.append(error)

    thread = threading.Thread(target=pause)
    thread.start()
    yield
    thread.join(120)
    if failures:
        raise failures[0]
    require(not thread.is_alive(), f"pause ({mode.value}) comes into force")
