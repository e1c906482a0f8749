"""Scenario: weights through relays, on loopback: what crosses into a host, and when the third of a chain has a version.

    python -m bench.weight_relay --out FILE

- `transferqueue/wire`: bytes that pass both connections into a host, by number of its replicas, per byte of the
  version, for a version of which everything is new (`all`), and one of which a sixteenth is (`part`, per byte of what
  is new).
- `transferqueue/applied_N`: from the call of `publish` until a replica of the Nth host of a chain has the version and
  has told so.
- `memcpy`: one copy of the same bytes.

Estimate for 64 MiB: a hop receives at about 1.5 GB/s (43 ms), checks it (6), writes and checks it (20), reads it back
(6): about 75 ms, three of them in a row 225 ms; twice that on two cores, which every process of the chain shares. Wire:
1.01.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import transferqueue as tq
from bench.harness import ROOT, Result, save_results
from bench.server import Server
from bench.wire import Relay as Counter

SCENARIO = "weight_relay"
OURS = "transferqueue"
MIB = 1 << 20
TENSORS = 16
TENSOR_BYTES = 4 * MIB
TURNS, WARM = 9, 2
REPLICAS = (1, 4, 8)
CHAIN = 3
WAIT_S = 60.0

Model = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]


def model(turn: int, changed: int = TENSORS) -> Model:
    """All tensors, of which the first `changed` are this turn's, the others those of the turn before."""
    seeds = [(turn if at < changed else turn - 1) * TENSORS + at for at in range(TENSORS)]
    return {
        f"w{at}": np.random.default_rng(seed).integers(0, 255, TENSOR_BYTES, dtype=np.uint8)
        for at, seed in enumerate(seeds)
    }


def same(found: tq.Weights, sent: Model) -> bool:
    return all(np.array_equal(found.numpy()[name], value) for name, value in sent.items())


class Host:
    """A server with the relay into it, as one command has them."""

    def __init__(self, source: str, opened: ExitStack) -> None:
        self.server = Server("1GiB", tcp=True)
        opened.callback(self.server.stop)
        words = ["relay", "--from", source, "--channel", "policy", "--into", self.server.address, "--remote"]
        self.relay = subprocess.Popen(
            [sys.executable, "-m", "transferqueue.cli", *words], stderr=subprocess.DEVNULL, cwd=ROOT
        )
        opened.callback(self._stop)

    def _stop(self) -> None:
        self.relay.terminate()
        self.relay.wait(WAIT_S)

    def replica(self, opened: ExitStack) -> Replica:
        return Replica(opened.enter_context(tq.connect(self.server.address)), opened)


class Replica:
    """Who generates at a host."""

    def __init__(self, queue: tq.Queue, opened: ExitStack) -> None:
        self.channel = queue.weights("policy")
        self.versions = opened.enter_context(self.channel.subscribe())

    def take(self) -> tq.Weights:
        found = self.versions.pull(timeout_s=WAIT_S)
        self.channel.applied(found.version)
        return found


def crossing(replicas: int) -> list[Result]:
    """Bytes into a host of so many replicas."""
    with ExitStack() as opened:
        origin = Server("1GiB", tcp=True)
        opened.callback(origin.stop)
        trainer = opened.enter_context(tq.connect(origin.address))
        bulk = trainer.stats().server.bulk_port
        links = [Counter(origin.tcp_address, ("127.0.0.2", 0)), Counter(f"tcp://127.0.0.1:{bulk}", ("127.0.0.2", bulk))]
        for link in links:
            opened.callback(link.close)
        host = Host(links[0].address, opened)
        all_of_them = [host.replica(opened) for _ in range(replicas)]
        found = []
        for version, (workload, changed) in enumerate((("all", TENSORS), ("part", 1))):
            before, sent = sum(one.up + one.down for one in links), model(version, changed)
            trainer.weights("policy").publish(version, sent)
            checked = all(same(one.take(), sent) for one in all_of_them)
            passed = sum(one.up + one.down for one in links) - before
            new = changed * TENSOR_BYTES
            note = f"{replicas} replicas"
            found.append(
                Result(SCENARIO, OURS, f"{workload}_{replicas}", "wire", "ratio", [passed / new], new, checked, note)
            )
        return found


def chain() -> list[Result]:
    """When each host of a chain has a version."""
    times: dict[str, list[float]] = {}
    copy_s = []
    with ExitStack() as opened:
        origin = Server("1GiB", tcp=True)
        opened.callback(origin.stop)
        trainer = opened.enter_context(tq.connect(origin.address)).weights("policy")
        source, replicas = origin.tcp_address, []
        for _ in range(CHAIN):
            host = Host(source, opened)
            source = host.server.tcp_address
            replicas.append(host.replica(opened))
        for turn in range(2 * (WARM + TURNS)):
            workload, changed = (("all", TENSORS), ("part", 1))[turn % 2]
            sent = model(turn, changed)
            began = time.perf_counter()
            np.concatenate(list(sent.values()))
            copied = time.perf_counter() - began
            began = time.perf_counter()
            trainer.publish(turn, sent)
            held = []
            for hop, replica in enumerate(replicas, 1):
                held.append(replica.take())
                if turn >= 2 * WARM:
                    times.setdefault(f"{workload} applied_{hop}", []).append(time.perf_counter() - began)
            if not all(same(one, sent) for one in held):
                raise ValueError(f"version {turn} is not what was published")
            if turn >= 2 * WARM and workload == "all":
                copy_s.append(copied)
    size = TENSORS * TENSOR_BYTES
    found = [
        Result(SCENARIO, OURS, *name.split(), "s", raw, size if name.startswith("all") else TENSOR_BYTES, checked=True)
        for name, raw in times.items()
    ]
    return [*found, Result(SCENARIO, "memcpy", "all", "copy", "s", copy_s, size)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    save_results(out, [*(result for replicas in REPLICAS for result in crossing(replicas)), *chain()])


if __name__ == "__main__":
    main()
