"""When each site of a chain of relays has a version, with forwarding and without: ``python -m bench.forwarding``.

Sites are joined by links of `--ms` milliseconds there and back and `--mbit` Mbit/s each way: near, far, near again, and
so on. The near and the far side are two network namespaces with process numbers of their own, so that nothing is mapped
across a link (see `bench.two_sites`, whose proxy is the link). At each site a relay brings the versions to a server of
the site, and an engine pulls them from there. Every tensor of a version is new.

- *held at N*: from the call of `publish` until the engine of site N holds the version: it is pulled, and its checksums
  match.
- *part at N*: the same, until the server of site N has committed something of it.
- *link N*: bytes that crossed into site N, over the bytes of a version.

Ways: `whole` (``--part-bytes`` above the size of a version: a site forwards what is published there) and `parts` (the
default).

Expected, written before the first run, for 32 MiB over two links of 200 Mbit/s: 1.34 s a link, so 1.5 s at the first
site both ways, 2.9 s at the second site without forwarding, and with it 1.9 s: one version, and two parts of 4 MiB,
which share the first link while they cross (0.34 s). Links 1.00 both ways.

    python -m bench.forwarding --rounds 3
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from bench.harness import ROOT
from bench.measurement_record import Measurement, summarize
from bench.namespaces import FAR, NEAR, Far, inside, why_not
from bench.run_record import RECORDS, save_record
from bench.server import Server
from bench.two_sites import SlowLink
from transferqueue.wire.answers.stats import ChannelStats

MODULE: Final = "bench.forwarding"
MIB: Final = 1 << 20
WAYS: Final = {"whole": "1TiB", "parts": "4MiB"}
TENSOR_BYTES: Final = 2 * MIB
WAIT_S: Final = 60.0
RUN_S: Final = 600.0
LOOK_S: Final = 0.02

ENGINE: Final = """
import sys, time, transferqueue as tq
with tq.connect(sys.argv[1]) as queue, queue.weights("policy").subscribe() as versions:
    print("ready", flush=True)
    while True:
        version = versions.pull(timeout_s=600).version
        print(version, time.monotonic(), flush=True)
"""


def model(version: int, tensors: int) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Tensors that no version before had."""
    random = np.random.default_rng(version)
    return {f"w{at}": random.integers(0, 255, TENSOR_BYTES, dtype=np.uint8) for at in range(tensors)}


def end(process: subprocess.Popen[str]) -> None:
    """End a process. One on the far side is the child of the process that entered the far side, which passes no signal
    on."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    if "nsenter" in str(process.args):
        for child in children:
            os.kill(int(child), signal.SIGTERM)
    else:
        process.terminate()
    process.wait(WAIT_S)


class Link:
    """The two ports of a server, as its side's address has them for the other side, behind one slow link."""

    def __init__(
        self, server: Server, far: Far, opened: ExitStack, options: argparse.Namespace, *, is_far: bool
    ) -> None:
        with tq.connect(server.address) as queue:
            ports = [int(server.tcp_address.rpartition(":")[2]), int(queue.stats().server.bulk_port)]
        self.address = f"tcp://{FAR if is_far else NEAR}:{ports[0]}"
        words = ["--link", *map(str, ports), "--mbit", str(options.mbit), "--ms", str(options.ms)]
        words += ["--at", FAR if is_far else NEAR]
        command = [*(far.command if is_far else []), sys.executable, "-m", MODULE, *words]
        self._process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        opened.callback(end, self._process)
        self.crossed()

    def crossed(self) -> int:
        """Bytes that came from the server."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a link has no pipes")
        self._process.stdin.write("crossed\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def serve_link(options: argparse.Namespace) -> None:
    """Be a link until input ends. Tells the bytes that came from the server, for each line of input."""
    links = [SlowLink(port, options.mbit, options.ms / 2000, options.at) for port in options.link]
    for _ in sys.stdin:
        print(sum(link.down for link in links), flush=True)


class Site:
    """A server, the relay into it over a link, and an engine. far: it is on the far side."""

    def __init__(
        self, link: Link, far: Far, opened: ExitStack, options: argparse.Namespace, way: str, *, is_far: bool
    ) -> None:
        before = far.command if is_far else []
        self.link, self.is_far = link, is_far
        self.server = Server("512MiB", tcp=True, before=before)
        opened.callback(self.server.stop)
        if is_far:
            opened.callback(end, self.server.process)
        words = ["relay", "--from", link.address, "--channel", "policy", "--into", self.server.address]
        command = [*before, sys.executable, "-m", "transferqueue.cli", *words, "--part-bytes", WAYS[way]]
        self._start(command, opened, stderr=subprocess.DEVNULL)
        engine = self._start(
            [*before, sys.executable, "-c", ENGINE, self.server.address], opened, stdout=subprocess.PIPE
        )
        if engine.stdout is None or engine.stdout.readline() != "ready\n":
            raise RuntimeError("the engine of a site did not start")
        self._lines = engine.stdout
        self._looking = opened.enter_context(tq.connect(self.server.address))

    def _start(self, command: list[str], opened: ExitStack, **pipes: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        opened.callback(end, process)
        return process

    def held(self, version: int) -> float:
        """When the engine held the version."""
        while True:
            number, at = self._lines.readline().split()
            if int(number) == version:
                return float(at)

    def look(self, version: int, before: int, found: list[float]) -> None:
        """Note when the server has a part of the version, or all of it. before: bytes of the versions that it had.
        Looks every `LOOK_S`."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            channel = self.channel
            if channel.bytes > before or version in channel.kept:
                found.append(time.monotonic())
                return
            time.sleep(LOOK_S)

    @property
    def channel(self) -> ChannelStats | dict[str, object]:
        """What the server says of the channel."""
        return self._looking.stats().channels.get("policy", ChannelStats(newest=-1))


