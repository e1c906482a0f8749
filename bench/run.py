"""Everything, in one run on one machine: each scenario of each contender in a process tree of its own, with a record of
its own.

    python -m bench.run [--quick] [--only transfer latency] [--peers .venv-peers/bin/python] [--out FOLDER]

`make bench` and `make bench-quick` call this. Records go to a folder of `bench/records/`, all samples to one of
`bench/raw/`. A peer that cannot run here is kept in the record as skipped, with the reason; if one of our own scenarios
fails, the run fails, after the rest has been measured and saved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness import ROOT, Result, load_results
from bench.measurement_record import Measurement, commit_in_use
from bench.namespaces import why_not
from bench.run_record import RAW, RECORDS, save_job

OURS = "transferqueue"
LAST_LINES = 12

BESIDE_REDIS = ("requests", "busy")

_FIELDS = ["dense_1", "dense_8", "dense_32", "ragged_32"]
_MORE_FIELDS = ["dense_128", "ragged_1", "ragged_8", "ragged_128"]
_OTHERS = ["ragged_bf16", "tokens", "two_of_32", "random_dense", "random_ragged", "text", "images", "shared_prompt"]
_SIZES = [f"size_{size}KiB" for size in (256, 1024, 4096, 16384, 65536)]
_LARGE = ["size_262144KiB", "size_1048576KiB"]


@dataclass(frozen=True)
class Job:
    """One scenario of one contender: `python -m module arguments`, with the peers' interpreter or ours."""

    scenario: str
    contender: str
    module: str
    arguments: tuple[str, ...]
    peer: bool = False
    limit_s: float = 240


def _transfer(
    contender: str, workloads: list[str], repetitions: int, budget_s: float, peer: bool = True, through: bool = True
) -> Job:
    bounds = ["--repetitions", str(repetitions), "--budget-s", str(budget_s), *([] if through else ["--no-through"])]
    return Job("transfer", contender, "bench.transfer", (contender, *workloads, *bounds), peer, limit_s=420)


def _latency(contender: str, pairs: list[int], rows: int, rate: float, peer: bool = True) -> Job:
    counts = [str(count) for count in pairs]
    arguments = (contender, "--pairs", *counts, "--rows", str(rows), "--rate", str(rate))
    return Job("latency", contender, "bench.latency", arguments, peer)


def _lease_cost(contender: str, resident: list[int], peer: bool, repetitions: int = 40) -> Job:
    levels = [str(rows) for rows in resident]
    arguments = (contender, "--resident", *levels, "--repetitions", str(repetitions))
    return Job("lease_cost", contender, "bench.lease_cost", arguments, peer, limit_s=420)


def _control_plane(seconds: float) -> list[Job]:
    """What requests cost, beside Redis, and how soon a thousand clients are served. seconds: of the thousand."""
    busy = ("--clients", "16", "--rows", "1", "--seconds", "2", "--pin", "--redis")
    return [
        Job("requests", OURS, "bench.requests", ()),
        Job("busy", OURS, "bench.busy", busy),
        Job("sessions", OURS, "bench.sessions", ("--seconds", str(seconds)), limit_s=420),
    ]


def quick() -> list[Job]:
    """What the table of required figures needs, and little more: minutes."""
    peers = [_transfer(name, _FIELDS, 3, 1.0, through=name == "mp-queue") for name in ("mp-queue", "redis", "ray")]
    return [
        Job("limits", "limits", "bench.limits", ()),
        _transfer(OURS, [*_FIELDS, *_MORE_FIELDS, *_OTHERS], 9, 0.8, peer=False),
        _latency(OURS, [1, 8], 500, 250, peer=False),
        Job("ping_pong", OURS, "bench.ping_pong", ()),
        *_control_plane(seconds=20),
        _lease_cost(OURS, [1000, 10_000, 200_000, 1_000_000], peer=False),
        Job("memory", OURS, "bench.memory", ("--rows", "200000")),
        Job("wire", OURS, "bench.wire", ()),
        Job("remote", OURS, "bench.remote", ()),
        Job("hosts", OURS, "bench.hosts", ("--turns", "7"), limit_s=420),
        _transfer("incumbent", _FIELDS, 3, 1.0, through=False),
        _lease_cost("incumbent", [1000, 200_000], peer=True, repetitions=10),
        *peers,
        _latency("mp-queue", [1], 300, 250),
        _latency("redis", [1], 300, 250),
    ]


