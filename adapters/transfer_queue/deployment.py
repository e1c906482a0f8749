"""Starts or finds the drop-in's server and controller.

With Ray, the first process that calls `init` creates the named actor ``TransferQueueController``, which holds the
controller; every other process of that cluster finds it by name. On one node the actor holds the server, too. On
several, or with ``ssd_offload``, it starts one by `deploy_ray`: clients on other nodes reach it by TCP with keys, and
each node gives memory. Without Ray (not installed, or ``TRANSFERQUEUE_SHIM_LOCAL=1``) both live in the calling process.
`close` in an attached process closes its own connection only; in the process that started the service it ends the
service.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import transferqueue as tq
from transferqueue.adapters.transfer_queue import sampler as samplers
from transferqueue.adapters.transfer_queue.client import TransferQueueClient
from transferqueue.adapters.transfer_queue.controller import Controller
from transferqueue.adapters.transfer_queue.local_controller_socket import LocalControllerSocket, QuestionServer
from transferqueue.adapters.transfer_queue.metrics import Metrics
from transferqueue.adapters.transfer_queue.sampler import BaseSampler
from transferqueue.adapters.transfer_queue.settings import StorageSettings, storage_settings
from transferqueue.adapters.transfer_queue.steps import Ask, AsyncAsk
from transferqueue.errors import Unreachable
from transferqueue.limits import parse_switch
from transferqueue.storage.elements.dtypes import imported_module
from transferqueue.transport import this_host

_log: Final = logging.getLogger("transferqueue")

ACTOR: Final = "TransferQueueController"
NAMESPACE: Final = "transfer_queue"
WAITING: Final = "waiting"
WAITING_QUESTIONS: Final = frozenset({"get_meta", "wait_for"})
"""Questions that may wait for samples. They have threads of their own, so that others are answered meanwhile."""
WAITING_MAX: Final = 256
SPILL_S: Final = 60.0
"""How long a put waits while samples go to the disk."""
SPILLED_SHARE: Final = 0.9
"""Of the free space of the directory of ``ssd_offload``, when the service starts."""
LOCAL: Final = "TRANSFERQUEUE_SHIM_LOCAL"
CONFIG: Final = Path(__file__).with_name("config.yaml")


class ServiceTerms(NamedTuple):
    """What a process needs to know of the service.

    Args:
        address: of the queue.
        config: the merged settings.
        questions: the name of the socket for questions; "": there is none.
        rows_max: samples of a partition.
        room_s: how long a put waits for memory.
        host: the service's machine.
    """

    address: str
    config: dict[str, Any]
    questions: str
    rows_max: int
    room_s: float
    host: str


class DropInServer:
    """The queue's server and the controller, in one process. With `direct`, clients in other processes may ask over a
    socket. `nodes`: of the Ray cluster; 0: there is none."""

    def __init__(self, config: Mapping[str, Any], *, direct: bool = False, nodes: int = 0) -> None:
        self._config = dict(config)
        control, settings = config.get("controller") or {}, storage_settings(config, nodes)
        if settings.unused:
            _log.warning("transfer_queue.init: settings that are not used here: %s", "; ".join(settings.unused))
        self._room_s = SPILL_S if settings.spill_dir else 0.0
        with ExitStack() as ending:
            address = _deployed(settings, ending) if settings.is_spread else None
            self._queue = ending.enter_context(
                tq.connect(address, label="transfer_queue", arena_bytes=None if address else settings.bytes_max)
            )
            self.controller = Controller(
                self._queue.address,
                sampler=make_sampler(control.get("sampler")),
                polling_mode=bool(control.get("polling_mode")),
                rows_max=settings.rows_max,
            )
            ending.callback(self.controller.close)
            self._measure(config.get("metrics") or {}, ending)
            self._questions: QuestionServer | None = None
            if direct:
                self._questions = QuestionServer(lambda name, *arguments: getattr(self, name)(*arguments))
                ending.callback(self._questions.close)
            self._ending = ending.pop_all()

    def _measure(self, settings: Mapping[str, Any], ending: ExitStack) -> None:
        """Start the metrics endpoint if the configuration enables it, and add its address to the configuration."""
        if settings.get("enabled"):
            metrics = Metrics(self._queue, settings.get("port", 0), self.controller.consumed_counts)
            ending.callback(metrics.close)
            self._config["metrics"] = {**settings, "endpoint": metrics.address}

    def hello(self) -> ServiceTerms:
        """Return what a process needs to know of the service."""
        name = self._questions.name if self._questions else ""
        return ServiceTerms(
            self._queue.address, self._config, name, self.controller.rows_max, self._room_s, this_host()
        )

    def kept(self, number: int) -> Any:
        """Raise the exception that a question over the socket has raised, or return its answer, which that did not
        carry."""
        return self._questions.kept(number) if self._questions is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)

    def shutdown(self) -> None:
        """Stop server and controller."""
        self._ending.close()


class DropInConnection:
    """A process's connection to the deployment.

    `ask` calls a method of the controller by name, and so does `ask_async` in an event loop; None: in threads of the
    controller's, which is in this process. `end` ends the deployment, in the process that started it.
    """

    def __init__(self, ask: Ask, end: Callable[[], object] | None, ask_async: AsyncAsk | None = None) -> None:
        address, self.config, name, rows_max, room_s, host = ask("hello")
        self._threads = ThreadPoolExecutor(WAITING_MAX, thread_name_prefix="transfer_queue question")
        self.queue = _connected(address, host)
        self._questions = LocalControllerSocket(name, ask)
        self.client = TransferQueueClient(
            self.queue,
            self._questions.ask,
            ask_async or self._ask_async,
            rows_max,
            client_id=f"client-{os.getpid()}",
            room_s=room_s,
        )
        self._end = end

    def close(self) -> None:
        """Detach, and end the deployment if this process started it."""
        self._questions.close()
        self.queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._end is not None:
            self._end()

    async def _ask_async(self, name: str, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._questions.ask, name, *arguments)


def _connected(address: str, host: str) -> tq.Queue:
    try:
        return tq.connect(address, label="transfer_queue client")
    except Unreachable as error:
        if host == this_host():
            raise
        raise Unreachable(
            f"the service listens at {address} of another machine, where it was started while the Ray cluster had one "
            f"node; close() it, and call init() when all nodes have joined: {error}"
        ) from error


_guard: Final = threading.Lock()
_services: Final[dict[int, DropInConnection]] = {}
"""Connections by process id: a forked child has none."""


def start(config: Mapping[str, Any] | None) -> DropInConnection:
    """Return this process's connection: to an existing service, or to one that this call starts. A second call returns
    the same."""
    with _guard:
        connection = _services.get(os.getpid())
        if connection is None:
            merged = _merged(_defaults(), config or {})
            connection = _services[os.getpid()] = _with_ray(merged) if _ray_wanted() else _local(merged)
            atexit.register(stop)
        return connection


def current() -> DropInConnection:
    """Return this process's connection. ``RuntimeError`` before `start`."""
    connection = _services.get(os.getpid())
    if connection is None:
        raise RuntimeError("TransferQueue is not initialized in this process; call init() first")
    return connection


