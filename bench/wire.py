"""Scenario: how many bytes it takes to move the bytes of ragged rows.

    python -m bench.wire --out FILE

The client speaks to the server through a relay on loopback, which counts what passes in each direction. On one machine
the values themselves pass through the arena, not the relay, so the size of the block that holds them is added: what
another machine would be sent. `put/per_value_byte` and `get/per_value_byte` are the sums over the bytes of the values.
"""

from __future__ import annotations

import argparse
import socket
import threading
from pathlib import Path

import transferqueue as tq
from bench.contenders.tensors import flat_bytes, tensor
from bench.harness import Result, save_results
from bench.server import Server
from bench.workloads import WORKLOADS, columns, same

SCENARIO = "wire"
BUFFER_BYTES = 1 << 20


class Relay:
    """A port (by default any of loopback) that passes everything on to another, counting: `up` towards the server,
    `down` towards the client."""

    def __init__(self, target: str, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(at)
        self.address = f"tcp://{at[0]}:{self.listener.getsockname()[1]}"
        self.up = self.down = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            threading.Thread(target=self._pass, args=(client, server, "up"), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, "down"), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(BUFFER_BYTES):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        except OSError:
            return  # the other side went first
        finally:
            sink.close()

    def close(self) -> None:
        self.listener.close()


def run(name: str) -> list[Result]:
    workload = WORKLOADS[name]
    expected = columns(workload, 0)
    values = sum(flat.values.nbytes for flat in expected.values())
    server = Server(tcp=True)
    relay = Relay(server.tcp_address)
    try:
        with tq.connect(relay.address) as queue:
            table = queue.create_table("wire", tasks=[tq.Task("train", needs=workload.names)])
            before = relay.up
            table.put(**{field: tensor(flat) for field, flat in expected.items()})
            up, block, before = relay.up - before, table.stats().bytes, relay.down
            with table.lease("train", rows=workload.rows) as batch:
                down = relay.down - before
                if not all(same(flat, *flat_bytes(batch[field].nested())) for field, flat in expected.items()):
                    raise ValueError("the rows did not come back as they were put")
    finally:
        relay.close()
        server.stop()
    return [_result(name, "put", up, block, values), _result(name, "get", down, block, values)]


def _result(name: str, metric: str, passed: int, block: int, values: int) -> Result:
    moved = passed + (block if passed < values else 0)
    note = f"{passed} bytes of messages, {block} of blocks, {values} of values"
    return Result(
        SCENARIO, "transferqueue", name, f"{metric}_per_value_byte", "ratio", [moved / values], values, True, note
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="ragged_32")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    save_results(chosen.out, run(chosen.workload))


if __name__ == "__main__":
    main()
