"""Prompts by pass rate: each number once, by the shares that are declared, the same again after any kill."""

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transferqueue as tq
from tests.scale import examples
from tests.workflows.job import jobs
from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.prompt_data import open_prompts
from transferqueue.workflows.job.data.sampler import GroupRate, SampledSequence, StepPrompts, rates_of_groups, within
from transferqueue.workflows.job.data.sequence import NumberedPrompt, PromptSequence, sources_of
from transferqueue.workflows.job.data.source import JobPrompts, noted_choices, sampled
from transferqueue.workflows.job.graph import fields
from transferqueue.workflows.job.run_files import SAMPLER
from transferqueue.workflows.job.stages.pass_rates import PassRates

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
    """Rates that the prompts of a run get; news are those of `delay` steps before. The tests play the queue and the
    advantage stage."""

    def __init__(self, rates: Sequence[float], delay: int) -> None:
        self.rates, self.delay = rates, delay
        self.noted: list[StepPrompts] = []
        self.told: list[GroupRate] = []

    def life(self, data, choose=None, seed=0) -> SampledSequence:
        """The sequence of a source that has just begun."""
        sequence = PromptSequence(data.opened, data.job.data, seed=seed)
        chooser = choose or within(LOW, HIGH)
        return SampledSequence(
            sequence,
            data.job.data.sampler,
            chooser,
            prompts=PROMPTS,
            seed=seed,
            news=lambda: self.told[: max(0, len(self.told) - self.delay)],
            note=lambda step: self.noted.append(step),
            noted=self.up_to,
        )

    def up_to(self, number: int) -> list[StepPrompts]:
        self.noted = [step for step in self.noted if step.first <= number]
        return list(self.noted)

    def answer(self, prompts: Sequence[NumberedPrompt]) -> None:
        for each in prompts:
            self.told.append(GroupRate(each.row, each.number, self.rates[each.number % len(self.rates)]))


def taken(data, policy: Policy, puts: Sequence[int], kills: Sequence[bool], seed: int = 0) -> list[NumberedPrompt]:
    """The prompts of a run whose source takes `puts` prompts at a time, and is killed before some of these."""
    prompts: list[NumberedPrompt] = []
    source = policy.life(data, seed=seed)
    for count, killed in zip(puts, kills, strict=True):
        if killed:
            source = policy.life(data, seed=seed)
            assert source.skip(len(prompts)) == len(prompts) == source.number
        put = source.take(count)
        prompts += put
        policy.answer(put)
    return prompts


rates = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=9)
lives = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=24)


@settings(max_examples=examples(100), deadline=None)
@given(rates=rates, lives=lives, delay=st.integers(0, 6), seed=st.integers(0, 3))
def test_a_run_that_is_killed_takes_the_prompts_that_it_would_have_taken(data, rates, lives, delay, seed):
    puts = [count for count, _ in lives]
    whole, killed = Policy(rates, delay), Policy(rates, delay)
    undisturbed = taken(data, whole, puts, [False] * len(puts), seed)
    again = taken(data, killed, puts, [kill for _, kill in lives], seed)
    assert [(each.number, each.row, each.text) for each in again] == [
        (each.number, each.row, each.text) for each in undisturbed
    ]
    assert [each.number for each in again] == list(range(sum(puts)))
    assert [step.rows for step in killed.noted] == [step.rows for step in whole.noted]


@settings(max_examples=examples(100), deadline=None)
@given(rates=rates, steps=st.integers(1, 16), delay=st.integers(0, 6), seed=st.integers(0, 3))
def test_shares_of_sources_hold_and_what_is_chosen_passes_between_the_bounds(data, rates, steps, delay, seed):
    policy = Policy(rates, delay)
    prompts = taken(data, policy, [PROMPTS] * steps, [False] * steps, seed)
    sources = [int(prompt.text.partition(".")[0]) for prompt in prompts]
    assert sources == sources_of(0, len(prompts), WEIGHTS).tolist()
    known: dict[int, float] = {}
    for step, own in zip(policy.noted, batches(prompts), strict=True):
        known |= {group.row: group.rate for group in sorted(step.rates, key=lambda group: group.number)}
        chosen = [prompt.row for prompt, row in zip(own, step.rows, strict=True) if row >= 0]
        assert all(LOW <= known[row] <= HIGH for row in chosen)
        assert len(set(chosen)) == len(chosen)
        assert len(chosen) <= SHARE * PROMPTS + len(SIZES)  # a share of each source, rounded by chance
    in_order = [
        prompt.row
        for step, own in zip(policy.noted, batches(prompts), strict=True)
        for prompt, row in zip(own, step.rows, strict=True)
        if row < 0
    ]
    for source, size in enumerate(SIZES):
        first = sum(SIZES[:source])
        of_source = [row for row in in_order if first <= row < first + size]
        epochs = [of_source[at : at + size] for at in range(0, len(of_source) - size + 1, size)]
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs), "each has its turn"