def run(way: str, far: Far, options: argparse.Namespace) -> list[dict[str, float]]:
    """Publish some versions through a chain, and return figures of each after the first."""
    with ExitStack() as opened:
        origin = Server("512MiB", tcp=True)
        opened.callback(origin.stop)
        trainer = opened.enter_context(tq.connect(origin.address)).weights("policy")
        sites: list[Site] = []
        source = origin
        for number in range(1, options.sites + 1):
            link = Link(source, far, opened, options, is_far=number % 2 == 0)
            sites.append(Site(link, far, opened, options, way, is_far=number % 2 == 1))
            source = sites[-1].server
        figures = [_published(version, trainer, sites, options) for version in range(options.versions + 1)]
    return figures[1:]


def _published(
    version: int, trainer: tq.WeightChannel, sites: list[Site], options: argparse.Namespace
) -> dict[str, float]:
    tensors, size = model(version, options.tensors), options.tensors * TENSOR_BYTES
    crossed, parts = [site.link.crossed() for site in sites], [list[float]() for _ in sites]
    lookers = [
        threading.Thread(target=site.look, args=(version, site.channel.bytes, part))
        for site, part in zip(sites, parts, strict=True)
    ]
    for looker in lookers:
        looker.start()
    began = time.monotonic()
    trainer.publish(version, tensors)
    figures: dict[str, float] = {}
    for number, site in enumerate(sites, 1):
        figures[f"held at {number}"] = site.held(version) - began
    for number, (site, looker) in enumerate(zip(sites, lookers, strict=True), 1):
        looker.join()
        figures[f"part at {number}"] = parts[number - 1][0] - began
        figures[f"link {number}"] = (site.link.crossed() - crossed[number - 1]) / size
    return figures


def measure(options: argparse.Namespace) -> None:
    """Run both ways by turns, print them, and write a record. Runs inside the near side's namespaces."""
    measurement, figures = Measurement(), {way: list[dict[str, float]]() for way in WAYS}
    with Far(own_processes=True) as far:
        for turn in range(options.rounds):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                figures[way] += run(way, far, options)
                words = ", ".join(f"{name} {value:.3g}" for name, value in figures[way][-1].items())
                print(f"{way}, round {turn}: {words}", flush=True)
    results = [
        summarize(f"{way}/{name}", "ratio" if name.startswith("link") else "s", [each[name] for each in versions])
        for way, versions in figures.items()
        for name in versions[0]
    ]
    for result in results:
        print(result)
    details = {name: getattr(options, name) for name in ("mbit", "ms", "sites", "tensors", "versions", "rounds")}
    save_record(measurement, options.out, "forwarding", results, details)


def main() -> None:
    """Measure, in namespaces of its own."""
    options = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--versions", type=int, default=3, help="in a round, after the first")
    options.add_argument("--tensors", type=int, default=16, help="of 2 MiB each")
    options.add_argument("--sites", type=int, default=2)
    options.add_argument("--ms", type=float, default=20.0, help="there and back")
    options.add_argument("--mbit", type=float, default=200.0)
    options.add_argument("--out", type=Path, default=RECORDS)
    options.add_argument("--link", type=int, nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--at", help=argparse.SUPPRESS)
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.link:
        serve_link(chosen)
    elif chosen.inside:
        measure(chosen)
    elif why := why_not():
        sys.exit(f"sites need network namespaces: {why}")
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        inside(MODULE, "--inside", *sys.argv[1:], timeout_s=chosen.rounds * RUN_S)


if __name__ == "__main__":
    main()
