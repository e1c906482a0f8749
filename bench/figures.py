"""The required figures, computed from the records of a run. Each is a ratio within that run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.run_record import RunRecord
from bench.workloads import DENSE, KIB, MIB

OURS, PEER = "transferqueue", "incumbent"
DENSE_FIELDS = ("dense_1", "dense_8", "dense_32")
EXTRA_BYTES = 150 * MIB


@dataclass(frozen=True)
class Figure:
    """One requirement: what, against what, what is required, what was measured.

    value None: not measured, `detail` says why. more: whether a larger value is better. bound: what the value is
    compared with. required, shown: the bound and the value for people.
    """

    work: str
    against: str
    required: str
    bound: float
    more: bool
    value: float | None
    shown: str = ""
    detail: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.more else self.value <= self.bound


def times(value: float) -> str:
    """A ratio for people: three digits."""
    return f"{value:,.0f} ×" if value >= 100 else f"{value:.3g} ×"


def at_least(work: str, against: str, bound: float, value: float | None, detail: str = "") -> Figure:
    return Figure(work, against, f"≥ {bound:g} ×", bound, True, value, "" if value is None else times(value), detail)


def at_most(work: str, against: str, bound: float, value: float | None, detail: str = "") -> Figure:
    return Figure(work, against, f"≤ {bound:g} ×", bound, False, value, "" if value is None else times(value), detail)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _memcpy(record: RunRecord) -> float | None:
    return record.median("limits", "memcpy", f"{DENSE // KIB}KiB", "copy")


def _ms(*seconds: float | None) -> str:
    return " / ".join("—" if value is None else f"{value * 1e3:.3g} ms" for value in seconds)


def _us(*seconds: float | None) -> str:
    return " / ".join("—" if value is None else f"{value * 1e6:.0f} µs" for value in seconds)


def _rates(*rates: float | None) -> str:
    return " / ".join("—" if value is None else f"{value:,.0f} a second" for value in rates)


def put_dense(record: RunRecord) -> Figure:
    put, copy = record.median("transfer", OURS, "dense_1", "put"), _memcpy(record)
    cold = record.median("limits", "memcpy", f"{DENSE // KIB}KiB", "copy_cold")
    detail = f"{_ms(put, copy)}; one memcpy after a pause, of what is in no cache {_ms(cold)}"
    return at_least("put, one dense 32 MiB field", "memcpy", 0.6, _ratio(copy, put), detail)


def get_dense(record: RunRecord) -> Figure:
    get, copy = record.median("transfer", OURS, "dense_1", "get"), _memcpy(record)
    read = record.median("transfer", OURS, "dense_1", "get_read")
    detail = f"{_ms(get, copy)}; with every byte read once {_ms(read)}"
    return at_least("get of the same, contiguous", "memcpy", 1.0, _ratio(copy, get), detail)


def against_peer(metric: str, workloads: tuple[str, ...], work: str, bound: float) -> Callable[[RunRecord], Figure]:
    """Least ratio of the peer's time to ours over some workloads."""

    def figure(record: RunRecord) -> Figure:
        pairs = [
            (record.median("transfer", OURS, name, metric), record.median("transfer", PEER, name, metric))
            for name in workloads
        ]
        ratios = [_ratio(peer, ours) for ours, peer in pairs]
        known = [ratio for ratio in ratios if ratio is not None]
        worst = min(known) if len(known) == len(ratios) else None
        shown = ", ".join(f"{name} {_ms(ours, peer)}" for name, (ours, peer) in zip(workloads, pairs, strict=True))
        return at_least(work, "TransferQueue 0.1.11", bound, worst, shown)

    return figure


def get_tcp(record: RunRecord) -> Figure:
    """By turns with the stream, in one scenario: loopback is faster at one moment than at the next."""
    ratio = record.median("remote", OURS, "dense_1", "get_of_stream")
    got, stream = (record.median("remote", *key) for key in ((OURS, "dense_1", "get"), ("raw", "dense_1", "stream")))
    return at_least("get over TCP loopback", "one raw TCP stream", 0.7, ratio, _ms(got, stream))


def lease_flat(record: RunRecord) -> Figure:
    few = record.median("lease_cost", OURS, "resident_1000", "lease_64")
    many = record.median("lease_cost", OURS, "resident_1000000", "lease_64")
    return at_most("lease of 64 rows at 10⁶ resident rows", "the same at 10³", 1.5, _ratio(many, few), _ms(many, few))


def lease_peer(record: RunRecord) -> Figure:
    ours = record.median("lease_cost", OURS, "resident_200000", "lease_64")
    peer = record.median("lease_cost", PEER, "resident_200000", "lease_64")
    work = "lease of 64 rows at 2·10⁵ resident rows"
    return at_least(work, "TransferQueue 0.1.11 get_meta", 50, _ratio(peer, ours), _ms(ours, peer))


def wake(record: RunRecord) -> Figure:
    trip = record.median("limits", "zmq", "64B", "round_trip")
    ours = record.median("ping_pong", OURS, "one_row", "put_to_delivered")
    work = "put → waiting lease returns, p50, back to back"
    return at_most(work, "ZeroMQ round trip, back to back", 10, _ratio(ours, trip), _ms(ours, trip))


def wake_redis(record: RunRecord) -> Figure:
    ours, theirs = (record.median("latency", name, "pairs_1", "put_to_delivered") for name in (OURS, "redis"))
    return at_most("the same, 250 rows a second", "Redis streams", 1, _ratio(ours, theirs), _ms(ours, theirs))


