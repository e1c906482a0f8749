"""The source of prompts: each number once, in an order that the seed fixes, whatever was killed; what rewards ask for,
or a clear no."""

import datetime as dt
import json
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import transferqueue as tq
from tests.scale import only_long
from tests.workflows.job import jobs
from tests.workflows.job.tokens import ByteTokenizer, save_tokenizer
from transferqueue.errors import Impossible, InternalError, NotFound, UsageError
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.flow.loop.runner import run_source
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data import source
from transferqueue.workflows.job.data.prompt_data import open_held_out, open_prompts
from transferqueue.workflows.job.data.sequence import DataOrder, PromptSequence, held_out_prompts
from transferqueue.workflows.job.data.source import JobPrompts, groups_per_put
from transferqueue.workflows.job.graph import fields
from transferqueue.workflows.job.settings.sizes import batch_rows, group_rows, rows_ahead

REWARDS = """
def exact(prompts, completions, answer, hint=None):
    return [0.0] * len(completions)

def every(completions, **columns):
    return [0.0] * len(completions)

class Near:
    def __init__(self, scale):
        self.scale = scale
    def __call__(self, completion_ids, solution):
        return [self.scale] * len(completion_ids)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_source.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def data(here: Path, rows: int = 10) -> str:
    path = here / "data.jsonl"
    lines = [{"prompt": f"{n}+1=", "answer": n + 1, "more": [n]} for n in range(rows)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def job(here: Path, kind: str = "grpo", *changes: str, reward: str = "rewards_of_source:exact", rows: int = 10):
    rewards = [f"reward.0.function={reward}"] if "reward" in jobs.KINDS[kind] else []
    return jobs.job(kind, f"data.path={data(here, rows)}", *rewards, *changes)


def sequence(settings) -> PromptSequence:
    opened = open_prompts(settings, ByteTokenizer())
    return PromptSequence(opened, settings.data, seed=settings.seed, tokens_max=settings.sampling.tokens_max)


# ---------------------------------------------------------------- order


def test_each_epoch_is_a_permutation_of_its_own_that_the_seed_fixes():
    order = DataOrder(50, seed=3, shuffle=True)
    first, second = order.positions(0, 50), order.positions(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert list(first) != list(second)
    assert list(DataOrder(50, seed=3, shuffle=True).positions(0, 50)) == list(first)
    assert list(DataOrder(50, seed=4, shuffle=True).positions(0, 50)) != list(first)


def test_positions_end_with_an_epoch_and_with_the_last():
    order = DataOrder(4, seed=0, shuffle=False, epochs=2)
    assert order.positions(2, 9).tolist() == [2, 3]
    assert order.positions(7, 9).tolist() == [3]
    assert order.positions(8, 9).tolist() == []


@pytest.mark.parametrize("skipped", [0, 1, 4, 5, 13, 50])
def test_a_sequence_that_skips_goes_on_as_one_that_took(here, skipped):
    settings = job(here, "grpo", "data.prompt_tokens_max=4", rows=14)  # the prompts of 10 to 13 have 5 bytes
    whole, later = sequence(settings), sequence(settings)
    taken = [prompt for _ in range(70) for prompt in whole.take(1)]
    assert later.skip(skipped) == skipped
    assert later.number == skipped
    after = later.take(7)
    assert [(p.number, p.data) for p in after] == [(p.number, p.data) for p in taken[skipped : skipped + 7]]
    assert whole.dropped == 4
    assert [prompt.number for prompt in taken] == list(range(70))
    assert all(len(prompt.ids) <= 4 for prompt in taken)


def test_epochs_end_the_sequence(here):
    settings = job(here, "grpo", "data.epochs=2", "steps=2")
    prompts = sequence(settings).take(99)
    assert len(prompts) == 20
    assert sequence(settings).skip(99) == 20
    counts = {}
    for prompt in prompts:
        counts[prompt.data["prompt"]] = counts.get(prompt.data["prompt"], 0) + 1
    assert set(counts.values()) == {2}


def test_prompts_that_are_too_long_are_refused_as_declared(here):
    settings = job(here, "grpo", "data.prompt_tokens_max=3")
    with pytest.raises(
        UsageError, match=r"none of the 10 prompts .* fits into data.prompt_tokens_max=3 tokens; raise it"
    ):
        sequence(settings).take(1)
    with pytest.raises(UsageError, match=r"none of the 10 prompts"):
        sequence(settings).skip(1)
    settings = job(here, "grpo", "data.prompt_tokens_max=3", "data.overlong=refuse")
    with pytest.raises(
        UsageError, match=r"data.jsonl, line \d+: the prompt has over 3 tokens; data.prompt_tokens_max=3"
    ):
        sequence(settings).take(1)
    settings = job(here, "sft", "data.response=prompt", "data.overlong=refuse", "sampling.tokens_max=2")
    with pytest.raises(UsageError, match=r"the response has 5 tokens; sampling.tokens_max=2"):
        sequence(settings).take(1)


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("reward", "columns", "data"),
    [
        ("exact", {}, {"answer": 1}),
        ("exact", {"hint": "more"}, {"answer": 1, "hint": [0]}),
        ("exact", {"answer": "more"}, {"answer": [0]}),
        ("every", {}, {"answer": 1, "more": [0]}),
        ("every", {"solution": "answer"}, {"solution": 1}),
    ],
)
def test_rows_have_what_the_rewards_ask_for(here, reward, columns, data):
    changes = [f"data.columns.{name}={column}" for name, column in columns.items()]
    settings = job(here, "grpo", "data.shuffle=false", *changes, reward=f"rewards_of_source:{reward}")
    (first,) = sequence(settings).take(1)
    assert first.data == {"prompt": "0+1="} | data
    assert bytes(first.ids.tolist()) == b"0+1="


def test_a_reward_that_wants_a_missing_column_is_refused_with_the_remedy(here):
    settings = job(here, "grpo", "reward.0.args.scale=1.0", reward="rewards_of_source:Near")
    with pytest.raises(
        NotFound, match=r'wants "solution"; data has answer, more, prompt: set data.columns = \{ solution = '
    ):
        open_prompts(settings, ByteTokenizer())
    settings = job(
        here, "grpo", "data.columns.solution=answr", "reward.0.args.scale=1.0", reward="rewards_of_source:Near"
    )
    with pytest.raises(NotFound, match=r'data.columns: solution = "answr" is no column of .*; did you mean answer\?'):
        open_prompts(settings, ByteTokenizer())


def test_a_prompt_without_a_value_is_refused_before_anything_starts(here):
    path = here / "holes.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n{"prompt": null, "answer": 1}\n')
    with pytest.raises(UsageError, match=r'holes.jsonl, line 2: column "prompt" has no value; each row needs one'):
        open_prompts(job(here, "grpo", f"data.path={path}"), ByteTokenizer())


def test_values_that_no_column_can_hold_are_refused_with_their_place(here):
    day = dt.date(2026, 1, 1)
    table = pa.Table.from_pylist([{"prompt": "a", "answer": {"day": day}}])
    pyarrow.parquet.write_table(table, here / "days.parquet")
    settings = job(here, "grpo", f"data.path={here / 'days.parquet'}")
    with pytest.raises(UsageError, match=r'days.parquet, row 0: column "answer" has datetime.date\(2026, 1, 1\)'):
        sequence(settings).take(1)


def test_fewer_prompts_than_the_steps_need_are_refused_with_the_arithmetic(here):
    settings = job(here, "grpo", "steps=10", "data.epochs=2")
    with pytest.raises(
        Impossible,
        match=(
            r"steps=10 × prompts_per_step=4 are 40 prompts; .* has 10 rows × epochs=2 = 20: set steps=5, or "
            r"data.epochs=0"
        ),
    ):
        open_prompts(settings, ByteTokenizer())


def test_held_out_prompts_are_the_first_of_their_own_file(here):
    lines = [{"prompt": f"7*{n}=" + "x" * 99 * (n == 1), "answer": 7 * n} for n in range(5)]
    (here / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = job(here, "grpo", f"evaluation.path={here / 'test.jsonl'}", "evaluation.rows=3")
    held_out = held_out_prompts(open_held_out(settings, ByteTokenizer()), settings)[""]
    assert [(prompt.number, prompt.data["answer"]) for prompt in held_out] == [(0, 0), (1, 14), (2, 21)]


def test_held_out_sets_have_prompts_and_answers_in_columns_of_their_own(here):
    lines = {
        "own.jsonl": {"question": "3*4", "solution": "12"},
        "other.jsonl": {"problem": "2*2", "key": 4},
        "same.jsonl": {"prompt": "1+1=", "answer": 2},
    }
    for name, line in lines.items():
        (here / name).write_text(json.dumps(line))
    settings = job(
        here,
        "grpo",
        f"evaluation={{path='{here / 'own.jsonl'}', template='{{question}}=', columns={{answer='solution'}}}}",
        f"evaluation.sets=[{{name='a', path='{here / 'other.jsonl'}', prompt='problem', columns={{answer='key'}}}},"
        f" {{name='b', path='{here / 'same.jsonl'}'}}]",
    )
    found = held_out_prompts(open_held_out(settings, ByteTokenizer()), settings)
    shown = {
        name: (bytes(prompts[0].ids.tolist()).decode(), prompts[0].data["answer"]) for name, prompts in found.items()
    }
    assert shown == {"": ("3*4=", "12"), "a": ("2*2", 4), "b": ("1+1=", 2)}
    wrong = job(here, "grpo", f"evaluation={{path='{here / 'own.jsonl'}', template='{{problem}}'}}")
    with pytest.raises(UsageError, match=r"evaluation\.template: \{problem\} is no column of"):
        open_held_out(wrong, ByteTokenizer())


# ---------------------------------------------------------------- puts


def table_of(queue: tq.Queue, settings) -> tq.Table:
    """A table with the job's columns and pace, and one task, which consumes whole batches."""
    return queue.create_table(
        names.TABLE,
        fields=fields(settings),
        tasks=[tq.Task("train", needs=["prompt_ids", names.DATA])],
        pacing=tq.Pacing("train", batch_rows(settings), depth=rows_ahead(settings) / batch_rows(settings) - 1),
        limits=tq.Limits(rows=rows_ahead(settings)),
    )


