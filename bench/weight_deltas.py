"""What a version of weights costs as a difference, and whole: ``python -m bench.weight_deltas --into bench/records``.

A Qwen3 model in float32, made from a config (`--hidden`, `--layers`, `--vocabulary`), trains with AdamW at several
learning rates on sequences that count up. After each step its weights are published in bfloat16 on two channels of one
server, by turns, each by the publisher of a job, in a thread beside the trainer: *delta*, with differences, and
*whole*, without. A reader of each, whose bytes cross the network stack as from another host, holds the version before,
pulls the next, and loads it into a model in bfloat16, as engines do; a reader on the server's host pulls the newest
*late*, without one. What was pulled and what the models have is compared with what was published, bit by bit.

- share: bytes over those of the model: *written* by the publisher, *sent* to the reader. The mean of the steps counts
  the versions that were written whole. The first version is not counted.
- seconds: *stand-still*, for which the trainer waits until the weights are copied; of `publish`, beside the trainer; of
  the follower's pull (*follow*), of loading it (*apply*), and of the late reader's pull; pulls compare checksums.
- changed: the share of the published elements that the step changed.

Expected, written before the first run: at 1e-6 2 to 5 % of the elements change, and a changed one takes about 10 of 16
bits, so 1 to 3 % are sent; written is up to 3 % more, since after 32 versions tensors are written whole. Both ways read
the model, and copy and hash it once: publishing differences reads it once more and writes less, so it takes about as
long. The trainer stands still for one copy both ways. The follower copies what it holds, so it takes about as long as
receiving the same bytes over loopback. At 5e-4 nearly everything changes: both ways are whole. It takes about 46 bytes
of memory a parameter: 16 of the trainer, 30 of the copies of both ways.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch

import transferqueue as tq
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import into_option, save_record, show
from bench.server import Server
from transferqueue.adapters.protocols import TensorSpec
from transferqueue.adapters.weights import ChannelWeights, ModuleLoader, spec
from transferqueue.workflows.job.training.publication import Publisher

WAYS: Final = {"delta": {}, "whole": {"deltas": 0}}
WAIT_S: Final = 100.0
PUBLISHED: Final = torch.bfloat16

Samples = dict[str, list[float]]


def make_model(options: argparse.Namespace) -> Any:
    """A model with random weights, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """The tensors: tied ones once."""
    return {name: value.detach() for name, value in model.named_parameters()}


