"""``python -m tests.fuzz``: typed requests with extreme values against a durable server that is killed every 700 of
them, attacks on the bulk port, a million mutated frames against the decoders, and garbage against a server that
runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import transferqueue as tq
from tests.client.deployments import served
from tests.client.test_keyed import Keyed
from tests.fuzz import bulk_port, decoder, live
from transferqueue.limits import MIB

GROWN_MAX = 10 * MIB


def main() -> int:
    """Run and print; 1 if anything changed or grew. A frame that breaks a decoder is shown with its traceback."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--frames", type=int, default=1_000_000, help="for the decoders")
    options.add_argument("--live", type=int, default=40_000, help="for the server")
    options.add_argument("--connections", type=int, default=4_000, help="raw ones to the server")
    options.add_argument(
        "--messages", type=int, default=60_000, help="typed ones, over all seeds, to a server that is killed"
    )
    options.add_argument(
        "--seeds", type=int, default=6, help="of those messages, from --seed on; each in a process of its own"
    )
    options.add_argument("--at-once", type=int, default=2, help="so many of these processes at a time")
    options.add_argument("--attacks", type=int, default=2_000, help="on the bulk port, over each carrier")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    good = [fuzz_lives(given.messages, given.seeds, given.seed, given.at_once)] if given.messages else []
    good += [fuzz_bulk(given.attacks, given.seed)] if given.attacks else []
    good += [fuzz_frames(given)] if given.frames or given.live else []
    return int(not all(good))


def fuzz_bulk(attacks: int, seed: int) -> bool:
    """Attacks on the bulk port, over plain streams and over encrypted connections. Whether memory stood still; else it
    raises."""
    with tempfile.TemporaryDirectory() as found:
        directory = Path(found)
        with served(directory / "run", "256MiB") as server:
            plain = _attacked(server.tcp, server.process.pid, attacks, seed)
        keyed = Keyed(directory)
        try:
            token = keyed.token("admin")
            encrypted = _attacked(token, keyed.process.pid, attacks, seed + 1)
        finally:
            keyed.stop()
    for name, report in (("plain", plain), ("encrypted", encrypted)):
        print(f"bulk port, {name}: {report.attacks:,} attacks in {report.seconds:.1f} s, "
              f"{report.honest} honest rows there and back as they were; "
              f"memory {report.grown_bytes / MIB:+.1f} MiB")  # fmt: skip
    return max(plain.grown_bytes, encrypted.grown_bytes) < bulk_port.GROWN_MAX


def _attacked(address: str, pid: int, attacks: int, seed: int) -> bulk_port.Report:
    with tq.connect(address, data="remote") as honest, tq.connect(address, data="remote") as hostile:
        return bulk_port.run(honest, hostile, pid, attacks=attacks, seed=seed)


def fuzz_lives(messages: int, seeds: int, first: int, at_once: int) -> bool:
    """Typed messages over so many seeds, the last of them against a server of durability disk. Whether nothing
    broke."""
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        jobs = [
            (seed, -(-messages // seeds), "disk" if seed == first + seeds - 1 else "process")
            for seed in range(first, first + seeds)
        ]
        codes = list(threads.map(lambda job: _fuzz_one(*job), jobs))
    print(f"typed: {sum(job[1] for job in jobs):,} messages over {seeds} seeds in {time.perf_counter() - started:.0f} "
          f"s: {codes.count(0)} seeds whole, {len(codes) - codes.count(0)} broken")  # fmt: skip
    return not any(codes)


def _fuzz_one(seed: int, messages: int, level: str) -> int:
    """A process of its own: it forks servers, which a process with threads must not."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.lives",
            directory,
            "--messages",
            str(messages),
            "--seed",
            str(seed),
            "--level",
            level,
        ]
        return subprocess.run(command, check=False).returncode


def fuzz_frames(given: argparse.Namespace) -> bool:
    """Mutated frames. Whether nothing changed or grew."""
    decoded = decoder.run(given.frames, given.seed)
    kept = sum(decoded.messages.values())
    print(f"seed {given.seed}: {decoded.frames:,} frames in {decoded.seconds:.1f} s: {decoded.refused:,} refused, "
          f"{kept:,} still a message, of {len(decoded.messages)} types; memory "
          f"{decoded.grown_bytes / MIB:+.1f} MiB")  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,
        served(Path(directory) / "run") as server,
        tq.connect(server.ipc) as queue,
    ):
        found = fuzz_server(queue, server, given.live, given.connections, given.seed)
    same = "unchanged" if found.before == found.after else f"CHANGED: {found.before} -> {found.after}"
    print(f"server: {found.frames:,} frames and {found.connections:,} raw connections over ipc and tcp in "
          f"{found.seconds:.1f} s: state {same}; memory {found.grown_bytes / MIB:+.1f} MiB")  # fmt: skip
    return found.before == found.after and max(found.grown_bytes, decoded.grown_bytes) <= GROWN_MAX


def fuzz_server(queue, server, frames, connections, seed):
    """A table with rows in every state, then the garbage."""
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
    table.put(x=[[1, 2], [3]], y=[1.0, 2.0])
    held = table.lease("train", rows=1, timeout_s=20)
    addresses = [server.ipc, server.tcp]
    found = live.run(queue, addresses, server.process.pid, frames=frames, connections=connections, seed=seed)
    held.ack()
    return found


if __name__ == "__main__":
    sys.exit(main())