def consume(table: tq.Table, settings, batches: int) -> list[tuple[int, int, str]]:
    """(ordinal, group, prompt) of the rows of so many batches."""
    rows = []
    for _ in range(batches):
        with table.lease("train", rows=batch_rows(settings), timeout_s=60) as batch:
            prompts = [data["prompt"] for data in batch[names.DATA].list()]
            rows += list(zip(batch.ordinal.tolist(), batch.group_id.tolist(), prompts, strict=True))
            assert set(batch.group_size.tolist()) == {group_rows(settings)}
    return rows


def test_a_job_gets_exactly_the_prompts_of_its_steps_whatever_life_of_the_source_puts_them(here):
    settings = job(here, "grpo", "steps=5")
    rows = []
    with tq.connect() as queue:
        table = table_of(queue, settings)
        for _ in range(5):  # the source is made anew for each step, as after a kill
            produce = JobPrompts(settings, sequence(settings), rows_put=table.audit().rows_put)
            for _ in range(batch_rows(settings) // (size := produce.wants())):
                assert produce.wants() == size, "asking twice changes nothing"
                table.put(**produce(size))
            rows += consume(table, settings, 1)
        last = JobPrompts(settings, sequence(settings), rows_put=table.audit().rows_put)
        assert (last.wants(), last.data_ended) == (0, False)
    assert [ordinal for ordinal, *_ in rows] == list(range(5 * batch_rows(settings)))
    assert [group for _, group, _ in rows] == [ordinal // 2 for ordinal, *_ in rows]
    every = [prompt.data["prompt"] for prompt in sequence(settings).take(20)]
    assert [prompt for *_, prompt in rows] == [prompt for prompt in every for _ in range(2)]


def test_a_row_that_is_live_cannot_be_put_again(here):
    settings = job(here)
    with tq.connect() as queue:
        table = table_of(queue, settings)
        for _ in range(2):
            produce = JobPrompts(settings, sequence(settings), rows_put=0)
            last = produce(produce.wants())
            if not table.audit().rows_put:
                table.put(**last)
        with pytest.raises(UsageError, match=r"group 0 .* would have 2 \+ 2 = 4 rows; its group_size is 2"):
            table.put(**last)


def test_rows_of_others_in_the_table_are_noticed(here):
    with pytest.raises(InternalError, match="received 3 rows, which are no whole groups of 2"):
        JobPrompts(job(here), sequence(job(here)), rows_put=3)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        (["trainer.prompts_per_step=32"], 32),
        (["trainer.prompts_per_step=12", "sampling.group_size=16"], 4),
        (["trainer.prompts_per_step=12", "sampling.group_size=100"], 1),
        (["trainer.prompts_per_step=8", "pacing.mode=sync", "pacing.over_sample=1.5"], 4),
        (["trainer.prompts_per_step=32", "algorithm.filter_equal=true"], 1),
        (["trainer.prompts_per_step=32", "pacing.on_stale=drop"], 1),
        (["trainer.prompts_per_step=32", "reward.0.on_error=drop"], 1),
    ],
)
def test_puts_divide_a_batch_and_the_room(here, changes, groups):
    assert groups_per_put(job(here, "grpo", *changes)) == groups


