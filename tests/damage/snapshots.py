"""Mutated snapshots: restored, refused as `Corruption`, never silently other values, never the end of the process.

Two kinds of mutation. *Bytes* changes files as a disk or a careless copy does, and leaves the checksums as they are:
the restore gives `Corruption`, or exactly what was in the queue. *Values* changes what the files say, and computes
every checksum anew, as somebody does who wants to harm: the restore gives `Corruption`, or a queue whose books balance,
of which every column can be read, and which can be worked with. After a refusal ledger and memory are as they were.

The mutations are done in forked workers, one after the other. A worker that dies is counted and followed by the next.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

HANGS_S: Final = 60.0
"""A worker that says nothing for this long is ended, and counted as one that hung."""
SHOWN_MAX: Final = 20
NAMES: Final = ("flow", "plain", "empty")

# ---------------------------------------------------------------- the originals


def make_originals(root: Path) -> None:
    """Small snapshots of everything that a queue can hold. Needs a server, so call it in a process of its own."""
    os.environ["TRANSFERQUEUE_SNAPSHOTS"] = str(root)
    import numpy as np

    import transferqueue as tq
    from transferqueue.policies import DeliverPartial, KeepStale, Manual, Refill

    with tq.connect() as queue:
        queue.snapshot("empty")
        queue.weights("actor").publish(3, {"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(3, np.float32)})
        queue.weights("actor").publish(4, {"w": np.ones((2, 3)), "b": np.ones(3, np.float32)})
        flow = queue.create_table(
            "flow",
            tasks=[
                tq.Task("reward", needs=["text"], gives=["score", "trace"]),
                tq.Task("train", needs=["text", "score"], groups=tq.Complete(incomplete=Refill(), deadline_s=900.0)),
                tq.Task("judge", needs=["score"], groups=tq.Complete(min_size=1, incomplete=DeliverPartial())),
            ],
            pacing=tq.Pacing("train", batch_rows=4, depth=3, max_staleness=5, on_stale=KeepStale()),
            fields=[tq.Field("image", "float32", (None, None))],
            extra_fields=True,
        )
        for group in range(4):
            size = 3 if group < 3 else 4
            flow.put(
                text=[f"grüße {group}/{n}" for n in range(3)],
                ids=[np.arange(n + group) for n in range(3)],
                prompt=tq.Repeat([[1, 2, group]], 3),
                image=[np.full((n, group + 1), n, np.float32) for n in range(3)],
                dense=np.ones((3, 2, 2), np.int16),
                group_id=group, group_size=size, policy_version=group, ordinal=[group] * 3,
                key=[f"k{group}-{n}" for n in range(3)], tags=[{"n": n, "of": "x"} for n in range(3)],
                priority=float(group),
            )  # fmt: skip
        with flow.lease("reward", rows=7) as batch:
            batch.ack(score=np.arange(7.0), trace=[{"why": [n, None, "x"]} for n in range(7)])
        with flow.lease("train", groups=1) as batch:
            batch.ack(step=5)
        flow.lease("judge", groups=1)
        flow.drop([11], "unwanted")
        plain = queue.create_table("plain", tasks=[tq.Task("a"), tq.Task("b", needs=["late"])], retention=Manual())
        plain.put(
            flag=[True, False, True], phase=np.array([1 + 2j, 0, 3], np.complex64), raw=[b"\0", b"", b"abc"],
            count=np.arange(3, dtype=np.uint8), half=np.ones(3, np.float16), ordinal=[5, 7, 8],
        )  # fmt: skip
        with plain.lease("a", rows=1) as batch:
            batch.ack()
        with plain.lease("a", rows=1) as batch:
            batch.ack(late=[[1, 2]], step=3)
        plain.seal()
        queue.snapshot("flow")
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        table.put(x=[1.0, 2.0], y=["a", "b"])
        queue.snapshot("plain")


# ---------------------------------------------------------------- mutations

EXTREMES: Final = tuple(
    sign * (1 << power) + more
    for power in (0, 7, 8, 15, 31, 32, 40, 53, 62, 63, 64)
    for sign in (1, -1)
    for more in (-1, 0, 1)
)
TEXTS: Final = (
    "",
    "../../../../etc/passwd",
    "/etc/passwd",
    "tables/0",
    "tables/0/rows.arrow",
    "\0",
    "x" * 5000,
    "ä" * 40,
    "live",
    "t",
)


class Mutator:
    """One mutation of the snapshot in `directory`, chosen by `dice`; `what` says which."""

    def __init__(self, directory: Path, dice: random.Random) -> None:
        self.directory, self.dice, self.what = directory, dice, ""
        self.files = sorted(one for one in directory.rglob("*") if one.is_file())
        self.arrows = [one for one in self.files if one.suffix == ".arrow"]

    def bytes(self) -> None:
        """Change files and no checksum."""
        kinds = [self._flip] * 6 + [
            self._cut,
            self._extend,
            self._remove,
            self._swap,
            self._link,
            self._pipe,
            self._zero,
        ]
        self._do(kinds)

    def values(self) -> None:
        """Change what the files say, and all checksums."""
        kinds: list[Callable[[], None]] = [self._manifest] * 5
        if self.arrows:
            kinds += [self._word] * 6 + [self._anywhere] * 2 + [self._columns] * 3 + [self._rows, self._traded]
        self._do(kinds)
        self._seal()

    def _do(self, kinds: list[Callable[[], None]]) -> None:
        chosen = self.dice.choice(kinds)
        self.what = chosen.__name__
        chosen()

    def _told(self, **what: object) -> None:
        self.what += f" {what}"

    # -- bytes

    def _file(self) -> Path:
        file = self.dice.choice(self.files)
        self._told(file=str(file.relative_to(self.directory)))
        return file

    def _flip(self) -> None:
        file = self._file()
        data = bytearray(file.read_bytes())
        at = self.dice.randrange(len(data))
        data[at] ^= 1 << self.dice.randrange(8)
        file.write_bytes(data)
        self._told(at=at)

    def _cut(self) -> None:
        file = self._file()
        os.truncate(file, self.dice.choice([0, file.stat().st_size // 2, file.stat().st_size - 1]))

    def _extend(self) -> None:
        with self._file().open("ab") as file:
            file.write(bytes(self.dice.choice([1, 8, 4096])))

    def _zero(self) -> None:
        file = self._file()
        data = bytearray(file.read_bytes())
        at = self.dice.randrange(len(data))
        data[at : at + 64] = bytes(len(data[at : at + 64]))
        file.write_bytes(data)

    def _remove(self) -> None:
        self._file().unlink()

    def _swap(self) -> None:
        one, other = self._file(), self._file()
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)

    def _link(self) -> None:
        file = self._file()
        elsewhere = self.directory.parent / "elsewhere"
        file.rename(elsewhere)
        file.symlink_to(elsewhere)

    def _pipe(self) -> None:
        file = self._file()
        file.unlink()
        os.mkfifo(file)

    # -- values

    def _arrow(self) -> Path:
        file = self.dice.choice(self.arrows)
        self._told(file=str(file.relative_to(self.directory)))
        return file

    def _word(self) -> None:
        """One number of one buffer of one column."""
        import pyarrow as pa

        file = self._arrow()
        data = bytearray(file.read_bytes())
        source = pa.py_buffer(bytes(data))
        spans: list[tuple[int, int]] = []
        reader = pa.ipc.open_file(source)
        for batch in (reader.get_batch(at) for at in range(reader.num_record_batches)):
            for column in batch.columns:
                spans += [
                    (one.address - source.address, one.size) for one in _buffers(column) if one is not None and one.size
                ]
        inside = [(at, size) for at, size in spans if at >= 0 and at + size <= len(data)]
        if not inside:
            return
        at, size = self.dice.choice(inside)
        width = self.dice.choice([wide for wide in (1, 4, 8) if wide <= size])
        at += width * self.dice.randrange(size // width)
        old = int.from_bytes(data[at : at + width], "little")
        new = self.dice.choice([*EXTREMES, old + 1, old - 1, old + self.dice.randrange(1 << 20)]) % (1 << 8 * width)
        data[at : at + width] = new.to_bytes(width, "little")
        file.write_bytes(data)
        self._told(at=at, width=width, old=old, new=new)

    def _anywhere(self) -> None:
        """Any bytes of a file, its metadata too."""
        file = self._arrow()
        data = bytearray(file.read_bytes())
        for _ in range(self.dice.choice([1, 1, 2, 8])):
            width = self.dice.choice([1, 2, 4, 8])
            at = self.dice.randrange(max(1, len(data) - width)) // width * width
            data[at : at + width] = (self.dice.choice(EXTREMES) % (1 << 8 * width)).to_bytes(width, "little")
        file.write_bytes(data)

    def _columns(self) -> None:
        """A column is gone, twice there, renamed, of another type, or changed with another."""
        import pyarrow as pa

        file = self._arrow()
        table = _read(file)
        if not table.num_columns:
            return
        names, columns = list(table.column_names), list(table.columns)
        at, other = self.dice.randrange(len(names)), self.dice.randrange(len(names))
        kind = self.dice.choice(["gone", "twice", "renamed", "cast", "exchanged", "nulls"])
        self._told(kind=kind, column=names[at], other=names[other])
        if kind == "gone":
            del names[at], columns[at]
        elif kind == "twice":
            names.append(names[at])
            columns.append(columns[at])
        elif kind == "renamed":
            names[at] = self.dice.choice([*TEXTS, names[other]])
        elif kind == "exchanged":
            columns[at], columns[other] = columns[other], columns[at]
        elif kind == "nulls":
            columns[at] = pa.chunked_array([pa.nulls(len(table), columns[at].type)])
        else:
            to = self.dice.choice(
                [
                    pa.int32(),
                    pa.int64(),
                    pa.uint64(),
                    pa.float64(),
                    pa.large_string(),
                    pa.large_binary(),
                    pa.string_view(),
                ]
            )
            try:
                columns[at] = columns[at].cast(to, safe=False)
            except (pa.ArrowException, ValueError):
                columns[at] = pa.chunked_array([pa.nulls(len(table), to)])
        _write(file, pa.table(columns, names=names), table.num_rows)

    def _rows(self) -> None:
        """Rows are gone, twice there, or in another order."""
        import pyarrow as pa

        file = self._arrow()
        table = _read(file)
        if not table.num_rows:
            return
        order = list(range(table.num_rows))
        at = self.dice.randrange(len(order))
        kind = self.dice.choice(["gone", "twice", "reversed", "all gone"])
        self._told(kind=kind)
        order = {"gone": order[:at] + order[at + 1 :], "twice": [*order, at], "reversed": order[::-1], "all gone": []}[
            kind
        ]
        _write(file, table.take(pa.array(order, pa.int64())), self.dice.choice([2, 1000]))

    def _traded(self) -> None:
        """Two files change places."""
        one, other = self._arrow(), self._arrow()
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)

    def _manifest(self) -> None:
        path = self.directory / "MANIFEST.json"
        tree = json.loads(path.read_bytes())
        leaves = list(_leaves(tree))
        holder, key = self.dice.choice(leaves)
        kind = self.dice.choice(["value"] * 6 + ["gone", "twice", "other", "more"])
        self._told(kind=kind, key=str(key), old=repr(holder[key])[:80])
        if kind == "gone":
            del holder[key]
        elif kind == "twice" and isinstance(holder, list):
            holder.append(holder[key])
        elif kind == "other":
            from_holder, from_key = self.dice.choice(leaves)
            holder[key] = json.loads(json.dumps(from_holder[from_key]))
        elif kind == "more" and isinstance(holder, dict):
            holder[self.dice.choice(TEXTS)] = holder[key]
        else:
            holder[key] = self._another(holder[key])
        self._told(new=repr(holder)[:200] if kind == "gone" else repr(holder[key])[:80])
        path.write_text(json.dumps(tree))

    def _another(self, value: Any) -> Any:
        if isinstance(value, bool) or value is None or self.dice.random() < 0.1:
            return self.dice.choice([None, True, False, [], {}, 0, "", 1e308, -0.5, *TEXTS])
        if isinstance(value, int | float):
            return self.dice.choice([*EXTREMES, value + 1, value - 1, 1e308, -1e308, 0.5, 1 << 200])
        return self.dice.choice([*TEXTS, str(value) + "x", str(value)[:-1]])

    def _seal(self) -> None:
        """Checksums and sizes of all files, and of the manifest, are those of what there is now."""
        import xxhash

        path = self.directory / "MANIFEST.json"
        tree = json.loads(path.read_bytes())
        files = tree.get("files") if isinstance(tree, dict) else None
        for name, entry in (files if isinstance(files, dict) else {}).items():
            file = self.directory / name if "\0" not in name and len(name) < 200 else self.directory
            if isinstance(entry, dict) and file in self.arrows and not self.what.startswith("_manifest"):
                data = file.read_bytes()
                entry |= {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
                if self.what.startswith(("_rows", "_traded")):
                    entry["rows"] = _read(file).num_rows
        data = json.dumps(tree).encode()
        path.write_bytes(data)
        (self.directory / "MANIFEST.xxh3").write_text(xxhash.xxh3_64_hexdigest(data))


def _leaves(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON tree: its holder, and key or index."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _leaves(tree[key])


def _buffers(column: Any) -> list[Any]:
    found = list(column.buffers())
    if hasattr(column, "dictionary"):
        found += column.dictionary.buffers()
    return found


def _read(file: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.py_buffer(file.read_bytes())).read_all()


def _write(file: Path, table: Any, chunk: int) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(str(file), table.schema) as out:
        for batch in table.combine_chunks().to_batches(max_chunksize=max(1, chunk)):
            out.write_batch(batch)


# ---------------------------------------------------------------- one damage


class Judge:
    """Does one mutation after the other on copies of the originals, and judges how each ended."""

    def __init__(self, root: Path) -> None:
        from tests.damage.restoring import Restorer

        self.root = root
        self.restorer = Restorer(root)
        self.digests = {}
        for name in NAMES:
            self.restorer.begin()
            error = self.restorer.restore(name)
            assert error is None, f"the original {name} is not restored: {error}"
            self.digests[name] = self.restorer.digest()
            self.restorer.use()

    def damage(self, seed: int) -> tuple[str, str]:
        """How it ended (beginning with "WRONG" if it must not), and what was done."""
        dice = random.Random(seed)
        name = dice.choice(NAMES[:2] if dice.random() < 0.95 else NAMES)
        copy = self.root / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.root / name / "000001", copy / "000001")
        mutator = Mutator(copy / "000001", dice)
        honest = dice.random() < 0.25
        (mutator.bytes if honest else mutator.values)()
        what = f"{name}: {mutator.what}"
        try:
            return self._judged(self.digests[name] if honest else ""), what
        except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
            return f"WRONG {type(error).__name__}: {error}", what

    def _judged(self, digest: str) -> str:
        from transferqueue.errors import Corruption, InternalError

        restorer = self.restorer
        restorer.begin()
        before = restorer.state()
        error = restorer.restore("copy")
        if error is None:
            found = restorer.digest()
            restorer.use()
            if digest and digest != found:
                return "WRONG silent: other values than before"
            return "as it was" if digest == found else "restored"
        if restorer.state() != before:
            return f"WRONG changed: refused, and ledger or memory differ: {error}"
        if isinstance(error, InternalError):
            return f"WRONG InternalError: {error}"
        if not isinstance(error, Corruption):
            return f"{type(error).__name__}: {error}"
        return "Corruption" if str(self.root) in str(error) else f"WRONG text: names no file: {error}"


ALLOWED: Final = ("as it was", "restored", "Corruption", "UsageError: snapshot", "NotFound: selector")
"""Ends that are not wrong: a format that this version does not read, and a selector that is not installed, are the
caller's."""


