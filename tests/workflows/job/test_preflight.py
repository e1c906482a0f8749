"""What is refused with the files of a job, before anything starts."""

import json
import socket
import sys

import pytest

from tests.workflows.job import jobs
from tests.workflows.job.tokens import ByteTokenizer
from transferqueue.errors import Impossible, NotFound, Unreachable, UsageError
from transferqueue.workflows.job.data import prompt_data
from transferqueue.workflows.job.run import preflight
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.run import run_job
from transferqueue.workflows.job.settings.job import Job

ADDRESS = "queue.address=tcp://127.0.0.1:1"
REWARDS = """
def exact(completions, answer):
    return [0.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Files of a job. The bytes stand in for the tokens of a model, which would load torch."""
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    rows = [{"prompt": "2+2?", "answer": "4", "number": 4}, {"prompt": "1+1?", "answer": "2", "number": 2}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "preflight_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(prompt_data, "load_tokenizer", lambda model: ByteTokenizer())
    monkeypatch.setattr(preflight, "check_packages", lambda job: None)  # the machine of the test may lack torch
    return tmp_path


def small(*changes: str) -> Job:
    return jobs.job("grpo", "data.path=rows.jsonl", "reward.0.function=preflight_rewards:exact", *changes)


def test_a_whole_job_passes_and_its_data_is_open(place):
    assert len(preflight.preflight(small(), code=place)) == 2


@pytest.mark.parametrize(
    ("table", "key"), [("reward", "function"), ("environment", "factory"), ("environment", "function")]
)
def test_a_name_is_refused_before_the_tokenizer_is_loaded(place, table, key, monkeypatch):
    monkeypatch.setattr(prompt_data, "load_tokenizer", lambda model: pytest.fail("the tokenizer is loaded"))
    given = f'{table}=[{{{key}="preflight_rewards:exat"}}]'
    changes = ["reward=[]"] * (table == "environment")
    with pytest.raises(NotFound, match=rf"{table}.*{key} preflight_rewards:exat: the module has no exat; it has exact"):
        preflight.preflight(small(*changes, given), code=place)


def test_a_queue_that_does_not_answer_is_refused_before_the_folder_is_made(place, monkeypatch):
    monkeypatch.setattr(preflight, "QUEUE_S", 0.2)
    address = f"ipc://{place}/none.sock"
    with pytest.raises(Unreachable, match=r'^queue\.address="ipc://.*none\.sock": .* start a server there'):
        run_job(small(f"queue.address={address}"), folder=RunFolder(place / "run"), code=place)
    assert not (place / "run").exists()
    preflight.check_queue("")


def test_an_engine_whose_server_is_not_up_is_refused_before_the_folder_is_made(place):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        served = small(f"engine.0={{kind='vllm_server', url='http://127.0.0.1:{port}'}}")
        preflight.check_servers(served)
    with pytest.raises(Unreachable, match=rf"^engine\.0\.url='http://127\.0\.0\.1:{port}': .* start the server, or"):
        run_job(served, folder=RunFolder(place / "run"), code=place)
    assert not (place / "run").exists()
    preflight.check_servers(small("engine.0={kind='vllm_server', url='http://x.invalid', site='far'}", ADDRESS))


def test_an_environment_whose_server_is_not_up_is_refused_before_the_folder_is_made(place):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        served = small("reward=[]", f"environment=[{{url='ws://127.0.0.1:{port}'}}]")
        preflight.check_servers(served)
    with pytest.raises(Unreachable, match=rf"^environment\.0\.url='ws://127\.0\.0\.1:{port}': .* start the server, or"):
        run_job(served, folder=RunFolder(place / "run"), code=place)
    assert not (place / "run").exists()
    far = small("reward=[]", "environment=[{url='http://x.invalid'}]", "engine.0.site=far", ADDRESS)
    preflight.check_servers(far)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            ["data.path=empty.jsonl"],
            UsageError,
            r"^data\.path empty\.jsonl has no rows, in empty\.jsonl; give at least one",
        ),
        (["data.path=empty.parquet"], UsageError, r"^empty\.parquet"),
        (["data.prompt=number"], UsageError, r'rows\.jsonl.* column "number" has int; a prompt is a text or a list'),
        (["evaluation.path=gone.jsonl"], NotFound, r"^evaluation\.path gone\.jsonl: there is no such file"),
        (["evaluation.path=models"], NotFound, r"^evaluation\.path models has no split \"test\""),
        (['sampling.stop=["two tokens"]'], UsageError, r"sampling\.stop='two tokens' is 10 tokens"),
        (
            ["reward=[]", 'environment=[{factory="no_such_module:make"}]'],
            NotFound,
            r"^environment\.0\.factory .* there is no module no_such",
        ),
        (
            ["reward=[]", 'environment=[{factory="preflight_rewards:gone"}]'],
            NotFound,
            r"^environment\.0\.factory .* has no gone",
        ),
        (["engine.0.kind=builtin"], UsageError, r'^engine\.0\.kind="builtin" with the model .*, which is no built-in'),
        (["checkpoint.resume=runs/gone"], NotFound, r"^checkpoint\.resume='runs/gone': there is no such directory"),
    ],
)
def test_what_no_process_could_work_with_is_refused(place, changes, error, text):
    with pytest.raises(error, match=text):
        preflight.preflight(small(*changes), code=place)