def test_rows_of_sft_have_their_response_and_rows_in_parts_their_beginning(here):
    (here / "sft.jsonl").write_text('{"prompt": "so", "reply": "so"}')
    settings = job(here, "sft", "data.response=reply", f"data.path={here / 'sft.jsonl'}")
    produce = JobPrompts(settings, sequence(settings), rows_put=0)
    columns = produce(produce.wants())
    assert columns["group_size"] == 1
    assert columns["response_ids"].values[0].tolist() == [*b"so", 256]
    settings = job(here, "partial")
    produce = JobPrompts(settings, sequence(settings), rows_put=0)
    columns = produce(produce.wants())
    assert {name: columns[name].values[0].dtype for name in ("begun_ids", "begun_logprobs", "begun_versions")} == {
        "begun_ids": np.int32,
        "begun_logprobs": np.float32,
        "begun_versions": np.int32,
    }


@pytest.mark.parametrize(
    ("kind", "changes", "spare"),
    [
        ("ppo", ("pacing.mode=async",), True),
        ("ppo", ("pacing.mode=sync",), False),
        ("ppo", ("pacing.mode=async", "algorithm.whiten=false"), False),
        ("reinforce_pp", ("pacing.mode=delayed",), True),
        ("grpo", ("pacing.mode=async",), False),
    ],
)
def test_rows_that_come_back_after_whitening_find_others_to_fill_a_batch(here, kind, changes, spare):
    assert source.needs_spare_prompts(job(here, kind, *changes)) is spare