def wrong(end: str) -> bool:
    """Whether a damage may not end so."""
    return not end.startswith(ALLOWED)


# ---------------------------------------------------------------- workers


def _in_child(act: Callable[[], None]) -> int:
    """Run it in a forked process."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        act()
    except BaseException as error:  # noqa: BLE001  (the child ends here)
        print(f"worker: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _work(root: Path, seeds: range, out: int) -> None:
    import logging

    logging.disable()
    judge = Judge(root)
    for seed in seeds:
        os.write(out, (json.dumps([seed]) + "\n").encode())
        end, what = judge.damage(seed)
        os.write(out, (json.dumps([seed, end[:2000], what[:1000]]) + "\n").encode())


def _followed(root: Path, seeds: range) -> Iterator[tuple[int, str, str]]:
    """(seed, end, what) of each, by one worker for as long as it lives."""
    read, write = os.pipe()
    child = _in_child(lambda: _work(root, seeds, write))
    os.close(write)
    begun, ended, left = None, None, b""
    hung = False
    while True:
        if not select.select([read], [], [], HANGS_S)[0]:
            hung = True
            os.kill(child, signal.SIGKILL)
        data = os.read(read, 1 << 16)
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            begun, *rest = json.loads(line)
            if rest:
                ended = begun
                yield begun, *rest
        if not data:
            break
    os.close(read)
    _, status = os.waitpid(child, 0)
    if status:
        at = seeds[0] if begun is None else begun
        how = (
            "hung"
            if hung
            else f"died: {signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status}"
        )
        if ended != at or begun is None:
            yield at, f"WRONG the worker {how}", "see --seed"


def run(count: int, seed: int) -> int:
    """So many damages; prints what they came to. Returns how many ended as none may."""
    started = time.monotonic()
    ends: Counter[str] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="damage-") as made:
        root = Path(made)
        _, status = os.waitpid(_in_child(lambda: make_originals(root)), 0)
        if status:
            raise SystemExit("the originals cannot be made")
        at, end_at = seed, seed + count
        while at < end_at:
            for number, end, what in _followed(root, range(at, end_at)):
                at = number + 1
                ends[end.split(":")[0] if not wrong(end) else "WRONG"] += 1
                if wrong(end):
                    failures += 1
                    if failures <= SHOWN_MAX:
                        print(f"seed {number}: {end}\n    {what}", flush=True)
    kinds = ", ".join(f"{number:,} {end}" for end, number in ends.most_common())
    print(f"{count:,} mutated snapshots in {time.monotonic() - started:.0f} s: {kinds}")
    return failures
