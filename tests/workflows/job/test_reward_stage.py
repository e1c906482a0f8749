"""The reward stage: what functions return is weighted and kept by term; what fails names the function, the row and its
text."""

import sys
from copy import deepcopy

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from tests.workflows.job import jobs
from tests.workflows.job.tokens import ByteTokenizer
from tests.workflows.test_flow import wait_gone
from transferqueue.adapters.stages.reward_functions import RewardCall, RewardFailed, load_reward
from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.events import Figures
from transferqueue.workflows.flow.flow import Flow, StageFailed
from transferqueue.workflows.flow.loop.runner import StageFailedInProcess, run_stage
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.flow.stage import Context, Stage
from transferqueue.workflows.job import names
from transferqueue.workflows.job.graph import fields, stages
from transferqueue.workflows.job.reward_terms import tries
from transferqueue.workflows.job.reward_terms.scorer import RewardScorer
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.settings.read import job_from_values
from transferqueue.workflows.job.stages.failed_rows import FAILED_ROWS
from transferqueue.workflows.job.stages.reward import reward_with
from transferqueue.workflows.job.stages.samples import SampleReporter

REWARDS = """
import asyncio, time
import numpy as np

def exact(prompts, completions, answer, **columns):
    return [float(text == str(right)) for text, right in zip(completions, answer, strict=True)]

def half(completion_ids, scale=0.5):
    return np.array([scale * len(ids) for ids in completion_ids], np.float32)

async def later(completions):
    await asyncio.sleep(0)
    return [None if text == "none" else 1 for text in completions]

def said(completions, prompts):
    return [len(c[-1]["content"]) + 100 * len(p) for c, p in zip(completions, prompts)]

def picky(completions):
    if "bad" in completions:
        raise ValueError("bad\\ntext")
    return [1.0] * len(completions)

def nan(completions):
    return [float("nan") if text == "bad" else 2.0 for text in completions]

def words(completions):
    return ["high" for text in completions]

def few(completions):
    return [1.0]

def number(completions):
    return 1.0

def huge(completions):
    return [10**400] * len(completions)

def breaking(completions):
    return ({}["answer"] for text in completions)

class Unable:
    def __init__(self):
        {}["ANSWERS"]

class Leaving:
    def __init__(self):
        raise SystemExit(2)

def hangs(completions):
    time.sleep(600)

class Scaled:
    def __init__(self, scale):
        self.scale = scale
    def __call__(self, completions, answer=0):
        return [self.scale + answer_ for answer_ in answer] if answer else [self.scale] * len(completions)

def make(scale):
    return lambda completions: [scale] * len(completions)

three = 3
def _hidden(completions): ...
def positional(completions, /): ...
def blind(prompts): ...
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """The name of a module with the functions above, of its own for each test."""
    name = f"rewards_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def with_rewards(rewards):
    return job_from_values(deepcopy(jobs.KINDS["grpo"]) | {"reward": rewards})


def job(module: str, *functions: str, **more):
    return with_rewards([{"function": f"{module}:{name}"} | more for name in functions])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(tries, "PAUSE_S", 0.0)


def scores(settings, texts, data=None):
    data = data or [{"prompt": f"p{at}", "answer": at} for at in range(len(texts))]
    ids = [np.array([*text.encode(), 256], np.int32) for text in texts]
    with RewardScorer(settings, ByteTokenizer()) as scorer:
        return scorer.score(ids=range(10, 10 + len(texts)), data=data, prompt_ids=ids, response_ids=ids)


def test_rewards_are_a_weighted_sum_and_each_term_is_kept(module):
    settings = with_rewards(
        [
            {"function": f"{module}:exact", "weight": 2.0},
            {"function": f"{module}:half", "args": {"scale": 0.1}},
            {"function": f"{module}:later", "weight": -1.0},
        ]
    )
    result = scores(settings, ["0", "none"])
    assert result.terms.tolist() == [[1.0, pytest.approx(0.2), 1.0], [0.0, 0.5, pytest.approx(np.nan, nan_ok=True)]]
    assert result.rewards.tolist() == [pytest.approx(1.2), pytest.approx(0.5)]
    assert result.rewards.dtype == result.terms.dtype == np.float32
    assert not result.failed.any()
    assert term_names(settings) == tuple(f"{module}:{n}" for n in ("exact", "half", "later"))


def test_terms_of_one_function_have_their_own_names(module):
    assert term_names(job(module, "half", "half")) == (f"{module}:half", f"{module}:half 2")


def test_completions_have_the_form_of_the_prompt(module):
    prompt = [{"role": "user", "content": "hi"}]
    assert scores(job(module, "said"), ["abc"], [{"prompt": prompt}]).rewards.tolist() == [103.0]


def test_a_class_is_made_with_its_args_and_gets_optional_columns(module):
    settings = job(module, "Scaled", args={"scale": 0.25})
    assert scores(settings, ["a", "b"]).rewards.tolist() == [0.25, 1.25]
    assert scores(settings, ["a"], [{"prompt": "p"}]).rewards.tolist() == [0.25]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        ("picky", r"picky raised ValueError: bad\\ntext; row 11, prompt 'p1', completion 'bad'"),
        ("nan", r"nan gave nan; give a finite number, or None; row 11, prompt 'p1', completion 'bad'"),
        ("words", r"words gave 'high' \(str\); give a number, or None; row 10, prompt 'p0', completion 'good'"),
        ("few", r"few gave 1 value for 3 rows; give one for each"),
        ("number", r"number returned float; return a list with one number for each row"),
        ("huge", r"huge gave an integer of 1,329 bits \(int\); give a number, or None; row 10, prompt 'p0'"),
        ("breaking", r"breaking returned generator, which raised KeyError: 'answer'; return a list"),
    ],
)
def test_a_failure_names_the_function_the_row_and_its_text(module, function, match):
    with pytest.raises(RewardFailed, match=match):
        scores(job(module, function), ["good", "bad", "good"])


@pytest.mark.parametrize(("function", "text"), [("picky", "ValueError"), ("nan", "gave nan")])
def test_a_row_whose_reward_fails_is_dropped_alone_if_the_job_says_so(module, function, text):
    result = scores(job(module, function, on_error="drop"), ["good", "bad", "good"])
    assert result.failed.tolist() == [False, True, False]
    assert [*result.failures] == [1]
    assert text in result.failures[1]
    assert "row 11, prompt 'p1', completion 'bad'" in result.failures[1]
    assert (result.rewards[[0, 2]] > 0).all()


def test_the_wrong_number_of_scores_ends_the_run_even_if_rows_may_be_dropped(module):
    with pytest.raises(RewardFailed, match="few gave 1 value for 3 rows"):
        scores(job(module, "few", on_error="drop"), ["a", "b", "c"])


def test_a_row_that_no_reward_scores_is_a_failure(module):
    with pytest.raises(RewardFailed, match=r"row 10, prompt 'p0', completion 'none' got None from every reward"):
        scores(job(module, "later"), ["none", "x"])
    assert scores(job(module, "later", on_error="drop"), ["none", "x"]).failed.tolist() == [True, False]


def test_a_reward_beyond_float32_ends_the_run_instead_of_making_all_weights_nan(tmp_path):
    (tmp_path / "big.py").write_text("def big(completions, scale=1e300):\n    return [scale] * len(completions)\n")
    named = f"{tmp_path / 'big.py'}:big"
    for reward in ({}, {"weight": 1e-300}, {"args": {"scale": 1e30}, "weight": 1e30}, {"on_error": "drop"}):
        with pytest.raises(RewardFailed, match=r"row 10, .* got a reward or score of size 1e\+\d+ .*: scale it down"):
            scores(with_rewards([{"function": named} | reward]), ["a"])


def test_a_reward_that_exits_has_failed(tmp_path):
    (tmp_path / "exits.py").write_text("import sys\ndef exits(completions):\n    sys.exit(3)\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(4)\n")
    with pytest.raises(RewardFailed, match=r"exits raised SystemExit: 3; row 10"):
        scores(with_rewards([{"function": f"{tmp_path / 'exits.py'}:exits"}]), ["a"])
    with pytest.raises(UsageError, match=r"its module raised SystemExit: 4"):
        load_reward(f"{tmp_path / 'script.py'}:any")


def test_long_texts_are_shortened_in_messages(module):
    with pytest.raises(RewardFailed) as raised:
        scores(job(module, "words"), ["x" * 10_000])
    assert len(str(raised.value)) < 700


# ---------------------------------------------------------------- by name


@pytest.mark.parametrize(
    ("named", "error", "match"),
    [
        ("{m}", UsageError, "names no function; write module:function"),
        ("{m}:", UsageError, "names no function"),
        ("no_such_module_here:f", NotFound, "there is no module no_such_module_here; put it beside the job file"),
        ("{m}:exct", NotFound, "the module has no exct; it has"),
        ("{m}:three", UsageError, "is int; give a function"),
        ("{m}:positional", UsageError, "parameter completions is positional-only; remove the /"),
        ("{m}:Unable", UsageError, r"Unable cannot be made with args none: KeyError: 'ANSWERS'"),
        ("{m}:Leaving", UsageError, "Leaving cannot be made with args none: SystemExit: 2"),
        ("{m}:blind", UsageError, "none of them is completions"),
        ("{m}:Scaled", UsageError, "cannot be made with args none"),
        ("gone.py:f", NotFound, "there is no file .*gone.py"),
    ],
)
def test_what_names_no_function_is_refused(module, named, error, match):
    with pytest.raises(error, match=match):
        load_reward(named.format(m=module))


def test_a_file_is_named_by_its_path_and_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("value = 7.0")
    (tmp_path / "mine.py").write_text(
        "import beside_it\ndef f(completions): return [beside_it.value] * len(completions)"
    )
    call = load_reward(f"{tmp_path / 'mine.py'}:f")
    assert call({"completions": ["a"]}, rows=1).tolist() == [7.0]


def test_a_file_that_another_thread_imports_is_waited_for(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import threading\n"
        "from transferqueue.adapters.stages.reward_functions import load_reward\n"
        "calls = []\n"
        "other = threading.Thread(target=lambda: calls.append(load_reward(__file__ + ':f')))\n"
        "other.start()\n"
        "other.join(0.2)\n"
        "def f(completions): return [2.0] * len(completions)\n"
    )
    first = load_reward(f"{tmp_path / 'slow.py'}:f")
    module = sys.modules[first.function.__module__]
    module.other.join()
    assert [call.function for call in module.calls] == [first.function]


def test_a_module_that_fails_says_how(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UsageError, match=r"broken.py:f: its module raised ZeroDivisionError"):
        load_reward(f"{tmp_path / 'broken.py'}:f")
    (tmp_path / "wants.py").write_text("import no_such_module_here")
    with pytest.raises(UsageError, match=r"wants.py:f: its module raised ModuleNotFoundError: .*no_such_module_here"):
        load_reward(f"{tmp_path / 'wants.py'}:f")


def test_a_function_that_makes_the_reward_is_called_with_the_args(module):
    call = load_reward(f"{module}:make", {"scale": 3.0})
    assert call({"completions": ["a", "b"]}, rows=2).tolist() == [3.0, 3.0]
    with pytest.raises(UsageError, match=r"cannot be made with args scal: "):
        load_reward(f"{module}:make", {"scal": 3.0})


def test_args_must_be_parameters(module):
    with pytest.raises(UsageError, match=r"args has 'scal', which is no parameter; it has completion_ids, scale"):
        load_reward(f"{module}:half", {"scal": 1})


def test_a_missing_column_is_refused_with_the_remedy():
    call = RewardCall.of(lambda completions, answr: [0.0], name="my:score")
    with pytest.raises(
        NotFound,
        match=r'reward my:score wants "answr"; data has answer, question: set data.columns = \{ answr = "answer" \}',
    ):
        call.columns(["question", "answer"])
    with pytest.raises(
        NotFound, match=r'wants "tokens_max"; .*: give the reward args = \{ tokens_max = VALUE \}, or set'
    ):
        load_reward("transferqueue.workflows.job.rewards:token_length").columns(["question", "answer"])


# ---------------------------------------------------------------- the stage


def context(queue, table, settings, events) -> Context:
    plain = msgspec.json.decode(msgspec.json.encode(settings))
    return Context(queue=queue, table=table, emit=events.append, settings=plain)


def filled(queue, settings, texts, each_prompt=1) -> tuple[tq.Table, Stage]:
    """A sealed table with rows that have these responses, and the reward stage over it."""
    (stage,) = [stage for stage in stages(settings) if stage.task.name == names.REWARD]
    table = queue.create_table(
        names.TABLE, fields=fields(settings), tasks=[stage.task, tq.Task("keep", needs=["rewards"])]
    )
    table.put(
        prompt_ids=[np.array([1], np.int32)] * len(texts),
        response_ids=[np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts],
        finish_reason=["stop"] * len(texts),
        ordinal=[at * settings.sampling.group_size // each_prompt for at in range(len(texts))],
        data=[{"prompt": "p", "answer": at} for at in range(len(texts))],
    )
    table.seal()
    return table, stage


def serve(settings, texts) -> tuple[dict, list, list]:
    """Run the stage over rows with these responses; return rows left, events, and counts of drops."""
    events = []
    with tq.connect() as queue:
        table, stage = filled(queue, settings, texts)
        with reward_with(context(queue, table, settings, events), ByteTokenizer()) as work:
            run_stage(table, stage, work, emit=events.append)
        left = table.read()
        columns = {name: left[name].list() for name in ("rewards", names.REWARD_TERMS)} if len(left.rows) else {}
        return columns, events, table.audit().dropped


def failed_rows(events) -> list[list]:
    return [event.values["rows"] for event in events if isinstance(event, Figures) and event.kind == FAILED_ROWS]


def test_the_stage_acks_rewards_and_terms(module):
    columns, events, dropped = serve(job(module, "exact", "half", weight=2.0), ["0", "x"])
    assert columns["rewards"] == [3.0, 1.0]
    assert columns[names.REWARD_TERMS] == [[1.0, 0.5], [0.0, 0.5]]
    assert dropped == {}
    assert not failed_rows(events)


def test_the_stage_reports_some_responses_as_text(module):
    settings = job(module, "exact", "half")
    settings = msgspec.structs.replace(settings, log=msgspec.structs.replace(settings.log, samples=2))
    _, events, _ = serve(settings, ["0", "x", "2"])
    (samples,) = [event.values["samples"] for event in events if isinstance(event, Figures) and event.kind == "samples"]
    assert [(sample["prompt"], sample["response"], sample["reward"]) for sample in samples] == [
        ("p", "0", 1.5),
        ("p", "x", 0.5),
    ]
    assert samples[0] | {"version": 0, "step": 1} == samples[0]
    assert (samples[0]["data"], samples[0]["finish_reason"], samples[0]["tokens"]) == ({"answer": 0}, "stop", 1)
    assert samples[1]["terms"] == {f"{module}:exact": 0.0, f"{module}:half": 0.5}


def test_samples_are_spread_over_prompts(module):
    settings = job(module, "exact")
    size = settings.sampling.group_size
    events = []
    reporter = SampleReporter(context(None, None, settings, events), ByteTokenizer())
    with tq.connect() as queue:
        table, stage = filled(queue, settings, [str(at) for at in range(8 * size)], each_prompt=size)
        with stage.lease(table) as batch:
            terms, rewards = np.ones((len(batch), 1), np.float32), np.ones(len(batch), np.float32)
            reporter.report(batch, rewards, terms)
            reporter.report(batch, rewards, terms)
            batch.release()
    samples = [sample for event in events for sample in event.values["samples"]]
    assert [sample["ordinal"] // size for sample in samples] == [0, 2, 4, 6]


def test_the_stage_drops_rows_with_their_reason(module):
    columns, events, dropped = serve(job(module, "nan", on_error="drop"), ["good", "bad"])
    assert columns["rewards"] == [2.0]
    assert dropped == {"reward_error": 1}
    ((failed,),) = failed_rows(events)
    assert failed["row"] == 1
    assert "gave nan" in failed["text"]


def test_the_stage_ends_at_the_first_failure(module):
    with pytest.raises(StageFailedInProcess, match=r"nan gave nan; .* row 1, prompt 'p', completion 'bad'"):
        serve(job(module, "nan"), ["good", "bad"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("hangs", r"hangs did not return within reward.0.timeout_s=0.5 s; .*; row 0, prompt 'p', completion 'good'"),
        ("nan", r"nan gave nan; give a finite number, or None; row 1, prompt 'p', completion 'bad'"),
    ],
)
def test_a_run_ends_with_the_name_of_the_function(tmp_path, function, words):
    (tmp_path / "mine.py").write_text(REWARDS)
    settings = jobs.job("grpo", "reward.0.timeout_s=0.5")
    reward = msgspec.structs.replace(settings.reward[0], function=f"{tmp_path / 'mine.py'}:{function}")
    settings = msgspec.structs.replace(settings, reward=(reward,))
    plain = msgspec.json.decode(msgspec.json.encode(settings))
    with tq.connect() as queue:
        _, stage = filled(queue, settings, ["good", "bad"])
        job = StageJob(
            name="reward",
            table=names.TABLE,
            factory="tests.workflows.job.byte_processes:reward",
            stage=stage,
            settings=plain,
        )
        with (
            pytest.raises(StageFailed, match=r"ended with exit code 65; .*" + words),
            Flow(queue, [job], directory=tmp_path, observe=lambda *_: None) as flow,
        ):
            flow.run()


FAILING = """
import ctypes, os, time
from pathlib import Path

