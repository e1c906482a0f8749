"""A pipeline without reinforcement learning: documents are embedded by several processes and near-duplicates are
dropped.

    python examples/dedup_documents.py [--documents 2000] [--embedders 2]

Shows: stages that are joined by nothing but the columns they need and give, a stage that runs in several processes, a
stage that needs order and so runs in one, rows that end early with a reason (`drop`), and the account that adds up:
documents put = kept + dropped as duplicates.

    put text ──▶ embed (N processes) ──▶ dedup (1 process) ──▶ write (this process)
                 text -> embedding       embedding -> nearest   text, nearest

An embedding is the normalised count of hashed word pairs, so that similar texts have similar embeddings: put a real
model in its place. Where the pages of a corpus do not fit in memory, `Limits` makes `put` wait for the stages.
"""

import argparse
import itertools
import multiprocessing
import threading
import zlib

import numpy as np

import transferqueue as tq

DIMENSIONS = 256
DUPLICATE = 0.9  # cosine similarity from which a document is a duplicate
BATCH = 64
WORDS = [f"word{number}" for number in range(18)]


def corpus(documents: int, duplicates: float = 0.25, seed: int = 0) -> list[str]:
    """Random texts; a share of them repeat an earlier one with one word changed."""
    draw = np.random.default_rng(seed)
    texts: list[str] = []
    for _ in range(documents):
        if texts and draw.random() < duplicates:
            words = texts[draw.integers(len(texts))].split()
            words[draw.integers(len(words))] = "changed"
        else:
            words = list(draw.choice(WORDS, draw.integers(80, 160)))
        texts.append(" ".join(words))
    return texts


def embedding(text: str) -> np.ndarray:
    """Hashed word pairs, counted: float32 [DIMENSIONS], of length 1."""
    words = text.split()
    hashes = [zlib.crc32(f"{a} {b}".encode()) % DIMENSIONS for a, b in itertools.pairwise(words)]
    counts = np.bincount(hashes, minlength=DIMENSIONS).astype(np.float32)
    return counts / np.linalg.norm(counts)


# ---------------------------------------------------------------- the stages


def feed(table: tq.Table, texts: list[str]) -> None:
    """Waits while the table is full, that is while 1,024 documents are on their way."""
    for start in range(0, len(texts), BATCH):
        table.put(text=texts[start : start + BATCH])
    table.seal()  # the stages drain what is there, and end


def embed(address: str) -> None:
    """Any number of processes: whoever is free takes the next documents."""
    with tq.connect(address, label="embed") as queue:
        for batch in queue.table("documents").leases("embed", rows=BATCH, at_least=1):
            with batch:
                batch.ack(embedding=np.stack([embedding(text) for text in batch["text"].list()]))


def dedup(address: str) -> None:
    """One process: it keeps the embeddings of all documents that were kept, and drops what is close to one of them."""
    kept = np.zeros((0, DIMENSIONS), np.float32)
    with tq.connect(address, label="dedup") as queue:
        for batch in queue.table("documents").leases("dedup", rows=BATCH, at_least=1):
            with batch:
                embeddings = batch["embedding"].numpy()
                fresh, nearest = [], []
                for at, vector in enumerate(embeddings):
                    similarity = float(max(kept @ vector, default=0.0))
                    if similarity >= DUPLICATE:
                        continue
                    fresh.append(at)
                    nearest.append(similarity)
                    kept = np.vstack([kept, vector])
                duplicates = np.delete(batch.rows, fresh)
                if len(duplicates):
                    batch.drop("duplicate", duplicates)
                if fresh:
                    batch.ack(batch.rows[fresh], nearest=nearest)


def write(table: tq.Table) -> list[str]:
    """What is left, as it comes."""
    written = []
    for batch in table.leases("write", rows=BATCH, at_least=1):
        with batch:
            written += batch["text"].list()
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--embedders", type=int, default=2)
    options = parser.parse_args()
    texts = corpus(options.documents)
    with tq.connect("embedded") as queue:
        table = queue.create_table(
            "documents",
            tasks=[
                tq.Task("embed", needs=["text"], gives=["embedding"]),
                tq.Task("dedup", needs=["embedding"], gives=["nearest"]),
                tq.Task("write", needs=["text", "nearest"]),
            ],
            limits=tq.Limits(rows=1024),
        )
        spawn = multiprocessing.get_context("spawn")
        stages = [embed] * options.embedders + [dedup]
        processes = [spawn.Process(target=stage, args=(queue.address,), daemon=True) for stage in stages]
        for process in processes:
            process.start()
        feeder = threading.Thread(target=feed, args=(table, texts))
        feeder.start()
        written = write(table)
        feeder.join()
        for process in processes:
            process.join()
        counts = table.audit()
    print(f"documents put {counts.rows_put}, written {len(written)}, dropped {counts.dropped}")
    print(f"rows done {counts.rows_done}, live {counts.rows_live}, balanced {counts.balanced}")


if __name__ == "__main__":
    main()
