"""A job whose engines are at another site, beside the same job at one site: ``python -m bench.two_sites``.

The sites are two network namespaces, the far one with process numbers of its own, so that nothing is mapped: all bytes
go over sockets. They cross a link of `--ms` milliseconds there and back and `--mbit` Mbit/s each way, made by a proxy
that counts bytes, passes each chunk at the rate of the link, and half the milliseconds later. (Kernels without netem
cannot delay.) The job is GRPO of a Qwen3 of random weights with transformers engines, asynchronous with depth 1
(`--depth`): `transferqueue train` at the near site, and for two sites ``transferqueue train --site far`` at the far
one, which brings the weights there through a relay.

- *idle*: share of the training time in which the trainer waited for rows, after the first `WARM` steps: before them the
  engines of the far site start, later than those here.
- *down*, *up*: bytes from and to the near site, over the bytes of a whole version, for each version: one before the
  first step, and one a step. Down are weights, prompts and replies; up are samples and requests.
- *down_later*: the same without the first version, which crosses whole.

Expected, written before the first run: idle within 5 points of one site's; at `--lr 1e-4 --dtype float32`, where each
step changes everything, down at most 1.05 versions a step (each version crosses once for two engines), at `--lr 1e-6
--dtype bfloat16` down_later at most 0.05; up a few hundredths. At depth 1 the rows of a step are generated while one
step is trained, and not before the version of the step before has crossed; so idle stays as it is only if crossing and
generation together fit into the training of a step (`--epochs 3`: training takes three times as long), or at depth 2.

    python -m bench.two_sites --seeds 3
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

import transferqueue as tq
from bench.measurement_record import Measurement, summarize
from bench.namespaces import NEAR, Far, inside, why_not
from bench.run_record import RECORDS, save_record
from bench.server import Server
from transferqueue.adapters.weights import checkpoint_specs

MODULE: Final = "bench.two_sites"
SITES: Final = ("one", "two")
RUN_S: Final = 900.0
STOP_S: Final = 60.0
WARM: Final = 4
CHUNK: Final = 1 << 16
WAITING_S: Final = 0.25
"""Of data on its way in the proxy: beyond it, the sender is not read."""
SIZE: Final = {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4}
JOB: Final = """
name = "two-sites"
steps = {steps}
model = {{ path = "model", dtype = "float32" }}
data = {{ path = "data", template = "{{question}}", prompt_tokens_max = 32 }}
engine = [{{ kind = "transformers", count = {engines}, slots = {slots}, site = "{site}" }}]
sampling = {{ group_size = 4, tokens_max = 16 }}
reward = [{{ function = "any_rewards:spread" }}]
algorithm = {{ kind = "grpo", epochs = {epochs} }}
trainer = {{ prompts_per_step = 16, lr = {lr} }}
pacing = {{ mode = "async", depth = {depth}, max_staleness = {depth} }}
weights = {{ dtype = "{dtype}" }}
checkpoint = {{ every = 0 }}
queue = {{ memory_gib = 0.5 }}
"""
REWARDS: Final = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""
"""A reward that differs between responses of random weights: each step changes every tensor."""


class SlowLink:
    """A port of a site's address (the near one's) that passes everything on to a port of loopback, at the rate and with
    the delay of a link. down, up: bytes from and to that site."""

    def __init__(self, port: int, mbit: float, delay_s: float, at: str = NEAR) -> None:
        self.down = self.up = 0
        self._bytes_s, self._delay_s, self._port = mbit * 1e6 / 8, delay_s, port
        self._free = {"down": 0.0, "up": 0.0}
        self._lock = threading.Lock()
        self._listener = socket.create_server((at, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            far, _ = self._listener.accept()
            near = socket.create_connection(("127.0.0.1", self._port))
            for each in (far, near):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Direction(self, "up", far, near).start()
            _Direction(self, "down", near, far).start()

    def sent(self, way: str, size: int) -> float:
        """Count `size` bytes, and return when they arrive: connections share the link."""
        with self._lock:
            setattr(self, way, getattr(self, way) + size)
            self._free[way] = max(time.monotonic(), self._free[way]) + size / self._bytes_s
            return self._free[way] + self._delay_s


class _Direction:
    """One way of one connection: a thread reads, another writes each chunk when it arrives."""

    def __init__(self, link: SlowLink, way: str, source: socket.socket, sink: socket.socket) -> None:
        self._link, self._way, self._source, self._sink = link, way, source, sink
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()

    def start(self) -> None:
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        data = b"."
        while data:
            try:
                data = self._source.recv(CHUNK)
            except OSError:
                data = b""
            arrives = self._link.sent(self._way, len(data))
            with self._changed:
                self._chunks.append((arrives, data))
                self._changed.notify_all()
            time.sleep(max(0.0, arrives - time.monotonic() - WAITING_S))

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks)
                arrives, data = self._chunks.popleft()
            time.sleep(max(0.0, arrives - time.monotonic()))
            try:
                if not data:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(data)
            except OSError:
                return


# ---------------------------------------------------------------- a run


def job_file(folder: Path, site: str, options: argparse.Namespace) -> Path:
    path = folder / f"job-{site or 'here'}.toml"
    named = {name: getattr(options, name) for name in ("steps", "engines", "slots", "epochs", "depth", "lr", "dtype")}
    text = JOB.format(site=site, **named)
    path.write_text(text, encoding="utf-8")
    return path


def command(job: Path, address: str, out: Path, seed: int, *more: str) -> list[str]:
    words = ["--set", f"queue.address={address}", "--set", f"seed={seed}", "--out", str(out), *more]
    return [sys.executable, "-m", "transferqueue.cli", "train", str(job), *words]


class FarEngines:
    """`transferqueue train --site far` at the far site, behind the link. A context manager: leaving it waits until the
    job has ended there too."""

    def __init__(self, far: Far, server: Server, job: Path, seed: int, options: argparse.Namespace) -> None:
        with tq.connect(server.address) as queue:
            ports = [int(server.tcp_address.rpartition(":")[2]), int(queue.stats().server.bulk_port)]
        self.links = [SlowLink(port, options.mbit, options.ms / 2000) for port in ports]
        self._log = job.parent / f"far-{seed}.log"
        words = command(job, f"tcp://{NEAR}:{ports[0]}", job.parent / f"far-{seed}", seed, "--site", "far")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*far.command, "env", "-C", str(job.parent), *words], stdout=log, stderr=log
            )

    def check(self) -> None:
        """Raise if the far site has ended, with its last words."""
        if self._process.poll():
            raise RuntimeError(f"the far site ended with {self._process.returncode}: {self._log.read_text()[-2000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._process.wait(STOP_S)
                self.check()
        finally:
            self._process.kill()
            self._process.wait()


def run(sites: str, seed: int, folder: Path, far: Far, options: argparse.Namespace) -> dict[str, float]:
    """Run the job once; return figures of it."""
    job = job_file(folder, "far" if sites == "two" else "", options)
    server = Server("1GiB", tcp=True)
    words = [*command(job, server.address, folder / f"{sites}-{seed}", seed), "--json"]
    links: list[SlowLink] = []
    try:
        if sites == "one":
            summary = _trained(words, folder)
        else:
            with FarEngines(far, server, job, seed, options) as engines:
                summary, links = _trained(words, folder, engines.check), engines.links
    finally:
        server.stop()
    elements = sum(math.prod(spec.shape) for spec in checkpoint_specs(folder / "model").values())
    version = elements * getattr(torch, options.dtype).itemsize
    figures = _after_start(folder / f"{sites}-{seed}" / "steps.jsonl") | {"version_bytes": version}
    figures["written"] = summary["publications"]["train-0"]["bytes"] / version
    for way in ("down", "up") if links else ():
        versions = sum(getattr(link, way) for link in links) / version
        figures[way] = versions / (summary["steps"] + 1)
        if way == "down":
            figures["down_later"] = (versions - 1) / summary["steps"]
    return figures


def _after_start(file: Path) -> dict[str, float]:
    """Return the trainer's idle share and the seconds of a step, of the steps after the first ones."""
    steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    seconds = steps[-1]["at"] - steps[WARM - 1]["at"]
    return {"idle": sum(step["idle_s"] for step in steps[WARM:]) / seconds, "step_s": seconds / (len(steps) - WARM)}