def full() -> list[Job]:
    """Every scenario, every contender, every workload that it can carry."""
    peers = ("mp-queue", "redis", "ray")
    every = [*_FIELDS, *_MORE_FIELDS, *_OTHERS]
    return [
        Job("limits", "limits", "bench.limits", ("--largest", str(1 << 30))),
        _transfer(OURS, [*every, *_SIZES, *_LARGE], 15, 4.0, peer=False),
        _latency(OURS, [1, 4, 16, 64], 1000, 250, peer=False),
        Job("ping_pong", OURS, "bench.ping_pong", ()),
        *_control_plane(seconds=200),
        _lease_cost(OURS, [1000, 10_000, 50_000, 200_000, 1_000_000, 10_000_000], peer=False),
        Job("memory", OURS, "bench.memory", ("--rows", "1000000")),
        Job("wire", OURS, "bench.wire", ()),
        Job("remote", OURS, "bench.remote", ()),
        Job("hosts", OURS, "bench.hosts", ("--turns", "7"), limit_s=420),
        Job("weight_relay", OURS, "bench.weight_relay", ()),
        Job("durability", OURS, "bench.durability", ()),
        Job("idle", OURS, "bench.idle", ()),
        Job("micro", OURS, "bench.micro", ()),
        _transfer("incumbent", [*every, *_SIZES], 5, 4.0),
        _transfer("incumbent-ray-store", _FIELDS, 3, 2.0),
        _lease_cost("incumbent", [1000, 10_000, 50_000, 200_000], peer=True),
        _latency("incumbent", [1], 100, 5),
        *[_transfer(name, [*every, *_SIZES], 7, 2.0) for name in peers],
        _latency("mp-queue", [1, 4], 500, 250),
        _latency("redis", [1, 4, 16, 64], 1000, 250),
        _latency("ray", [1], 300, 50),
    ]


# ---------------------------------------------------------------- running them


def unavailable(job: Job, peers: Path) -> str:
    """Why a job cannot run on this machine, or "" if it can."""
    if job.peer and not peers.exists():
        return f"no environment for peers at {peers}; `make bench` creates it"
    if (job.contender == "redis" or job.scenario in BESIDE_REDIS) and not shutil.which("redis-server"):
        return "no redis-server on this machine"
    if job.scenario == "hosts" and (reason := why_not()):
        return f"no network namespaces here: {reason}"
    return ""


def run_job(job: Job, peers: Path, folder: Path) -> tuple[dict[str, str], list[Result], str]:
    """Versions, results and what went wrong ("": nothing)."""
    out = folder / f"{job.scenario}-{job.contender}.json"
    python = str(peers if job.peer else Path(sys.executable))
    command = [python, "-W", "ignore", "-m", job.module, *job.arguments, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    with (folder / f"{job.scenario}-{job.contender}.log").open("w+") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=job.limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return {}, [], f"still running after {job.limit_s:.0f} s"
        log.seek(0)
        tail = "".join(log.readlines()[-LAST_LINES:])
    if code or not out.exists():
        return {}, [], f"exit code {code}: {tail.strip()}"
    return *load_results(out), ""


def _say(job: Job, seconds: float, results: list[Result], why: str) -> None:
    outcome = f"not measured: {why}" if why else f"{len(results)} results"
    print(f"  {job.scenario:<12}{job.contender:<22}{seconds:6.1f} s  {outcome}", flush=True)


def run_all(jobs: list[Job], peers: Path, records: Path, raw: Path) -> list[str]:
    """Run all jobs, and write their records and samples to the two folders; returns which of our own scenarios
    failed."""
    raw.mkdir(parents=True, exist_ok=True)
    failed = []
    for job in jobs:
        began, started = Measurement(), time.perf_counter()
        versions, results, why = {}, [], unavailable(job, peers)
        if not why:
            versions, results, why = run_job(job, peers, raw)
        if why:
            results = [Result(job.scenario, job.contender, "all", "all", "s", [], skipped=why)]
            failed += [] if job.peer else [f"{job.scenario}: {why}"]
        broken = [result for result in results if result.skipped.startswith("failed") and not job.peer]
        failed += [f"{result.scenario} {result.workload}: {result.skipped}" for result in broken]
        save_job(records, job.contender, began, versions, results)
        _say(job, time.perf_counter() - started, results, why)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks and write their records.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], help="scenarios or contenders")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument("--out", type=Path, help="folder of the records; default: a new one in bench/records")
    chosen = parser.parse_args()
    jobs = quick() if chosen.quick else full()
    if chosen.only:
        jobs = [job for job in jobs if {job.scenario, job.contender} & set(chosen.only)]
    name = f"{Measurement().start:%Y%m%d-%H%M%S}-{commit_in_use()[:9]}"
    folder = chosen.out or RECORDS / name
    failed = run_all(jobs, chosen.peers, folder, RAW / name)
    print(folder)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
