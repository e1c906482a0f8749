"""A real server of vLLM on the CPU, with the tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.engines.tiny import save, tokenizer
from transferqueue.adapters.vllm.server import SERVER_ARGUMENTS, SERVER_ENVIRONMENT

READY = "Application startup complete"
START_S = 240.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    **SERVER_ENVIRONMENT,
}


@contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback that no other process is given, though it takes a server half a minute to listen there: it is
    bound, and does not listen, so another socket that may reuse the address can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextmanager
def serve(directory: Path, *more: str) -> Iterator[str]:
    """Its URL, from when it is ready until left. more: further arguments; without any it computes prompts whole, and so
    takes seeds."""
    save(directory)
    tokenizer().save_pretrained(directory)
    sizes = ("--max-model-len", "256", "--max-num-seqs", "32")
    with serve_model(directory, *sizes, *(more or ("--no-enable-chunked-prefill",))) as url:
        yield url


@contextmanager
def serve_model(directory: Path, *more: str) -> Iterator[str]:
    """As `serve`, of the model that is in a directory already. more: further arguments."""
    with held_port() as port:
        yield from _serve(directory, port, more)


def _serve(directory: Path, port: int, more: Sequence[str]) -> Iterator[str]:
    arguments = (
        f"--model {directory} --served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager "
        f"--kv-cache-memory-bytes {64 << 20}"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *arguments.split(),
            *SERVER_ARGUMENTS,
            *more,
        ],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    ready = threading.Event()
    reading = threading.Thread(target=read, args=(process, said, ready))
    reading.start()
    try:
        assert ready.wait(START_S), "".join(said[-50:])
        end = time.monotonic() + START_S
        while not listens(port):  # it says that it is ready just before
            assert process.poll() is None, "".join(said[-50:])
            assert time.monotonic() < end, "".join(said[-50:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reading.join(30)
        assert process.stdout is not None
        process.stdout.close()


def listens(port: int) -> bool:
    """Whether something accepts connections on a port, after a moment to begin with it."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except ConnectionRefusedError:
        return threading.Event().wait(0.05)
    return True


def read(process: subprocess.Popen[str], said: list[str], ready: threading.Event) -> None:
    """Keep what it says, so that it never waits for a reader; tell when it is ready, or over."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if READY in line:
            ready.set()
    ready.set()