def stop() -> None:
    """Close this process's connection. Does nothing if there is none."""
    with _guard:
        connection = _services.pop(os.getpid(), None)
        if connection is not None:
            connection.close()


def make_sampler(named: Any) -> BaseSampler:
    """Create a sampler from the name of one of ours, a class, or an instance. ``TypeError`` for anything else."""
    if named is None:
        return samplers.SequentialSampler()
    if isinstance(named, str):
        named = getattr(samplers, named, None) or _unknown(named)
    sampler = named() if isinstance(named, type) else named
    if not isinstance(sampler, BaseSampler):
        raise TypeError(f"sampler {named!r} is no BaseSampler; give a name, a class or an instance of one")
    return sampler


def _unknown(name: str) -> Any:
    raise ValueError(f"sampler {name!r} is unknown; there are {', '.join(samplers.__all__)}")


def _ray_wanted() -> bool:
    return not parse_switch(LOCAL, os.environ.get(LOCAL), default=False) and importlib.util.find_spec("ray") is not None


def _local(config: Mapping[str, Any]) -> DropInConnection:
    server = DropInServer(config)
    return DropInConnection(lambda name, *arguments: getattr(server, name)(*arguments), server.shutdown)


def _with_ray(config: Mapping[str, Any]) -> DropInConnection:
    import ray

    if not ray.is_initialized():
        ray.init(namespace=NAMESPACE)
    actor, created = _actor(config)

    def asked(name: str, *arguments: Any) -> Any:
        group = WAITING if name in WAITING_QUESTIONS else None
        return actor.ask.options(concurrency_group=group).remote(name, *arguments)

    def ask(name: str, *arguments: Any) -> Any:
        return ray.get(asked(name, *arguments))

    async def ask_async(name: str, *arguments: Any) -> Any:
        return await asked(name, *arguments)

    def end() -> None:
        if (
            not ray.is_initialized()
        ):  # the program has left the cluster, and with the next call Ray would start another one
            return
        with suppress(ray.exceptions.RayActorError):  # it is gone already
            ray.get(actor.ask.remote("shutdown"))
            ray.kill(actor)

    return DropInConnection(ask, end if created else None, ask_async)


