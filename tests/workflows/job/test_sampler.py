"""Prompts by pass rate: each number once, by the shares that are declared, the same again after any kill."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transferqueue as tq
from tests.scale import examples
from tests.workflows.job import jobs
from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.errors import AlreadyExists, DeadlineExceeded, UsageError
from transferqueue.workflows.dispatch.channels import since
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data import sampler
from transferqueue.workflows.job.data.prompt_data import open_prompts
from transferqueue.workflows.job.data.sampler import GroupRates, SampledSequence, StepPrompts
from transferqueue.workflows.job.data.sequence import NumberedPrompt, PromptSequence, sources_of
from transferqueue.workflows.job.data.source import JobPrompts, sampled
from transferqueue.workflows.job.graph import fields
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run_files import SAMPLER
from transferqueue.workflows.job.settings.job import SamplerSettings
from transferqueue.workflows.job.stages.advantage import PassRates

SIZES = (7, 5)
WEIGHTS = (3.0, 1.0)
PROMPTS = 4
LOW, HIGH, SHARE = 0.25, 0.75, 0.5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sources; the prompts say their source and row."""
    here = tmp_path_factory.mktemp("data")
    for source, size in enumerate(SIZES):
        lines = [json.dumps({"prompt": f"{source}.{row}"}) for row in range(size)]
        (here / f"{source}.jsonl").write_text("\n".join(lines))
    (here / "rewards_of_sampler.py").write_text("def none(completions):\n    return [0.0] * len(completions)\n")
    (here / "own_samplers.py").write_text(SAMPLERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        job = job_of(here)
        yield SimpleNamespace(here=here, job=job, opened=open_prompts(job, ByteTokenizer()))


def job_of(here, *changes):
    sources = ", ".join(f"{{path='{here}/{at}.jsonl', weight={weight}}}" for at, weight in enumerate(WEIGHTS))
    sampler = f"data.sampler={{by='pass_rate', low={LOW}, high={HIGH}, share={SHARE}}}"
    reward = "reward.0.function=rewards_of_sampler:none"
    return jobs.job("grpo", 'data.path=""', f"data.sources=[{sources}]", sampler, reward, "steps=50", *changes)


class Policy:
    """Rates that the prompts of a run get; news are those of `delay` groups before. The tests play the queue and the
    advantage stage. path: of the file of steps."""

    def __init__(self, path: Path, rates: Sequence[float] = (1.0,), delay: int = 0) -> None:
        self.path, self.rates, self.delay = path, rates, delay
        self.told: list[tuple[int, float]] = []

    def life(self, data, seed=0, **changes) -> SampledSequence:
        """The sequence of a source that has just begun. changes: to the job's sampler."""
        settings = data.job.data.sampler
        return SampledSequence(
            PromptSequence(data.opened, data.job.data, seed=seed),
            msgspec.structs.replace(settings, **changes),
            prompts=PROMPTS,
            seed=seed,
            path=self.path,
            news=lambda version: (version, [self.told[: max(0, len(self.told) - self.delay)]]),
        )

    def answer(self, prompts: Sequence[NumberedPrompt]) -> None:
        for each in prompts:
            self.told.append((each.number, self.rates[each.number % len(self.rates)]))

    def steps(self) -> list[StepPrompts]:
        return steps_of(self.path)


def steps_of(path: Path) -> list[StepPrompts]:
    return [msgspec.json.decode(line, type=StepPrompts) for line in path.read_bytes().splitlines()]


def taken(data, policy: Policy, puts: Sequence[int], kills: Sequence[bool], seed: int = 0) -> list[NumberedPrompt]:
    """The prompts of a run whose source takes `puts` prompts at a time, and is killed before some of these."""
    prompts: list[NumberedPrompt] = []
    source = policy.life(data, seed)
    for count, killed in zip(puts, kills, strict=True):
        if killed:
            source = policy.life(data, seed)
            assert source.skip(len(prompts)) == len(prompts) == source.number
        put = source.take(count)
        prompts += put
        policy.answer(put)
    return prompts


@pytest.fixture
def new_path(tmp_path):
    """Call it for the path of a file that is not there."""
    numbers = itertools.count()
    return lambda: tmp_path / f"{next(numbers)}.jsonl"


rates = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=9)
lives = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=24)
hypothesis_settings = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@hypothesis_settings
@given(rates=rates, lives=lives, delay=st.integers(0, 6), seed=st.integers(0, 3))
def test_a_run_that_is_killed_takes_the_prompts_that_it_would_have_taken(data, new_path, rates, lives, delay, seed):
    puts = [count for count, _ in lives]
    whole, killed = Policy(new_path(), rates, delay), Policy(new_path(), rates, delay)
    undisturbed = taken(data, whole, puts, [False] * len(puts), seed)
    again = taken(data, killed, puts, [kill for _, kill in lives], seed)
    assert [(each.number, each.row, each.text) for each in again] == [
        (each.number, each.row, each.text) for each in undisturbed
    ]
    assert [each.number for each in again] == list(range(sum(puts)))
    assert killed.steps() == whole.steps()