def test_a_job_that_may_drop_groups_gets_prompts_until_its_table_is_sealed(here):
    settings = job(here, "dapo", "steps=1")
    events = []
    with tq.connect() as queue:
        table = table_of(queue, settings)

        class Sealing(JobPrompts):
            def __call__(self, rows):
                if len(live := table.read().rows):
                    table.drop(live, "test")
                if self._sequence.number > 14:
                    table.seal()
                return super().__call__(rows)

        produce = Sealing(settings, sequence(settings), rows_put=0)
        rows = run_source(table, produce, emit=events.append, stall_s=30)
    assert rows > settings.trainer.prompts_per_step * 2


# ---------------------------------------------------------------- processes

BYTES = "tests.workflows.job.byte_processes:prompts"
REAL = f"{source.__name__}:prompts"


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "factory"), [(2, BYTES), *only_long((8, BYTES), (2, REAL))])
@pytest.mark.timeout(600)
def test_no_prompt_is_lost_or_doubled_when_the_source_is_killed(here, kills, factory, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    model = save_tokenizer(here / "model") if factory == REAL else here
    paths = [f"model.path={model}", f"model.tokenizer={model}"]
    steps = 6 * (kills + 1)
    settings = job(here, "grpo", f"steps={steps}", "data.prompt_tokens_max=64", *paths)
    plain = msgspec.json.decode(msgspec.json.encode(settings))
    jobs_of_flow = [StageJob(name="prompts", table=names.TABLE, factory=factory, settings=plain)]
    rows, figures = [], []
    with tq.connect() as queue:
        table = table_of(queue, settings)
        flow = Flow(
            queue, jobs_of_flow, directory=here, observe=lambda _, event: figures.append(event), restarts_max=kills
        )
        with flow:
            for life in range(kills + 1):
                rows += consume(table, settings, 5 if life < kills else steps - 5 * kills)
                if life < kills:
                    os.kill(flow.pids()["prompts-0"], signal.SIGKILL)
            flow.run()
        counts = table.audit()
    assert sorted(ordinal for ordinal, *_ in rows) == list(range(steps * batch_rows(settings)))
    assert counts.rows_put == counts.rows_done == steps * batch_rows(settings)
    assert any(getattr(event, "kind", "") == "prompts" and event.values["overlong"] == 0 for event in figures)


# ---------------------------------------------------------------- mixtures


def mixture(here: Path, *changes: str):
    """Sums with an answer, and questions of other columns; three of four prompts are sums."""
    questions = [{"question": f"q{n}" + "x" * 99 * (n == 1), "solution": str(n)} for n in range(4)]
    (here / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    other = f"{{path='{here / 'questions.jsonl'}', template='{{question}}', columns={{answer='solution'}}}}"
    sources = f"data.sources=[{{path='{data(here)}', weight=3}}, {other}]"
    return jobs.job("grpo", 'data.path=""', sources, "reward.0.function=rewards_of_source:exact", *changes)


def test_a_mixture_draws_its_sources_by_weight_each_with_its_own_columns(here):
    taken = sequence(mixture(here)).take(80)
    questions = [prompt for prompt in taken if prompt.text.startswith("q")]
    assert len(questions) == 20, "one of four, although one question of four is too long"
    assert {prompt.data["answer"] for prompt in questions} == {"0", "2", "3"}
    sums = [prompt.text for prompt in taken if not prompt.text.startswith("q")]
    assert len(set(sums[:10])) == 10, "each source has its epochs"
    assert [prompt.number for prompt in taken] == list(range(80))


@pytest.mark.parametrize("number", [0, 1, 7, 33, 250])
def test_a_mixture_goes_on_where_it_was(here, number):
    whole = sequence(mixture(here, "seed=5")).take(number + 20)
    again = sequence(mixture(here, "seed=5"))
    assert again.skip(number) == number
    assert [prompt.text for prompt in again.take(20)] == [prompt.text for prompt in whole[number:]]
    other = sequence(mixture(here, "seed=6")).take(20)
    assert [prompt.text for prompt in other] != [prompt.text for prompt in whole[:20]]


def test_a_source_without_a_prompt_that_fits_is_refused_by_name(here):
    settings = mixture(here)
    (here / "questions.jsonl").write_text(json.dumps({"question": "x" * 99, "solution": "1"}))
    with pytest.raises(UsageError, match=r"none of the 1 prompts of .*questions\.jsonl fits into data"):
        sequence(settings).take(8)


def test_a_mixture_with_a_source_that_is_not_there_is_refused_by_name(here):
    with pytest.raises(NotFound, match=r"^data\.sources\.1\.path gone\.jsonl: there is no such file or directory"):
        open_prompts(mixture(here, "data.sources.1.path=gone.jsonl"), ByteTokenizer())
    with pytest.raises(NotFound, match=r"^data\.sources\.1\.template: \{text\} is no column of .*questions\.jsonl"):
        open_prompts(mixture(here, "data.sources.1.template='{text}'"), ByteTokenizer())
    other = jobs.job(
        "grpo",
        'data.path=""',
        f"data.sources=[{{path='{data(here)}'}}, {{path='{here / 'questions.jsonl'}', prompt='question'}}]",
        "reward.0.function=rewards_of_source:exact",
    )
    with pytest.raises(UsageError, match=r'wants "answer"; data has question, .* set data\.sources\.1\.columns ='):
        open_prompts(other, ByteTokenizer())


def test_turns_that_are_learned_are_a_column_of_their_own(here):
    settings = jobs.job("sft", f"data.path={data(here)}", "data.turns=all", 'data.response=""')
    assert "loss_mask" in [field.name for field in fields(settings)]
    assert "loss_mask" not in [field.name for field in fields(job(here, "sft"))]
