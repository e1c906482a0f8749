"""Which process of a job gets which GPU: the map, what is refused, and the environment of each process. The GPUs are a
list that no machine here has.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import transferqueue as tq
from tests.scale import only_long
from tests.workflows.job import jobs
from tests.workflows.job.recorded_environment import create_table, recording
from transferqueue.errors import Impossible, NotFound, UsageError
from transferqueue.workflows.flow.events import Event, Figures
from transferqueue.workflows.flow.flow import Flow
from transferqueue.workflows.job.devices import device_bytes
from transferqueue.workflows.job.devices.model_sizes import ModelSizes, model_sizes
from transferqueue.workflows.job.devices.placement import FoundDevice, Placement, device_map
from transferqueue.workflows.job.graph import stage_jobs
from transferqueue.workflows.job.run import machine
from transferqueue.workflows.job.run.machine import devices_of
from transferqueue.workflows.job.run.on_ray import reserved
from transferqueue.workflows.job.run.preflight import (
    check_id,
    check_model,
    check_positions,
    counted_models,
    placement_of,
)
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import GIB

SIZES = ModelSizes(parameters=500_000_000, layers=24, hidden=896, queries=896, keys=128, inner=4864, vocabulary=151_936)
"""About those of a Qwen2.5-0.5B."""
LARGE = ModelSizes(
    parameters=7_600_000_000, layers=28, hidden=3584, queries=3584, keys=512, inner=18944, vocabulary=152_064
)
HELD_OUT = 'evaluation.path="held"'
VLLM = "engine.0.kind=vllm"


def gpus(count: int, *, gib: int = 80, first: int = 0) -> list[FoundDevice]:
    return [FoundDevice(name=str(first + at), total=gib * GIB, free=gib * GIB) for at in range(count)]


def placed(job: Job, devices: Sequence[FoundDevice], sizes: ModelSizes | None = SIZES) -> Placement:
    paths = (
        job.model.path,
        job.reference.path,
        job.critic.path,
        job.teacher.path,
        *(each.model for each in job.reward),
    )
    return device_map(job, stage_jobs(job), devices, dict.fromkeys(paths, sizes))


def seen(placement: Placement) -> dict[str, str]:
    return {label: variables["CUDA_VISIBLE_DEVICES"] for label, variables in placement.environments().items()}


NONE = {"prompts-0": "", "advantage-0": ""}
MAPS = {
    "one card": (
        jobs.job("grpo", VLLM, HELD_OUT),
        gpus(1),
        {**NONE, "rollout-0": "0", "train-0": "0", "evaluate-0": "0"},
    ),
    "two cards": (
        jobs.job("grpo", VLLM, HELD_OUT),
        gpus(2),
        {**NONE, "rollout-0": "0", "train-0": "1", "evaluate-0": "0"},
    ),
    "colocated": (
        jobs.job(
            "grpo", VLLM, "engine.0.options.gpu_memory_utilization=0.4", "engine.0.devices=[1]", "trainer.devices=[1]"
        ),
        gpus(2),
        {**NONE, "rollout-0": "1", "train-0": "1"},
    ),
    "in turn": (
        jobs.job("grpo", VLLM, "pacing.mode=colocated", "engine.0.devices=[1]", HELD_OUT),
        gpus(2),
        {**NONE, "train-0": "1", "evaluate-0": "1"},
    ),
    "ddp": (
        jobs.job("grpo", VLLM, "engine.0.count=4", "trainer.parallel=ddp", "trainer.ranks=4", HELD_OUT),
        gpus(8),
        {**NONE, "evaluate-0": "0"}
        | {f"{name}-{at}": f"{first + at}" for name, first in (("rollout", 0), ("train", 4)) for at in range(4)},
    ),
    "fsdp2 beside a tensor-parallel engine": (
        jobs.job(
            "grpo", VLLM, "engine.0.tensor_parallel=4", "trainer.parallel=fsdp2", "trainer.ranks=4", HELD_OUT
        ),
        gpus(8),
        NONE | {"rollout-0": "0,1,2,3", "evaluate-0": "0,1,2,3"} | {f"train-{at}": f"{4 + at}" for at in range(4)},
    ),
    "three engines, and cards that the job may use": (
        jobs.job("grpo", VLLM, "engine.0.count=3", HELD_OUT),
        gpus(4, first=4),
        {**NONE, "rollout-0": "4", "rollout-1": "5", "rollout-2": "6", "train-0": "7", "evaluate-0": "4"},
    ),
    "critic, reference and a named place": (
        jobs.job("ppo", VLLM, "trainer.devices=[5]", "critic.devices=[6, 7]", "evaluation.devices=cpu", HELD_OUT),
        gpus(8),
        {
            **NONE, "rollout-0": "0", "train-0": "5", "train_critic-0": "6", "value-0": "7", "reference-0": "1",
            "evaluate-0": "",
        },
    ),
    "sft": (jobs.job("sft", HELD_OUT), gpus(2), {"prompts-0": "", "train-0": "0", "evaluate-0": "1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_each_process_has_its_gpus(name):
    job, devices, wanted = MAPS[name]
    placement = placed(job, devices)
    assert seen(placement) == wanted
    for number, device in enumerate(devices):
        held = placement.on(number)
        assert sum(process.held.total for process in held) <= device.free
        assert all(process.held.parts["process"] >= device_bytes.PROCESS_BYTES for process in held)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two cards", *only_long(*sorted(MAPS.keys() - {"two cards"}))])
def test_a_process_sees_the_gpus_of_the_map(name, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job, devices, wanted = MAPS[name]
    found: dict[str, str | None] = {}

    def hear(label: str, event: Event) -> None:
        if isinstance(event, Figures):
            found[label] = event.values["gpus"]

    processes = stage_jobs(job)
    with tq.connect(label="supervisor") as queue:
        create_table(queue)
        environments = placed(job, devices).environments()
        with Flow(queue, recording(processes), directory=tmp_path, observe=hear, environments=environments) as flow:
            flow.run()
    functions_alone = dict.fromkeys(process.label for process in processes if process.name == "reward")
    assert found == wanted | functions_alone


def test_a_machine_without_gpus_is_left_as_it_is():
    job = jobs.job("grpo", HELD_OUT)
    assert seen(placed(job, [])) == {}
    assert seen(placed(jobs.job("grpo", "trainer.devices=cpu", HELD_OUT), [])) == {"train-0": ""}
    assert placed(job, []).lines()[0].startswith("CPU: rollout-0 ")


def test_an_elastic_job_has_gpus_for_the_engines_that_it_may_add():
    placement = placed(jobs.job("grpo", "elastic.max=3"), gpus(4))
    assert [seen(placement)[label] for label in ("rollout-0", "rollout-1", "rollout-2", "train-0")] == [*"0123"]


def test_a_tensor_parallel_engine_shares_no_gpu_on_ray():
    hosts = [FoundDevice(name=f"{at % 4}", host="ab"[at // 4]) for at in range(8)]
    changes = ("on=ray", VLLM, "engine.0.tensor_parallel=2", HELD_OUT)
    placement = placed(jobs.job("grpo", *changes), hosts, None)
    assert {process.label: process.devices for process in placement.processes} == {
        "rollout-0": (0, 1), "train-0": (2,), "evaluate-0": (4, 5),
    }  # fmt: skip
    share = "engine.0.options.gpu_memory_utilization=0.4"
    shared = jobs.job("grpo", *changes, share, "engine.0.devices=[0, 1]", "evaluation.devices=[0, 1]")
    with (
        pytest.raises(UsageError, match=r"evaluate-0, rollout-0 share GPUs \[0, 1\], and Ray gives a tensor-parallel"),
        reserved(placed(shared, hosts, None), shared),
    ):
        pass


def test_options_of_a_process_that_ray_does_not_have_are_refused_by_a_dry_run():
    job = jobs.job("grpo", "on=ray", "ray.options.trian.num_gpus=2")
    with pytest.raises(UsageError, match=r"ray\.options\.trian: the job has no such task or process; it has .*train-0"):
        placement_of(job, devices=gpus(2))


def test_what_ray_options_place_is_not_in_the_map():
    job = jobs.job("grpo", "on=ray", "ray.options.rollout.num_gpus=2")
    placement = placement_of(job, devices=gpus(2))
    assert seen(placement) == {**NONE, "train-0": "0"}


def test_a_reward_model_has_a_gpu():
    assert seen(placed(jobs.job("grpo", 'reward=[{model="models/judge"}]'), gpus(4)))["reward-0"] == "2"


@pytest.mark.parametrize(
    ("changes", "count", "error", "text"),
    [
        (["trainer.devices=[3]"], 2, NotFound, r"trainer\.devices=\[3\]: there is no GPU 3; here are 2 GPUs, 0 to 1"),
        (["engine.0.devices=[0]"], 0, NotFound, r"engine\.0\.devices=\[0\]: there is no GPU 0; here are 0 GPUs: give"),
        (["evaluation.devices=[-1]", HELD_OUT], 2, NotFound, r"evaluation\.devices=\[-1\]: there is no GPU -1"),
        (["trainer.devices=[]"], 2, UsageError, r"trainer\.devices=\[\] names no GPU; give numbers such as"),
        (
            ["trainer.parallel=ddp", "trainer.ranks=2", "trainer.devices=[1, 1]"],
            2,
            UsageError,
            r"trainer\.devices=\[1, 1\] with trainer\.ranks=2: each rank has a GPU of its own; give 2 num",
        ),
        (
            ["trainer.parallel=ddp", "trainer.ranks=3"],
            2,
            NotFound,
            r"trainer\.ranks=3: each rank has a GPU of its own, and here are 2 GPUs",
        ),
        (
            [VLLM, "engine.0.tensor_parallel=2", "engine.0.devices=[1, 1]"],
            2,
            UsageError,
            r"engine\.0\.devices: rollout-0 would be on \[1, 1\]; a tensor-parallel engine has different GPUs",
        ),
        (
            [VLLM, "engine.0.tensor_parallel=2", "engine.0.devices=[0, 1, 2]"],
            3,
            UsageError,
            r"engine\.0\.devices=\[0, 1, 2\] with tensor_parallel=2: give 2 GPUs for each process, or for all",
        ),
        ([VLLM, "engine.0.tensor_parallel=4"], 2, NotFound, r"rollout-0 needs 4 GPUs of one host"),
        (
            [VLLM, "engine.0.devices=[0]", "trainer.devices=[0]"],
            1,
            UsageError,
            (r"rollout-0 \(engine\.0\.devices\) and train-0 \(trainer\.devices\) are both on GPU 0: .*"
            r"engine\.0\.options\.gpu_memory_utilization; rollout-0 .* \+ train-0 .* of 80\.00 GiB are free"),
        ),
        (
            [VLLM, "engine.0.options.gpu_memory_utilization=0.95", "engine.0.devices=[0]", "trainer.devices=[0]"],
            1,
            Impossible,
            r"GPU 0 cannot hold what is placed on it: rollout-0 76\.00 GiB .* \+ train-0 .* = .*; 80\.00 GiB of 80\.00",
        ),
        (
            [VLLM, "engine.0.options.gpu_memory_utilization=0.01"],
            2,
            Impossible,
            r"GPU 0 cannot hold .*; the share of rollout-0 leaves no KV cache for the longest row",
        ),
    ],
)  # fmt: skip
def test_a_map_that_cannot_be_is_refused(changes, count, error, text):
    with pytest.raises(error, match=text):
        placed(jobs.job("grpo", *changes), gpus(count))


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic():
    text = (
        r"GPU 1 cannot hold what is placed on it: train-0 [\d.]+ GiB \(weights 28\.31 GiB, gradients 28\.31 GiB, "
        r"moments 56\.62 GiB, copies 14\.16 GiB, activations [\d.]+ GiB, process 0\.50 GiB\) = [\d.]+ GiB; 80\.00 GiB "
        r"of 80\.00 GiB are free"
    )
    with pytest.raises(Impossible, match=text):
        placed(jobs.job("grpo", VLLM), gpus(2), LARGE)
    ranks = ("trainer.parallel=fsdp2", "trainer.ranks=4", "trainer.gradient_checkpointing=true")
    assert len(placed(jobs.job("grpo", VLLM, *ranks), gpus(5), LARGE).processes) == 5


def test_a_rank_of_fsdp2_holds_its_share_of_the_model():
    held = device_bytes.trained(jobs.job("grpo", "trainer.parallel=fsdp2", "trainer.ranks=4"), LARGE)
    shares = {"weights": 1, "gradients": 1, "moments": 2}
    assert {name: held.parts[name] for name in shares} == {name: each * 7_600_000_000 for name, each in shares.items()}
    assert held.total == sum(held.parts.values())


def test_vllm_gets_what_the_others_leave_of_a_gpu():
    job = jobs.job("grpo", VLLM, HELD_OUT)
    alone, shared = placed(job, gpus(2)), placed(job, gpus(1))
    [engine, train, evaluation] = shared.processes
    assert engine.share == pytest.approx(1 - (train.held.total + evaluation.held.total) / (80 * GIB), abs=0.01)
    assert shared.with_shares(job).engine[0].options == {"gpu_memory_utilization": engine.share}
    [engine, _, evaluation] = alone.processes
    assert engine.share == min(0.9, int(100 - 100 * evaluation.held.total / (80 * GIB)) / 100)
    assert engine.held.total == int(engine.share * 80 * GIB)
    two = placed(jobs.job("grpo", VLLM, "engine.0.count=2", "trainer.devices=[0]"), gpus(2))
    assert [process.share for process in two.processes if process.share] == [0.45, 0.45]


def test_nothing_is_compared_where_bytes_are_not_known():
    unknown = placed(jobs.job("grpo", VLLM), [FoundDevice(name="0")], None)
    assert [process.share for process in unknown.processes] == [0.45, 0.0]
    text = "not known: no config.json of its model is here, or came from the hub"
    assert unknown.lines() == [f"GPU 0: rollout-0 {text} + train-0 {text} = 0.00 MiB"]


def test_the_gpus_of_a_machine_are_those_that_its_processes_may_see():
    listed = "0, GPU-a, 81559, 81000\n1, GPU-b, 81559, 1000\n"
    assert [found.name for found in devices_of(listed, None)] == ["0", "1"]
    assert devices_of(listed, "GPU-b") == [FoundDevice(name="GPU-b", total=81559 << 20, free=1000 << 20)]
    assert devices_of(listed, "") == devices_of(listed, "-1") == []
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES='2': nvidia-smi does not list '2'"):
        devices_of(listed, "2")


def test_a_program_that_lists_no_gpus_and_never_ends_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "_LIST_S", 0.2)
    with pytest.raises(UsageError, match=r"nvidia-smi: it did not end within 0\.2 s; repair the driver, or hide"):
        machine.found_devices()


def test_sizes_are_read_from_the_headers_of_the_files(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    assert model_sizes(str(tmp_path)) is None
    header = b'{"w": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    assert model_sizes(str(tmp_path)) == ModelSizes(parameters=32, hidden=8, queries=8, keys=8, inner=32)


def config_of_a_small_model(**changes: Any) -> dict[str, Any]:
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
    return config | {"num_hidden_layers": 3, "vocab_size": 512, "max_position_embeddings": 256} | changes


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": False}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 32, "tie_word_embeddings": False}),
    ],
)
def test_parameters_are_counted_from_a_configuration_alone(kind, changes, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    model = getattr(transformers, kind)
    real = model(model.config_class(**config_of_a_small_model(**changes)))
    in_hub_cache("lab/small", real.config.to_dict(), tmp_path, monkeypatch)
    sizes = model_sizes("lab/small", f"{kind}-1")
    assert sizes is None, "another revision is not in the cache, and the hub is offline"
    sizes = model_sizes("lab/small", "main")
    assert sizes.parameters == pytest.approx(real.num_parameters(), rel=0.01)
    assert (sizes.layers, sizes.hidden, sizes.keys, sizes.vocabulary) == (3, 64, 32, 512)


def in_hub_cache(name: str, config: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cache of the hub have a model's configuration, and no other model; the hub does not answer."""
    constants = pytest.importorskip("huggingface_hub").constants
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c0")
    (place / "snapshots" / "c0").mkdir(parents=True)
    (place / "snapshots" / "c0" / "config.json").write_text(json.dumps(config, default=str))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_job_with_an_id_of_the_hub_is_placed_and_its_rows_compared_with_its_positions(tmp_path, monkeypatch):
    in_hub_cache("lab/small", config_of_a_small_model(), tmp_path, monkeypatch)
    given = jobs.job("grpo", VLLM, "model.path=lab/small")
    assert [process.held.parts["weights"] for process in placement_of(given, devices=gpus(2)).processes][1] > 0
    assert [line.partition(" counted")[0] for line in counted_models(given)] == [
        "model.path='lab/small': about 195,008 parameters,"
    ]
    with pytest.raises(Impossible, match=r"model\.path='lab/small' has 256 positions, and a row up to"):
        check_positions(jobs.job("grpo", "model.path=lab/small", "sampling.tokens_max=512"), "model.path", "lab/small")
    unknown = placement_of(jobs.job("grpo", "model.path=lab/other"), devices=gpus(2))
    assert "train-0 not known: no config.json of its model is here, or came from the hub" in unknown.lines()[1]