@hypothesis_settings
@given(rates=rates, steps=st.integers(1, 16), delay=st.integers(0, 6), seed=st.integers(0, 3))
def test_shares_of_sources_hold_and_each_prompt_has_its_turn(data, new_path, rates, steps, delay, seed):
    policy = Policy(new_path(), rates, delay)
    prompts = taken(data, policy, [PROMPTS] * steps, [False] * steps, seed)
    sources = [int(prompt.text.partition(".")[0]) for prompt in prompts]
    assert sources == sources_of(0, len(prompts), WEIGHTS).tolist()
    known: dict[int, float] = {}
    for step, chosen in zip(policy.steps(), chosen_rows(policy.steps()), strict=True):
        known |= {prompts[number].row: rate for number, rate in step.rates}
        assert all(LOW <= known[row] <= HIGH for row in chosen)
        assert len(set(chosen)) == len(chosen) <= SHARE * PROMPTS + len(SIZES)  # a share of each, rounded by chance
    for source, turns in enumerate(policy.steps()[-1].places):
        rows = [prompt.row - sum(SIZES[:source]) for prompt, of in zip(prompts, sources, strict=True) if of == source]
        assert min(rows.count(row) for row in range(SIZES[source])) >= turns // SIZES[source], "each has its turns"


def chosen_rows(steps: Sequence[StepPrompts]) -> Iterator[list[int]]:
    """Of each step the rows that were chosen: those of a source that come before the next in its order."""
    before = [0] * len(SIZES)
    for step in steps:
        chosen: list[int] = []
        for source, first in enumerate((0, SIZES[0])):
            rows = [row for row in step.rows if first <= row < first + SIZES[source]]
            chosen += rows[: len(rows) - (step.places[source] - before[source])]
        before = step.places
        yield chosen


def by_row(source: SampledSequence) -> dict[int, tuple[int, float]]:
    return source._rates


def test_the_newest_group_decides_whenever_it_is_scored_and_numbers_of_no_prompt_are_passed_over(data, tmp_path):
    policy = Policy(tmp_path / SAMPLER)
    policy.told = [(number, 0.5) for number in range(99)]
    live = policy.life(data)
    prompts = live.take(PROMPTS)
    assert policy.steps()[0].rates == [], "another run told these"
    for _ in range(20):  # until a prompt of the first step came again
        policy.told = []
        prompts += live.take(PROMPTS)
        again = next((each for each in prompts[PROMPTS:] if each.row in {first.row for first in prompts[:PROMPTS]}), 0)
        if again:
            break
    first = next(each for each in prompts if each.row == again.row)
    policy.told = [(again.number, 0.25), (first.number, 1.0)]
    live.take(PROMPTS)
    assert by_row(live) == {again.row: (again.number, 0.25)}
    assert policy.steps()[-1].rates == [(again.number, 0.25)]


def test_rates_that_are_told_again_are_those_told_last_after_a_kill_too(data, tmp_path):
    policy = Policy(tmp_path / SAMPLER)
    live = policy.life(data)
    live.take(PROMPTS)
    policy.told = [(0, 0.5), (1, 0.25)]
    live.take(PROMPTS)
    policy.told += [(0, 1.0), (1, 1.0), (0, 0.5)]  # after a step that was taken back: another rate, then the one before
    live.take(PROMPTS)
    assert [step.rates for step in policy.steps()] == [[], [(0, 0.5), (1, 0.25)], [(1, 1.0)]]
    again = policy.life(data)
    again.skip(3 * PROMPTS)
    assert by_row(again) == by_row(live)


