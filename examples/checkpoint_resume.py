"""Training that is killed and goes on: a checkpoint of the model, a snapshot of the queue, and the step that joins
them.

    python examples/checkpoint_resume.py [--steps 20] [--dies-at 11]

Shows: acks that carry the step (`ack(step=k)`), rows that stay until the model of their step is saved (`checkpointed`),
snapshots that are taken while a producer goes on, a restore into a new deployment, and `rollback`, which gives out
again the rows that were trained after the model was saved.

The job runs twice: once without a break, and once killed (SIGKILL) at a step and started again. Both train on the same
rows in the same order, so both end with the same weights, to the bit. The model is linear regression in numpy.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from pathlib import Path

import numpy as np

import transferqueue as tq

BATCH, FEATURES, RATE = 32, 8, 0.05
SNAPSHOT_EVERY, MODEL_EVERY = 2, 6  # steps; the latter is a multiple of the former
ROWS_MAX = (2 + MODEL_EVERY) * BATCH  # rows on their way, and those of the steps since the model was saved


def samples(first: int, last: int) -> dict[str, np.ndarray]:
    """Samples by number: the same number gives the same sample in any run."""
    x = np.stack([np.random.default_rng(number).standard_normal(FEATURES) for number in range(first, last)])
    return {"x": x, "y": x @ np.linspace(-1, 1, FEATURES)}


def produce(table: tq.Table, rows: int) -> None:
    """Put the samples that were not put yet; a put waits while the table is full."""
    for first in range(table.audit().rows_put, rows, BATCH):
        table.put(**samples(first, first + BATCH))
    with contextlib.suppress(tq.Sealed):  # it was, if the snapshot is that late
        table.seal()


def train(folder: Path, steps: int, dies_at: int | None) -> None:
    """Begin, or go on from the last checkpoint in `folder`; write the final weights there."""
    os.environ["TRANSFERQUEUE_SNAPSHOTS"] = str(folder)  # the embedded server writes snapshots here, and nowhere else
    with tq.connect("embedded") as queue:
        if (folder / "model.npz").exists():
            table, weights, done = resume(queue, folder)
        else:
            task = tq.Task("train", needs=["x", "y"])
            table = queue.create_table("samples", tasks=[task], limits=tq.Limits(rows=ROWS_MAX))
            weights, done = np.zeros(FEATURES), 0
        producer = threading.Thread(target=produce, args=(table, steps * BATCH))
        producer.start()
        for step, batch in enumerate(table.leases("train", rows=BATCH), done + 1):
            with batch:
                x, y = batch["x"].numpy(), batch["y"].numpy()
                weights -= RATE * x.T @ (x @ weights - y) / BATCH
                if step == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                batch.ack(step=step)  # trained, but kept until the model of this step is saved
            if step % SNAPSHOT_EVERY == 0:
                queue.snapshot("queue")
            if step % MODEL_EVERY == 0 or step == steps:
                save(folder, weights, step)
                table.checkpointed(step)  # rows up to this step are done now, and their memory is free
        producer.join()
        counts = table.audit()
    np.save(folder / "final.npy", weights)
    print(
        f"{folder.name}: rows put {counts.rows_put}, done {counts.rows_done}, live {counts.rows_live}",
        flush=True,
    )


def save(folder: Path, weights: np.ndarray, step: int) -> None:
    """Write the model under its name at once. The snapshot before it holds all rows since the model before this one."""
    np.savez(folder / "next.npz", weights=weights, step=step)
    (folder / "next.npz").replace(folder / "model.npz")


def resume(queue: tq.Queue, folder: Path) -> tuple[tq.Table, np.ndarray, int]:
    """Model and table, both as they were when the model was saved."""
    with np.load(folder / "model.npz") as model:
        weights, step = model["weights"], int(model["step"])
    queue.restore("queue")  # the newest snapshot: of that step, or of one after it
    table = queue.table("samples")
    again = table.rollback(step)
    print(f"{folder.name}: goes on after step {step}; {again} rows that were trained since come again", flush=True)
    return table, weights, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dies-at", type=int, default=11, help="after the first model is saved")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")

    def run(folder: Path, dies_at: int | None) -> int | None:
        folder.mkdir(exist_ok=True)
        process = spawn.Process(target=train, args=(folder, options.steps, dies_at))
        process.start()
        process.join()
        return process.exitcode

    with tempfile.TemporaryDirectory() as place:
        whole, broken = Path(place, "whole"), Path(place, "broken")
        codes = [run(whole, None), run(broken, options.dies_at), run(broken, None)]
        same = np.array_equal(np.load(whole / "final.npy"), np.load(broken / "final.npy"))
    print(f"exit codes {codes}; same weights: {same}")


if __name__ == "__main__":
    main()