VERBS = ("put", "lease", "ack")


def request(metric: str, work: str, against: str, bound: float) -> Callable[[RunRecord], Figure]:
    """The largest ratio of ours to Redis' of three requests, of 1 and of 64 rows, measured by turns in one scenario."""

    def figure(record: RunRecord) -> Figure:
        pairs = [
            (
                verb,
                rows,
                *(record.median("requests", name, f"rows_{rows}", f"{verb}_{metric}") for name in (OURS, "redis")),
            )
            for rows in (1, 64)
            for verb in VERBS
        ]
        ratios = [_ratio(ours, theirs) for _, _, ours, theirs in pairs]
        known = [ratio for ratio in ratios if ratio is not None]
        shown = ", ".join(f"{verb} of {rows}: {_us(ours, theirs)}" for verb, rows, ours, theirs in pairs)
        return at_most(work, against, bound, max(known) if len(known) == len(ratios) else None, shown if known else "")

    return figure


def busy_redis(record: RunRecord) -> Figure:
    ours, theirs = (record.median("busy", name, "ipc_rows_1_clients_16", "requests") for name in (OURS, "redis"))
    detail = _rates(ours, theirs) if ours else ""
    return at_least("requests a second, 16 clients", "redis-server, 16 clients", 0.25, _ratio(ours, theirs), detail)


def many_clients(record: RunRecord) -> Figure:
    slow = record.median("sessions", OURS, "clients_1000_rate_500_memory", "put_to_delivered_p99")
    work = "put → delivered, p99, 1,000 clients, 500 rows a second"
    return Figure(work, "", "< 20 ms", 20e-3, False, slow, _ms(slow) if slow is not None else "")


def wake_paced(record: RunRecord) -> Figure:
    trip = record.median("limits", "zmq", "64B", "round_trip_paced")
    ours = record.median("latency", OURS, "pairs_1", "put_to_delivered")
    work = "the same, 250 rows a second"
    return at_most(work, "ZeroMQ round trip, 250 a second", 10, _ratio(ours, trip), _ms(ours, trip))


def wake_p99(record: RunRecord) -> Figure:
    slow = record.median("latency", OURS, "pairs_1", "put_to_delivered_p99")
    shown = _ms(slow) if slow is not None else ""
    return Figure("the same, p99", "", "< 5 ms", 5e-3, False, slow, shown)


def resident(record: RunRecord) -> Figure:
    taken = record.median("memory", OURS, "live", "resident")
    payload = record.median("memory", OURS, "live", "payload")
    work, required = "resident memory of the server", "≤ 1.3 × + 150 MiB"
    if taken is None or payload is None:
        return Figure(work, "live payload", required, 1.0, False, None)
    allowed = 1.3 * payload + EXTRA_BYTES
    detail = f"{taken / MIB:.0f} MiB for {payload / MIB:.0f} MiB"
    return Figure(work, "live payload", required, 1.0, False, taken / allowed, times(taken / payload), detail)


def wire(record: RunRecord) -> Figure:
    found = [record.median("wire", OURS, "ragged_32", f"{way}_per_value_byte") for way in ("put", "get")]
    known = [value for value in found if value is not None]
    detail = ", ".join(f"{way} {value:.3g}" for way, value in zip(("put", "get"), known, strict=False))
    return at_most("wire bytes of ragged rows", "bytes of the values", 1.05, max(known, default=None), detail)


def flat_fields(record: RunRecord) -> Figure:
    found = [record.median("transfer", OURS, f"dense_{count}", "get") for count in (1, 8, 32, 128)]
    read = [record.median("transfer", OURS, f"dense_{count}", "get_read") for count in (1, 8, 32, 128)]
    known = [value for value in found if value is not None]
    value = max(known) / min(known) if len(known) == len(found) else None
    detail = f"{_ms(*found)}; with every byte read once {_ms(*read)}"
    return at_most("get, 1 → 128 dense fields at equal bytes", "the fastest of them", 2.0, value, detail)


def growth(record: RunRecord) -> Figure:
    found = record.find("memory", OURS, "churn", "growth")
    value = found.median if found else None
    work = "memory after the table's whole traffic"
    return at_most(work, "after the first 10⁴ rows", 1.1, value, found.note if found else "")


FIGURES: tuple[Callable[[RunRecord], Figure], ...] = (
    put_dense,
    get_dense,
    against_peer("put", ("ragged_32",), "put, 1024 rows × 32 ragged fields", 50),
    against_peer("get", ("ragged_32",), "get of the same", 50),
    against_peer("put", DENSE_FIELDS, "put, dense, 1–32 fields (worst)", 5),
    against_peer("get", DENSE_FIELDS, "get, dense, 1–32 fields (worst)", 20),
    get_tcp,
    lease_flat,
    lease_peer,
    wake,
    wake_paced,
    wake_p99,
    wake_redis,
    request("server_cpu", "CPU of the server: put, lease, ack (worst)", "redis-server: XADD, XREADGROUP, XACK", 4),
    request("call", "time of the call, one client (worst)", "the same of redis-py", 2),
    busy_redis,
    many_clients,
    resident,
    wire,
    flat_fields,
    growth,
)


def figures(record: RunRecord) -> list[Figure]:
    """Every required figure, measured or not."""
    return [figure(record) for figure in FIGURES]
