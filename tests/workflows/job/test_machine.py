"""What a job needs of the machine is checked before anything starts."""

import subprocess
import sys

import pytest

from tests.workflows.job import jobs
from transferqueue.errors import UsageError
from transferqueue.lazy import install_line
from transferqueue.workflows.job.data.tokenizer import CharacterTokenizer
from transferqueue.workflows.job.devices.cores import THREADS
from transferqueue.workflows.job.run import machine
from transferqueue.workflows.job.run.machine import check_packages, process_variables, thread_line
from transferqueue.workflows.job.run.preflight import placement_of, shared_variables


@pytest.mark.parametrize(
    ("change", "missing", "text"),
    [
        ("engine.0.kind=vllm", "vllm", r'engine\.0\.kind="vllm" needs vllm, .* pip install .*\[vllm\]'),
        ("engine.0.kind=transformers", "torch", r"needs torch, which is not installed here"),
        ('log.to=["tensorboard"]', "tensorboard", r'log\.to has "tensorboard".* pip install tensorboard'),
        ('log.to=["wandb"]', "wandb", r'log\.to has "wandb".* leave it out'),
        ("reward=[] ; environment=[{url='http://h'}]", "aiohttp", r"environment\.0\.url='http://h' needs .*\[http\]"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch, change, missing, text):
    job = jobs.job("grpo", *change.split(" ; "))
    monkeypatch.setattr(machine, "find_spec", lambda module: None if module == missing else object())
    with pytest.raises(UsageError, match=text):
        check_packages(job)
    monkeypatch.setattr(machine, "find_spec", lambda module: object())
    check_packages(job)


def test_a_tiny_model_without_torch_says_what_to_install():
    program = (
        "import runpy, sys\nsys.modules['torch'] = None\n"
        "runpy.run_module('transferqueue.workflows.job.tiny_model', run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr.splitlines()) == (
        2,
        [f"a tiny model needs torch: {install_line('train')}"],
    )


def test_the_threads_of_the_job_come_before_the_variable_and_the_shares_of_cores(monkeypatch):
    placed = placement_of(jobs.job("grpo"), devices=[])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.delenv(THREADS, raising=False)
    tokenizer = CharacterTokenizer()
    assert thread_line(jobs.job("grpo"), placed, 5) == "threads: rollout-0 4, train-0 8, of any other process 1"
    assert THREADS not in shared_variables(jobs.job("grpo"), tokenizer, None)
    monkeypatch.setenv(THREADS, "2")
    assert thread_line(jobs.job("grpo"), placed, 5) == "threads: 2 in each process (OMP_NUM_THREADS)"
    given = jobs.job("grpo", "threads=3")
    assert thread_line(given, placed, 5) == "threads: 3 in each process"
    assert shared_variables(given, tokenizer, None)[THREADS] == "3"
    assert not any(THREADS in variables for variables in process_variables(given, placed).values())


def test_a_job_without_generation_needs_no_engine(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda module: None)
    check_packages(jobs.job("sft"))