# ---------------------------------------------------------------- functions of one's own

SAMPLERS = """
import threading

def ragged(**given): return [[1], [2, 3]]
def nested(**given): return [[1]]
def nothing(**given): return None
def fractions(**given): return [0.5]
def beyond(**given): return [99]
def negative(**given): return [-1]
def many(**given): return [0] * 9
def raises(**given): return [][0]
def exits(**given): exit()
def hangs(**given): threading.Event().wait()
def second(**given): return [1]
def endless(**given):
    while True:
        yield 1
"""


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("ragged", UsageError, "raised TypeError: 'list' object cannot be interpreted as an integer"),
        ("nested", UsageError, "raised TypeError"),
        ("nothing", UsageError, "no whole numbers, but raised TypeError: 'NoneType'"),
        ("fractions", UsageError, "raised TypeError: 'float'"),
        ("beyond", UsageError, r"chose \[99\]; .* from 0 to 6"),
        ("negative", UsageError, "from 0 to 6"),
        ("many", UsageError, "return at most count="),
        ("endless", UsageError, "return at most count="),
        ("raises", UsageError, "raised IndexError: list index out of range"),
        ("exits", UsageError, "raised SystemExit"),
        ("hangs", DeadlineExceeded, r"did not return within 0\.1 s"),
    ],
)
def test_a_function_that_chooses_no_rows_is_refused_by_name(data, tmp_path, monkeypatch, name, error, text):
    monkeypatch.setattr(sampler, "CHOOSE_S", 0.1 if name == "hangs" else 60.0)
    path = tmp_path / SAMPLER
    with pytest.raises(error, match=rf"^data\.sampler\.by='own_samplers:{name}' .*{text}"):
        Policy(path).life(data, by=f"own_samplers:{name}").take(1)
    assert not path.exists(), "nothing is noted"


@pytest.mark.parametrize("overlong", ["drop", "refuse"])
def test_a_chosen_prompt_that_is_too_long_is_treated_as_one_in_the_order(data, tmp_path, overlong):
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("a", "b" * 99, "c")))
    job = jobs.job("grpo", f"data.path='{tmp_path}/long.jsonl'", "data.shuffle=false", f"data.overlong={overlong}")
    job = msgspec.structs.replace(job, reward=data.job.reward)
    one = SimpleNamespace(job=job, opened=open_prompts(job, ByteTokenizer()))
    source = Policy(tmp_path / SAMPLER).life(one, by="own_samplers:second", share=1.0)
    if overlong == "refuse":
        with pytest.raises(UsageError, match=r"the prompt has .* tokens; data\.prompt_tokens_max"):
            source.take(4)
    else:
        assert [prompt.text for prompt in source.take(4)] == ["a", "c", "a", "c"]
        assert source.dropped == 1


# ---------------------------------------------------------------- what was noted, and is no longer there


def noted(data, tmp_path, prompts: int = 3 * PROMPTS) -> Policy:
    """A run that has put so many prompts."""
    policy = Policy(tmp_path / SAMPLER)
    policy.life(data).take(prompts)
    return policy


@pytest.mark.parametrize("rest", [-9, 0])
def test_a_line_that_a_kill_cut_short_is_written_again_where_nothing_of_it_was_put(data, tmp_path, rest):
    policy = noted(data, tmp_path)
    whole = policy.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    policy.path.write_bytes(lines[0] + lines[1] + lines[2][:rest])
    source = policy.life(data)
    source.skip(2 * PROMPTS)
    source.take(PROMPTS)
    assert policy.path.read_bytes() == whole