def _trained(words: list[str], folder: Path, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run the command to its end; return the summary. check: called every second meanwhile."""
    deadline = time.monotonic() + RUN_S
    with (
        (folder / "train.json").open("w+", encoding="utf-8") as out,
        (folder / "train.log").open("w+", encoding="utf-8") as log,
    ):
        process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=log)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                check()
        finally:
            process.terminate()
            process.wait(STOP_S)
        if process.returncode:
            raise RuntimeError(f"train ended with {process.returncode}: {(folder / 'train.log').read_text()[-2000:]}")
        summary: dict[str, Any] = json.loads((folder / "train.json").read_text())
    return summary


def measure(options: argparse.Namespace) -> None:
    """Run both by turns, print them, and write a record. Runs inside the near site's namespaces."""
    from transferqueue.workflows.job.tiny_model.make import make, write_data

    measurement, figures = Measurement(), {sites: list[dict[str, float]]() for sites in SITES}
    with tempfile.TemporaryDirectory(prefix="transferqueue-sites-") as directory, Far(own_processes=True) as far:
        folder = Path(directory)
        make(folder / "model", **SIZE)
        write_data(folder / "data", train=1024, test=16)
        (folder / "any_rewards.py").write_text(REWARDS, encoding="utf-8")
        for seed in range(options.seeds):
            for sites in SITES[:: 1 if seed % 2 else -1]:
                figures[sites].append(run(sites, seed, folder, far, options))
                words = ", ".join(f"{name} {value:.3g}" for name, value in figures[sites][-1].items())
                print(f"{sites} site{'s' if sites == 'two' else ''}, seed {seed}: {words}", flush=True)
    results = [
        summarize(
            f"{sites}/{name}",
            "ratio" if name in ("idle", "written", "down", "down_later", "up") else name.rpartition("_")[2],
            [each[name] for each in runs],
        )
        for sites, runs in figures.items()
        for name in runs[0]
    ]
    differences = [two["idle"] - one["idle"] for one, two in zip(figures["one"], figures["two"], strict=True)]
    results.append(summarize("idle of two sites minus that of one", "ratio", differences))
    details = {
        "mbit": options.mbit,
        "ms": options.ms,
        "steps": options.steps,
        "engines": options.engines,
        "epochs": options.epochs,
        "depth": options.depth,
        "lr": options.lr,
        "dtype": options.dtype,
        "runs": figures,
    }
    for result in results:
        print(result)
    save_record(measurement, options.out, "two-sites", results, details)


def main() -> None:
    """Measure, in namespaces of its own."""
    options = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--slots", type=int, default=32)
    options.add_argument(
        "--epochs", type=int, default=1, help="updates on the rows of a step: training takes that much longer"
    )
    options.add_argument("--depth", type=int, default=1, help="batches ahead, and versions behind")
    options.add_argument("--lr", type=float, default=1e-6)
    options.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of published weights")
    options.add_argument("--ms", type=float, default=20.0, help="there and back")
    options.add_argument("--mbit", type=float, default=200.0)
    options.add_argument("--out", type=Path, default=RECORDS)
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.steps <= WARM:
        options.error(f"--steps {chosen.steps}: the first {WARM} are not measured; give more")
    if chosen.inside:
        measure(chosen)
    elif why := why_not():
        sys.exit(f"two sites need network namespaces: {why}")
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        inside(MODULE, "--inside", *sys.argv[1:], timeout_s=chosen.seeds * 2 * RUN_S)


if __name__ == "__main__":
    main()
