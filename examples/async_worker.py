"""A worker in an event loop: it keeps many requests to a slow service in flight, and acks each row when its answer is
there.

    python examples/async_worker.py [--rows 200] [--in-flight 32]

Shows: the asynchronous interface (`aconnect`), many small leases of one process at a time, rows that are finished in
another order than they were leased, a request that fails and comes again, and a second worker in the same loop.

The slow service is a server on this machine that answers after a random time and fails now and then: put an inference
endpoint or a sandbox in its place.
"""

import argparse
import asyncio
import random
from collections import Counter

import transferqueue as tq

FAILURES = 0.1


class SlowService:
    """Stands for a service elsewhere. It counts what it answered, and the most requests that it had at a time."""

    def __init__(self) -> None:
        self.draw, self.now, self.most, self.failed = random.Random(0), 0, 0, 0

    async def __call__(self, text: str) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.draw.uniform(0.01, 0.05))
            if self.draw.random() < FAILURES:
                self.failed += 1
                raise ConnectionError("the service was overloaded")
            return len(text)
        finally:
            self.now -= 1


async def worker(name: str, table: tq.AsyncTable, service: SlowService, in_flight: int) -> Counter[str]:
    """Lease single rows, `in_flight` of them at a time, until the table is sealed and drained."""
    finished: Counter[str] = Counter()

    async def serve() -> None:
        async for batch in table.leases("measure", rows=1):
            try:
                async with batch:  # an exception gives the row back, as failed: it comes again
                    await batch.ack(length=[await service(batch["text"].list()[0])])
                    finished[name] += 1
            except ConnectionError:
                finished["came again"] += 1

    await asyncio.gather(*(serve() for _ in range(in_flight)))
    return finished


async def run(rows: int, in_flight: int) -> None:
    service = SlowService()
    async with tq.aconnect("embedded") as queue:
        table = await queue.create_table(
            "texts",
            tasks=[tq.Task("measure", needs=["text"], gives=["length"])],  # 0: tried until it is done
            retention=tq.Manual(),
        )
        workers = [asyncio.create_task(worker(f"worker-{n}", table, service, in_flight // 2)) for n in range(2)]
        for number in range(rows):
            await table.put(text=["x" * number], key=f"text-{number}")
        await table.seal()
        finished = sum(await asyncio.gather(*workers), Counter())
        read = await table.read(fields=["length"])
        right = sorted(read["length"].list()) == list(range(rows))
        counts = await table.audit()
    print(f"requests in flight at most {service.most}, failed {service.failed}; {dict(finished)}")
    print(f"rows put {counts.rows_put}, done {counts.rows_done}, dropped {counts.rows_dropped}, all right: {right}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=32)
    options = parser.parse_args()
    asyncio.run(run(options.rows, options.in_flight))


if __name__ == "__main__":
    main()