def published(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the tensors, as they are published."""
    return {name: value.to(PUBLISHED) for name, value in weights_of(model).items()}


class Parameters:
    """The tensors of a model as a weight source."""

    def __init__(self, model: Any) -> None:
        self._tensors = weights_of(model)

    def metadata(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes."""
        return {name: spec(tensor) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


def same(found: Mapping[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(found[name].view(torch.int16), value.view(torch.int16)) for name, value in sent.items())


class Way:
    """A channel, its publisher, its follower, and what each version took."""

    def __init__(self, name: str, server: Server, opened: ExitStack, samples: Samples, engine: Any) -> None:
        self._name, self._samples, self._engine = name, samples, engine
        self._loader, self._address = ModuleLoader(engine), server.tcp_address
        self._trainer = opened.enter_context(tq.connect(server.address))
        self._publisher = Publisher(
            self._trainer.weights(name, keep=1, **WAYS[name]),
            dtype=PUBLISHED,
            figures=lambda kind, **values: self._told.update(values),
        )
        opened.callback(self._publisher.close)
        self._told: dict[str, float] = {}
        self._far = opened.enter_context(tq.connect(server.tcp_address, data="remote")).weights(name)
        self._late = opened.enter_context(tq.connect(server.address)).weights(name)
        self._held: tq.Weights | None = None

    def _note(self, what: str, value: float) -> None:
        if self._held is not None:
            self._samples.setdefault(f"{self._name}: {what}", []).append(value)

    def _sent(self) -> int:
        return sum(self._trainer.stats().server.bulk_sent_bytes.values())

    def version(self, number: int, model: Any, sent: dict[str, torch.Tensor], nbytes: int) -> None:
        """Publish, pull and load one version."""
        began = time.perf_counter()
        self._publisher.publish(number, Parameters(model))
        self._publisher.wait_copied()
        self._note("stand-still seconds", time.perf_counter() - began)
        self._publisher.wait()
        self._note("publish seconds", self._told["seconds"] - self._told["copy_s"])
        self._note("written share", self._told["bytes"] / nbytes)
        before, began = self._sent(), time.perf_counter()
        pulled = self._far.pull(above=number - 1, since=self._held, timeout_s=WAIT_S)
        self._note("follow seconds", time.perf_counter() - began)
        self._note("sent share", (self._sent() - before) / nbytes)
        began = time.perf_counter()
        self._loader.load(ChannelWeights(self._address, pulled))
        self._note("apply seconds", time.perf_counter() - began)
        began = time.perf_counter()
        late = self._late.pull(timeout_s=WAIT_S)
        self._note("late seconds", time.perf_counter() - began)
        if not all(same(found, sent) for found in (pulled, late, weights_of(self._engine))):
            raise ValueError(f"version {number} of {self._name} is not what was published")
        late.release()
        if self._held is not None:
            self._held.release()
        self._held = pulled

    def close(self) -> None:
        """Release what is held."""
        if self._held is not None:
            self._held.release()


def train(model: Any, optimizer: torch.optim.Optimizer, vocabulary: int) -> None:
    """One step, on two sequences of 64 tokens."""
    tokens = (torch.randint(0, vocabulary, (2, 1)) + torch.arange(64)) % vocabulary
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def differing(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> int:
    """How many elements have other bits."""
    return sum(int((these[name].view(torch.int16) != those[name].view(torch.int16)).sum()) for name in these)


def measured(options: argparse.Namespace, rate: float) -> tuple[Samples, int]:
    """Samples of one learning rate, and the bytes of a version."""
    samples: Samples = {}
    model = make_model(options)
    sent = published(model)
    nbytes = sum(value.nbytes for value in sent.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    server = Server(f"{12 * nbytes // (1 << 20) + 64}MiB", tcp=True)
    with ExitStack() as opened:
        opened.callback(server.stop)
        ways = [Way(name, server, opened, samples, make_model(options).to(PUBLISHED)) for name in WAYS]
        for step in range(options.steps + 1):
            if step:
                began = time.perf_counter()
                train(model, optimizer, options.vocabulary)
                samples.setdefault("step seconds", []).append(time.perf_counter() - began)
                before, sent = sent, published(model)
                samples.setdefault("changed share", []).append(2 * differing(sent, before) / nbytes)
                del before
            for way in ways if step % 2 else reversed(ways):
                way.version(step, model, sent, nbytes)
        for way in ways:
            way.close()
    return samples, nbytes


def results(options: argparse.Namespace) -> Iterator[MeasuredResult]:
    """Medians and spread, the mean of bytes, and the last step, by learning rate."""
    nbytes = 0
    for rate in options.rates:
        samples, nbytes = measured(options, rate)
        for name, values in samples.items():
            yield summarize(f"lr {rate:g}: {name}", "s" if "seconds" in name else "ratio", values)
            if "share" in name:
                yield single(f"lr {rate:g}: {name}, mean", "ratio", sum(values) / len(values))
                yield single(f"lr {rate:g}: {name}, first", "ratio", values[0])
                yield single(f"lr {rate:g}: {name}, last", "ratio", values[-1])
    yield single("version", "bytes", nbytes)
    yield single("parameters", "count", nbytes // PUBLISHED.itemsize)


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=5120)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 5e-4])
    into_option(parser)
    options = parser.parse_args()
    measurement = Measurement()
    lines = list(results(options))
    show(lines)
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "vocabulary", "steps")}
    save_record(measurement, options.into, "weight-deltas", lines, sizes | {"keep": 1, "master": "float32"})


if __name__ == "__main__":
    main()