def test_a_model_that_neither_a_directory_nor_the_hub_has_is_refused_before_anything_starts(tmp_path, monkeypatch):
    in_hub_cache("lab/small", config_of_a_small_model(), tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    check_id("teacher.path", "lab/small")
    with pytest.raises(NotFound, match=r"teacher\.path='runs/grpo': there is no such directory, and the hub .* is set"):
        check_id("teacher.path", "runs/grpo")
    with pytest.raises(NotFound, match=r"reference\.path='runs/sft/model': there is no such directory$"):
        check_model("reference.path", "runs/sft/model")


HUB = """
from transferqueue.workflows.job.devices.model_sizes import model_sizes, why_not_in_hub

for name, revision in (("lab/small", ""), ("lab/small", "v2/a"), ("lab/none", "")):
    found = model_sizes(name, revision)
    print(found and (found.parameters, found.hidden, found.is_counted), why_not_in_hub(name, revision))
"""


HUB_HAS = {
    "/lab/small/resolve/main/config.json": config_of_a_small_model(),
    "/lab/small/resolve/v2%2Fa/config.json": config_of_a_small_model(),
    "/api/models/lab/small/revision/v2%2Fa?expand[]=safetensors": {"safetensors": {"total": 1234, "parameters": {}}},
}


def test_the_hub_is_asked_for_what_a_model_that_is_not_here_has(tmp_path):
    pytest.importorskip("huggingface_hub")

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = HUB_HAS.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(b"" if found is None else json.dumps(found).encode())

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        Thread(target=hub.serve_forever).start()
        places = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        hidden = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        asked = [sys.executable, "-c", HUB]
        said = subprocess.run(asked, env=hidden | places, capture_output=True, text=True, check=True, timeout=60)
        hub.shutdown()
    counted, told, none = (line.strip() for line in said.stdout.splitlines())
    assert (counted.endswith(", 64, True)"), told) == (True, "(1234, 64, False)"), said.stderr
    assert none == f"None {places['HF_ENDPOINT']} answers 404 Not Found"


def test_in_turn_a_card_holds_what_stays_of_both_and_the_larger_of_what_each_adds():
    def parts(*changes: str) -> dict[str, int]:
        (process,) = placed(jobs.job("grpo", *changes), gpus(1)).on(0)
        return process.held.parts

    apart = {process.label: process.held.parts for process in placed(jobs.job("grpo"), gpus(1)).on(0)}
    trainer, engine = apart["train-0"], apart["rollout-0"]
    one = parts("pacing.mode=colocated")
    training = sum(trainer[name] for name in ("gradients", "copies", "activations"))
    generation = sum(engine[name] for name in ("activations", "KV cache"))
    assert (one["weights"], one["moments"]) == (trainer["weights"], trainer["moments"])
    assert one["engine weights"] == engine["weights"]
    assert one["in turn"] == max(training, generation)
    # vLLM sleeps: nothing of it stays, and its share is what the trainer leaves.
    (vllm,) = placed(jobs.job("grpo", VLLM, "pacing.mode=colocated"), gpus(1)).on(0)
    assert "engine weights" not in vllm.held.parts
    assert vllm.held.parts["in turn"] == int(vllm.share * 80 * GIB) > training
    assert vllm.held.total <= 80 * GIB