def some(completions, calls="{calls}"):
    for text in completions:
        if text in ("3", "4"):
            time.sleep(60)
        if text == "5":
            ctypes.PyDLL(None).sleep(60)  # holds the lock of the interpreter
        if text == "17":
            raise ValueError("no such unit: parsec")
        if text == "21":
            os.kill(os.getpid(), 11)
        if text == "30" and not Path(calls).exists():
            Path(calls).write_text("")
            raise ConnectionError("the judge is away")
    return [1.0] * len(completions)
"""


@pytest.mark.slow
def test_of_fifty_rows_those_that_hang_raise_or_crash_fail_alone(tmp_path):
    (tmp_path / "some.py").write_text(FAILING.format(calls=tmp_path / "asked"))
    settings = with_rewards([{"function": f"{tmp_path / 'some.py'}:some", "on_error": "drop", "timeout_s": 0.5}])
    result = scores(settings, [str(at) for at in range(50)])
    assert sorted(result.failures) == [3, 4, 5, 17, 21]  # 30 raised once, and was tried again
    assert result.rewards.sum() == 45
    for at in (3, 4, 5):
        assert "some did not return within reward.0.timeout_s=0.5 s; make it" in result.failures[at]
        assert f"; row {10 + at}, prompt 'p{at}', completion '{at}'" in result.failures[at]
    assert "raised ValueError: no such unit: parsec; row 27, prompt 'p17', completion '17'" in result.failures[17]
    assert "was ended by SIGSEGV; row 31, prompt 'p21'" in result.failures[21]


@pytest.mark.slow
def test_what_a_function_started_ends_with_its_call(tmp_path):
    shell = f"echo $$ > {tmp_path / 'pid'}; sleep 600; true"
    code = f"import subprocess\ndef starts(completions):\n    subprocess.run(['sh', '-c', {shell!r}])\n"
    (tmp_path / "starts.py").write_text(code)
    with pytest.raises(RewardFailed, match="did not return"):
        scores(with_rewards([{"function": f"{tmp_path / 'starts.py'}:starts", "timeout_s": 0.5}]), ["a"])
    assert wait_gone([int((tmp_path / "pid").read_text())], 30.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "raised", ["ConnectionRefusedError('111')", "type('ConnectError', (TransportError,), {})('away')"]
)
def test_a_judge_that_is_away_for_three_calls_costs_no_row(tmp_path, raised):
    code = f"""
class TransportError(Exception):
    pass

calls = []

def judge(completions):
    calls.append(len(completions))
    if len(calls) <= 3:
        raise {raised}
    assert len(completions) == 4
    return [1.0] * 4
"""
    (tmp_path / "away.py").write_text(code)
    settings = with_rewards([{"function": f"{tmp_path / 'away.py'}:judge", "on_error": "drop"}])
    result = scores(settings, ["a", "b", "c", "d"])
    assert (result.failures, result.rewards.tolist()) == ({}, [1.0] * 4)