def test_steps_after_the_prompts_that_were_put_are_taken_as_they_were_noted(data, tmp_path):
    policy = Policy(tmp_path / SAMPLER, (0.5,))
    puts = [PROMPTS] * 6
    prompts = taken(data, policy, puts, [False] * 6)
    whole, last = policy.path.read_bytes(), policy.life(data)
    last.skip(sum(puts))
    policy.told = []  # a run that goes on at a checkpoint has a new channel
    source = policy.life(data)
    source.skip(5)
    again = [prompt for count in (1, 6, 2, 10) for prompt in source.take(count)]
    assert [(each.number, each.text) for each in again] == [(each.number, each.text) for each in prompts[5:]]
    assert policy.path.read_bytes() == whole
    assert by_row(source) == by_row(last), "no rate is lost"


def changed(name: str, value: list) -> Callable[[list[bytes]], list[bytes]]:
    """A damage that gives a field of the second line another value."""
    return lambda lines: [lines[0], json.dumps(json.loads(lines[1]) | {name: value}).encode() + b"\n", lines[2]]


@pytest.mark.parametrize(
    ("damage", "end", "why"),
    [
        (lambda lines: [lines[0], lines[1][:-9]], PROMPTS, "line 2 is damaged"),
        (lambda lines: [lines[0], b"\0" * 60 + b"\n", lines[2]], PROMPTS, "line 2 is damaged"),
        (lambda lines: [lines[0], lines[2]], PROMPTS, "line 2 is damaged"),
        (lambda lines: [lines[0], lines[1].replace(b'"rows":[', b'"rows":[99,'), lines[2]], PROMPTS, "line 2 is dam"),
        (changed("rates", [[0, 2.0]]), PROMPTS, "line 2 is damaged"),
        (changed("rates", [[PROMPTS, 0.5]]), PROMPTS, "line 2 is damaged"),
        (changed("rates", [[-1, 0.5]]), PROMPTS, "line 2 is damaged"),
        (changed("places", [1]), PROMPTS, "line 2 is damaged"),
        (changed("places", [-3, 1]), PROMPTS, "line 2 is damaged"),
        (changed("places", [10**30, 1]), PROMPTS, "line 2 is damaged"),
        (changed("rows", []), PROMPTS, "line 2 is damaged"),
        (changed("rows", [-1] * PROMPTS), PROMPTS, "line 2 is damaged"),
        (lambda lines: lines[:2], 2 * PROMPTS, "the rest is missing"),
        (lambda lines: [], 0, "the rest is missing"),
        (None, 0, "the rest is missing"),
    ],
)
def test_a_file_that_lacks_prompts_which_were_put_is_refused_and_left_as_it_is(data, tmp_path, damage, end, why):
    policy, put = noted(data, tmp_path), 2 * PROMPTS + 1
    if damage is None:
        policy.path.unlink()
    else:
        policy.path.write_bytes(b"".join(damage(policy.path.read_bytes().splitlines(keepends=True))))
    before = policy.path.read_bytes() if damage else None
    with pytest.raises(UsageError, match=rf"has the first {end} prompts of the run, and {put} were put: {why}"):
        policy.life(data).skip(put)
    assert (policy.path.read_bytes() if policy.path.exists() else None) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_step_that_cannot_be_noted_ends_the_run_with_what_to_do(data, tmp_path):
    path = tmp_path / SAMPLER
    path.symlink_to("/dev/full")
    with pytest.raises(
        StageFailedInProcess, match=rf'cannot be noted in "{path}": .*; make room there, and go on with'
    ):
        Policy(path).life(data).take(1)
    with pytest.raises(StageFailedInProcess, match=rf'cannot be read from "{tmp_path}": .* go on with train --resume'):
        Policy(tmp_path).life(data).skip(1)


def test_other_data_is_refused(data, tmp_path):
    policy = noted(data, tmp_path)
    before = policy.path.read_bytes()
    (tmp_path / "0.jsonl").write_text(json.dumps({"prompt": "x"}))
    job = jobs.job("grpo", f"data.path='{tmp_path}/0.jsonl'")
    job = msgspec.structs.replace(job, reward=data.job.reward)
    other = SimpleNamespace(job=job, opened=open_prompts(job, ByteTokenizer()))
    with pytest.raises(UsageError, match=r"sources with \[7, 5\] rows, and those of the data have \[1\]"):
        policy.life(other, by="pass_rate").skip(PROMPTS)
    assert policy.path.read_bytes() == before