def _actor(config: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the named actor, and whether this call created it."""
    import ray

    try:
        return ray.get_actor(ACTOR, namespace=NAMESPACE), False
    except ValueError:
        pass
    options = {"name": ACTOR, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_concurrency": 64}
    try:
        actor = ray.remote(concurrency_groups={WAITING: WAITING_MAX})(ServerActor)
        return actor.options(**options).remote(dict(config)), True
    except ValueError:  # another process was quicker
        return ray.get_actor(ACTOR, namespace=NAMESPACE), False


class ServerActor:
    """`DropInServer` as a Ray actor."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._server = DropInServer(config, direct=True, nodes=_nodes())

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the server or the controller."""
        return getattr(self._server, name)(*arguments)

    def list_partitions(self) -> list[str]:
        """Names of the partitions."""
        return self._server.controller.list_partitions()

    def clear_partition(self, partition_id: str) -> None:
        """Delete a partition."""
        self._server.controller.clear_partition(partition_id)

    def get_partition_snapshot(self, partition_id: str) -> Any:
        """A partition as it is now."""
        return self._server.controller.get_partition_snapshot(partition_id)


def _defaults() -> dict[str, Any]:
    from omegaconf import OmegaConf

    defaults: Any = OmegaConf.to_container(OmegaConf.load(CONFIG))
    return dict(defaults)


def _merged(defaults: Mapping[str, Any], overrides: Any) -> dict[str, Any]:
    """Merge `overrides` over `defaults`, dict by dict. Other values (a sampler's class) stay unchanged."""
    if imported_module("omegaconf") is not None and not isinstance(overrides, dict):
        from omegaconf import OmegaConf

        overrides = OmegaConf.to_container(overrides) if OmegaConf.is_config(overrides) else overrides
    merged = dict(defaults)
    for key, value in overrides.items():
        default = merged.get(key)
        merged[key] = _merged(default, value) if isinstance(default, Mapping) and isinstance(value, Mapping) else value
    return merged


def _nodes() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def _deployed(settings: StorageSettings, ending: ExitStack) -> str:
    """Start a deployment on the nodes of the Ray cluster, which `ending` ends. Return its address."""
    spill: dict[str, Any] = {}
    if settings.spill_dir:
        Path(settings.spill_dir).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(settings.spill_dir).free
        spill = {"spill_dir": Path(settings.spill_dir) / "transferqueue", "spill_bytes": int(free * SPILLED_SHARE)}
    deployment = tq.deploy_ray(
        namespace=NAMESPACE,
        durability="memory" if spill else "process",
        arena_bytes=settings.bytes_max,
        shards=settings.shards,
        shard_bytes=settings.bytes_max,
        resources=settings.resources,
        **spill,
    )
    return ending.enter_context(deployment).address
