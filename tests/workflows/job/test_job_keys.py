"""Each key of a job file says what it means, on the page and in `transferqueue docs KEY`."""

import tomllib

import pytest

from tests.job_keys import PAGE, TABLES, documented, page
from tests.markdown import blocks
from transferqueue.cli.app import run
from transferqueue.workflows.job.settings.describe import describe, key_names, keys
from transferqueue.workflows.job.settings.keys import OTHER_NAMES
from transferqueue.workflows.job.settings.read import job_from_values

EXAMPLES = [tomllib.loads(block.code) for block in blocks(PAGE) if block.info == "toml"]


def test_the_page_shows_each_key_as_it_is_declared():
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.job_keys"
    assert set(documented(PAGE.read_text())) == TABLES.keys()


def test_each_key_and_table_says_what_it_means():
    assert [table.name for table in TABLES.values() if not table.meaning.endswith(".")] == []
    assert [key.name for table in TABLES.values() for key in keys(table) if not key.meaning.endswith(".")] == []


def test_each_key_says_which_jobs_need_it():
    every = [key for table in TABLES.values() for key in keys(table)]
    assert [key.name for key in every if not 0 < len(key.needed_by) <= 72] == []


def test_each_example_is_a_job_with_those_of_the_required_tables():
    base = {name: value for example in EXAMPLES for name, value in example.items()}
    base = {name: base[name] for name in ("model", "data", "engine", "reward")} | {"algorithm": {"kind": "grpo"}}
    assert len(EXAMPLES) == len(TABLES)
    for name, example in zip(documented(PAGE.read_text()), EXAMPLES, strict=True):
        assert name == "job" or name.partition(".")[0] in example
        left_out = {"reward"} if "environment" in example else set()
        job_from_values({key: value for key, value in (base | example).items() if key not in left_out})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "trainer.lr",
            "trainer.lr: Learning rate after the warmup.\n    type: number, more than 0\n    default: 1e-06\n",
        ),
        ("engine.0.count", "engine.count: "),
        ("lr", "critic.lr: "),
        ("trainer", "[trainer] How the policy is trained"),
        ("num_generations", "sampling.group_size: "),
        ("clip_high", "0.28 for dapo; 0.0004 for gspo; 0.2 for other kinds"),
        ("model.path", "default: required"),
        ("pacing.depth", "default: open"),
    ],
)
def test_a_key_is_described(name, said):
    assert said in describe(name)


def test_every_name_is_described_and_no_other():
    assert [name for name in (*key_names(), *OTHER_NAMES) if not describe(name)] == []
    assert describe("trainer.nothing") is None
    assert describe("") is None


@pytest.mark.parametrize("name", ["trainer.lr", "lr", "trainer", "num_generations"])
def test_the_command_shows_a_key(name, capsys):
    assert run(["docs", name]) == 0
    assert describe(name) in capsys.readouterr().out