def batches(prompts: Sequence[NumberedPrompt]) -> Iterator[Sequence[NumberedPrompt]]:
    return (prompts[at : at + PROMPTS] for at in range(0, len(prompts), PROMPTS))


@pytest.mark.parametrize(
    ("chosen", "text"),
    [([[1]], "chose"), ([99], "from 0 to 6"), ([0.5], "whole numbers"), ([-1], "chose"), ([0] * 9, "at most count=")],
)
def test_a_function_that_chooses_no_rows_of_the_data_is_refused(data, chosen, text):
    with pytest.raises(UsageError, match=rf"^data\.sampler\.by='pass_rate' .*{text}"):
        Policy([1.0], 0).life(data, choose=lambda **_: chosen).take(1)


def test_the_newest_group_decides_whenever_it_is_scored():
    rows, numbers = np.array([5, 5, 3, 3]), np.array([8, 8, 7, 7])
    groups = rates_of_groups(rows, numbers, np.array([True, False, True, True]))
    assert groups == [GroupRate(3, 7, 1.0), GroupRate(5, 8, 0.5)]


# ---------------------------------------------------------------- in a job


def own(*, rows, rates, count, source, draws):
    """A sampler of one's own: the hardest prompts."""
    return rows[np.argsort(rates, kind="stable")[:count]].tolist()


@pytest.mark.parametrize("by", ["pass_rate", "tests.workflows.job.test_sampler:own"])
def test_pass_rates_reach_the_next_step_and_choices_survive_the_source(data, tmp_path, by):
    """Source, table and what tells the rates, with a new source for each step, as after a kill."""
    job = job_of(data.here, f"data.sampler.by={by}", "data.sampler.share=1", "pacing.mode=sync")
    rows: list[int] = []
    with tq.connect() as queue:
        table = queue.create_table(
            names.TABLE,
            fields=fields(job),
            tasks=[tq.Task("train", needs=["prompt_ids", names.DATA_ROW])],
        )
        context = Context(queue=queue, table=table, emit=lambda event: None, directory=tmp_path)
        for step in range(6):
            sequence = PromptSequence(data.opened, job.data, seed=job.seed, tokens_max=job.sampling.tokens_max)
            produce = JobPrompts(job, sampled(sequence, job, context), rows_put=table.audit().rows_put)
            while table.audit().rows_put < (step + 1) * 8:
                table.put(**produce(produce.wants()))
            with table.lease("train", rows=8, timeout_s=30) as batch:
                of_rows = batch[names.DATA_ROW].numpy()
                passed = np.where(of_rows % 2 == 0, np.arange(8) % 2, 0).astype(np.float32)  # even rows: one of two
                PassRates(queue, job).tell(of_rows, batch.group_id, passed)
                rows += of_rows[::2].tolist()
                batch.ack()
    steps = noted_choices(tmp_path / SAMPLER, 99)
    assert (len(steps), steps[0].rows) == (6, [-1] * 4)
    noted = [row for step in steps for row in step.rows]
    firsts = [SIZES[0] * source for source in sources_of(0, 24, WEIGHTS).tolist()]
    chosen = [(row, first + at) for row, first, at in zip(rows, firsts, noted, strict=True) if at >= 0]
    assert all(row == wanted for row, wanted in chosen)
    assert len(chosen) >= 8
    is_even = [row % 2 == 0 for row, _ in chosen]
    assert all(is_even) if by == "pass_rate" else not all(is_even)


def test_a_note_that_a_kill_cut_short_is_passed_over(tmp_path):
    path = tmp_path / SAMPLER
    whole = '{"first":0,"places":[0],"rows":[-1],"rates":[]}\n'
    path.write_text(whole + whole.replace('"first":0', '"first":4') + '{"first":8,"pla')
    assert [step.first for step in noted_choices(path, 3)] == [0]
    assert path.read_text() == whole, "what comes again is noted again"