@pytest.mark.parametrize(("before", "after"), [("pass_rate", ""), ("", "pass_rate")])
def test_a_sampler_is_neither_left_out_nor_added_later(data, tmp_path, before, after):
    def job(by: str):
        settings = msgspec.structs.replace(data.job.data.sampler, by=by) if by else SamplerSettings()
        return msgspec.structs.replace(data.job, data=msgspec.structs.replace(data.job.data, sampler=settings))

    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.begin(job(before), None)
        file = (folder.path / "job.toml").read_bytes()
        folder.begin(job(before), None)
        with pytest.raises(UsageError, match=rf"data\.sampler\.by='{after}' .* began with by='{before}'"):
            folder.begin(job(after), None)
    assert (folder.path / "job.toml").read_bytes() == file


# ---------------------------------------------------------------- in a job


def own(*, rows, rates, count, source, draws):
    """A sampler of one's own: the hardest prompts."""
    return rows[np.argsort(rates, kind="stable")[:count]]


@pytest.mark.parametrize("by", ["pass_rate", "tests.workflows.job.test_sampler:own"])
def test_pass_rates_reach_the_next_step_and_choices_survive_the_source(data, tmp_path, by):
    """Source, table and what tells the rates, with a new source for each step, as after a kill."""
    job = job_of(data.here, f"data.sampler.by={by}", "data.sampler.share=1", "pacing.mode=sync")
    rows: list[int] = []
    with tq.connect() as queue:
        table = queue.create_table(
            names.TABLE,
            fields=fields(job),
            tasks=[tq.Task("train", needs=["prompt_ids"])],
        )
        context = Context(queue=queue, table=table, emit=lambda event: None, directory=tmp_path)
        for step in range(6):
            sequence = PromptSequence(data.opened, job.data, seed=job.seed, tokens_max=job.sampling.tokens_max)
            produce = JobPrompts(job, sampled(sequence, job, context), rows_put=table.audit().rows_put)
            while table.audit().rows_put < (step + 1) * 8:
                table.put(**produce(produce.wants()))
            with table.lease("train", rows=8, timeout_s=30) as batch:
                noted = [row for each in steps_of(tmp_path / SAMPLER) for row in each.rows]
                of_rows = np.array(noted)[batch.group_id]
                tell = PassRates(queue, job)
                passed = np.where(of_rows % 2 == 0, np.arange(8) % 2, 0).astype(np.float32)  # even rows: one of two
                for half in (slice(0, 4), slice(4, 8)):
                    tell(batch.group_id[half], passed[half])
                rows += of_rows[::2].tolist()
                batch.ack()
    steps = steps_of(tmp_path / SAMPLER)
    assert [row for step in steps for row in step.rows] == rows
    assert (steps[0].rates, len(steps[1].rates)) == ([], PROMPTS)
    chosen = [row for step in chosen_rows(steps) for row in step]
    assert len(chosen) >= 8
    is_even = [row % 2 == 0 for row in chosen]
    assert all(is_even) if by == "pass_rate" else not all(is_even)


def test_each_batch_tells_its_own_groups_and_the_source_hears_each_once(data):
    job = job_of(data.here)
    with tq.connect() as queue:
        assert since(queue, names.PASS_RATES, GroupRates, -1) == (-1, [])
        tell = PassRates(queue, job)
        first = (np.array([8, 8, 7, 7]), np.array([1, 0, 1, 1], np.float32))
        tell(*first)
        tell(np.array([9, 9]), np.array([0, 0.5], np.float32))
        version, told = since(queue, names.PASS_RATES, GroupRates, -1)
        assert told == [[(7, 1.0), (8, 0.5)], [(9, 0.0)]]
        assert since(queue, names.PASS_RATES, GroupRates, version) == (version, [])
        PassRates(queue, job)(*first)
        assert since(queue, names.PASS_RATES, GroupRates, version)[1] == [[(7, 1.0), (8, 0.5)]]
        with pytest.raises(AlreadyExists):
            tell(*first)  # the version that it knew as the next is that of another process
        tell(*first)
        assert len(since(queue, names.PASS_RATES, GroupRates, -1)[1]) == 4, "a source that starts again hears all"
        assert len(since(queue, names.PASS_RATES, GroupRates, 99)[1]) == 4, "and one whose channel began anew"