def test_rows_longer_than_the_models_positions_are_refused(place):
    config = place / "models" / "tiny" / "config.json"
    config.write_text('{"max_position_embeddings": 40}')
    with pytest.raises(Impossible, match=r"has 40 positions, and a row up to .*=32 \+ tokens_max=16 = 48 tokens"):
        preflight.preflight(small(), code=place)
    scaled = {"max_position_embeddings": 40, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    config.write_text(json.dumps({"text_config": scaled}))
    assert len(preflight.preflight(small(), code=place)) == 2


def test_a_layer_that_the_model_lacks_gets_no_adapter(place):
    header = json.dumps({"l.0.q_proj.weight": {"shape": [2, 2], "dtype": "F32", "data_offsets": [0, 16]}}).encode()
    weights = place / "models" / "tiny" / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    lora = "trainer.lora_rank=2"
    assert preflight.preflight(small(lora, "trainer.lora_targets=['q_proj']"), code=place)
    with pytest.raises(NotFound, match=r"lora_targets has 'q', and .* no such layer; it has q_proj"):
        preflight.preflight(small(lora, "trainer.lora_targets=['q']"), code=place)


def test_the_check_of_the_memory_counts_the_experts_of_each_token(place):
    config = {"num_hidden_layers": 4, "num_experts_per_tok": 8, "num_experts": 64}
    (place / "models" / "tiny" / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"shape": [2, 2], "dtype": "F32", "data_offsets": [0, 16]}}).encode()
    (place / "models" / "tiny" / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(16)
    )
    plain, replayed = small(), small("engine.0.kind=transformers", "algorithm.router_replay=true")
    routes = (32 + 16) * 4 * 8 * 2
    assert preflight.bytes_of(replayed).row == preflight.bytes_of(plain).row + routes
    rows = preflight.bytes_of(plain).rows * 2 / 2**30
    preflight.check_memory(small(f"queue.memory_gib={rows}"))
    with pytest.raises(
        Impossible, match=rf"rows up to .* \({preflight.bytes_of(replayed).row:,} bytes each\); memory_gib"
    ):
        preflight.check_memory(
            small(f"queue.memory_gib={rows}", "engine.0.kind=transformers", "algorithm.router_replay=true")
        )


def test_on_a_cpu_vllm_gives_no_routes(monkeypatch):
    job = small("engine.0.kind=vllm", "algorithm.router_replay=true")
    monkeypatch.setattr(preflight, "found_devices", list)
    with pytest.raises(UsageError, match=r'engine\.0\.kind="vllm", and no GPU: on a CPU vLLM gives no routes'):
        preflight.check_routes(job)
    monkeypatch.setattr(preflight, "found_devices", lambda: ["a GPU"])
    preflight.check_routes(job)


def test_each_held_out_set_is_opened_before_the_start(place):
    changes = ("evaluation.path=rows.jsonl", "evaluation.sets=[{name='aime', path='gone.jsonl'}]")
    with pytest.raises(NotFound, match=r"^evaluation\.sets\.0\.path gone\.jsonl: there is no such file"):
        preflight.preflight(small(*changes), code=place)
