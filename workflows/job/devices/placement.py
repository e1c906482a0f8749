"""The map of a job: which of its processes computes on which GPU, with the bytes that each takes there. No I/O here.

1. A key `devices` names the GPUs of its processes in turn. With ``"auto"`` engines take the first GPUs, ranks the next,
   then the critic, the scorers and the reward models, and from the first again after the last. The evaluation is beside
   the first engine. GPUs that a key names are left out, unless there are no others.
2. A process sees its own GPUs alone (``CUDA_VISIBLE_DEVICES``), one with ``"cpu"`` and one without a model none.
   Processes that run only reward functions see every GPU that the job sees: a function may load a model itself.
3. In mode ``colocated`` the trainer's process has the engine too, on one GPU that either key may name.
4. vLLM takes a share of a GPU (``options.gpu_memory_utilization``): the declared one, or what the other processes there
   leave, at most `SHARE_MAX`. Where two keys name one GPU, it must be declared.
5. Two ranks are never on one GPU, nor are two parts of a ``tensor_parallel`` engine, which is on one host.
6. The bytes of a GPU must be free on it. Of a GPU whose bytes are not known (0), nothing is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Final

from msgspec.structs import replace

from transferqueue.errors import Impossible, NotFound, UsageError
from transferqueue.errors.text import counted
from transferqueue.workflows.flow.processes.stage_process import StageJob
from transferqueue.workflows.job import names
from transferqueue.workflows.job.devices import device_bytes
from transferqueue.workflows.job.devices.device_bytes import (
    CACHE,
    NUMBER_BYTES,
    PROCESS_BYTES,
    TURN,
    DeviceBytes,
    cache_bytes,
)
from transferqueue.workflows.job.devices.model_sizes import ModelSizes
from transferqueue.workflows.job.graph import engine_of, evaluation_engine, is_colocated
from transferqueue.workflows.job.settings.job import Devices, EngineSettings, Job, ScorerSettings
from transferqueue.workflows.job.settings.sizes import gib, tokens_of_row

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
SHARE_MAX: Final = 0.9
"""Largest share of a GPU that vLLM gets unless the job declares another; the rest is for what it does not count."""
_ROUNDING: Final = 1e-6
"""Keeps 0.9 · 100 above 90."""
SHARE: Final = "gpu_memory_utilization"
_ENGINES: Final = (names.ROLLOUT, names.PLAY)
_HERE: Final = ("builtin", "transformers", "vllm")
"""Engines that compute in processes of the job."""
_TASKS: Final = (
    *_ENGINES,
    names.TRAIN,
    names.TRAIN_CRITIC,
    names.REFERENCE,
    names.PROXIMAL,
    names.VALUE,
    names.TEACHER,
    names.REWARD,
    names.EVALUATE,
)
"""Tasks with a model, in the order in which they get GPUs."""


@dataclass(frozen=True, kw_only=True)
class FoundDevice:
    """A GPU.

    Args:
        name: of the GPU for ``CUDA_VISIBLE_DEVICES``.
        total: bytes of its memory; default 0: not known.
        free: bytes that no other process has; default 0.
        host: that has it; default "": this one.
    """

    name: str
    total: int = 0
    free: int = 0
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class PlacedProcess:
    """A process with a model.

    Args:
        label: of the process.
        devices: numbers of its GPUs; empty: it computes on the CPU.
        held: its bytes on each of them.
        share: of each GPU that vLLM takes; default 0.0: it is not vLLM, or a cache of declared size.
        key: of the job file that names its GPUs; default "": none does.
    """

    label: str
    devices: tuple[int, ...]
    held: DeviceBytes
    share: float = 0.0
    key: str = ""

    def text(self) -> str:
        """Return its bytes for people."""
        if not self.held.parts:
            return f"{self.label} not known: no config.json of its model is here, or came from the hub"
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.held.parts.items() if size > 0)
        return f"{self.label} {gib(self.held.total)} ({parts})"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The map of a job.

    Args:
        devices: the GPUs; a process names them by their places here.
        processes: those with a model.
        hidden: labels of processes that see no GPU.
    """

    devices: tuple[FoundDevice, ...]
    processes: tuple[PlacedProcess, ...]
    hidden: frozenset[str]

    def environments(self) -> dict[str, dict[str, str]]:
        """Return the variables that show each process its own GPUs, by label; without those that see what the job
        sees."""
        shown = {
            process.label: ",".join(self.devices[device].name for device in process.devices)
            for process in self.processes
            if process.devices
        }
        return {label: {VISIBLE: text} for label, text in (shown | dict.fromkeys(self.hidden, "")).items()}

    def on(self, device: int) -> list[PlacedProcess]:
        """Return the processes on a GPU.

        Args:
            device: its number.
        """
        return [process for process in self.processes if device in process.devices]

    def with_shares(self, job: Job) -> Job:
        """Return the job with the share of each vLLM engine among its options.

        Args:
            job: of this map.
        """
        shares: dict[int, float] = {}
        for process in self.processes:
            if process.share:
                place = _entry(job, process.label)
                shares[place] = min(process.share, shares.get(place, 1.0))
        return replace(
            job,
            engine=tuple(
                replace(engine, options={SHARE: shares[place], **engine.options}) if place in shares else engine
                for place, engine in enumerate(job.engine)
            ),
        )

    def lines(self) -> list[str]:
        """Return the map for people, a line for each GPU, and one for the CPU."""
        lines = []
        for number, device in enumerate(self.devices):
            size = f" ({gib(device.free)} of {gib(device.total)} free)" if device.total else ""
            host = f" on node {device.host[:8]}" if device.host else ""
            held = self.on(number)
            lines.append(f"GPU {number}{host}{size}: {added(held) if held else 'no process'}")
        on_cpu = [process for process in self.processes if not process.devices]
        return [*lines, f"CPU: {added(on_cpu)}"] if on_cpu else lines


def device_map(
    job: Job, processes: Sequence[StageJob], devices: Sequence[FoundDevice], models: Mapping[str, ModelSizes | None]
) -> Placement:
    """Return the map of a resolved job.

    Args:
        job: the job.
        processes: its processes on these machines, of which it places those with a model. Those that an elastic job may
            add are placed too.
        devices: the GPUs of the machines.
        models: sizes by path; None for a model that is not here.

    Raises:
        NotFound: a key names a GPU that is not there, or there are fewer than a process or the ranks need.
        UsageError: a map that overlaps.
        Impossible: bytes that are not free, with the arithmetic.
    """
    return _Map(job, processes, devices, models).placed()


def added(held: Sequence[PlacedProcess]) -> str:
    """Return the bytes of processes and their sum, for people.

    Args:
        held: the processes.
    """
    total = sum(process.held.total for process in held)
    return " + ".join(process.text() for process in held) + f" = {gib(total)}"


class _Map:
    """The map of one job in the making."""

    def __init__(
        self,
        job: Job,
        processes: Sequence[StageJob],
        devices: Sequence[FoundDevice],
        models: Mapping[str, ModelSizes | None],
    ) -> None:
        self._job, self._devices, self._models = job, tuple(devices), models
        self._labels = [process.label for process in processes]
        self._placed: dict[str, PlacedProcess] = {}
        self._on_cpu: set[str] = set()
        self._instances = _instances(job, processes)
        keys = _keys(job, self._instances)
        for key, named in keys.items():
            self._check(key, named)
        taken = {device for named in keys.values() if isinstance(named, tuple) for device in named}
        every = range(len(devices))
        self._open = [device for device in every if device not in taken] or [*every]
        self._next = 0

    def placed(self) -> Placement:
        for name, instances in self._instances.items():
            self._choose(name, instances)
        for process in sorted(self._placed.values(), key=self._has_no_share):
            self._placed[process.label] = self._with_share(process)
        self._check_fit()
        return Placement(
            devices=self._devices, processes=tuple(self._placed.values()), hidden=frozenset(self._hidden())
        )

    def _hidden(self) -> set[str]:
        if not self._devices:  # as the machine is: torch may know accelerators that nvidia-smi does not list
            return self._on_cpu
        no_model = {label for label in self._labels if label not in self._placed and _name(label) != names.REWARD}
        return no_model | {process.label for process in self._placed.values() if not process.devices}

    # ------------------------------------------------------------ devices

    def _check(self, key: str, named: Devices) -> None:
        if not isinstance(named, tuple):
            return
        if not named:
            raise UsageError(f'{key}=[] names no GPU; give numbers such as [0], "auto" or "cpu"')
        for device in named:
            if not 0 <= device < len(self._devices):
                there = f", 0 to {len(self._devices) - 1}" if self._devices else ""
                raise NotFound(
                    f"{key}={[*named]}: there is no GPU {device}; here {_are(len(self._devices))}{there}: give others, "
                    '"auto" or "cpu"'
                )

    def _choose(self, name: str, instances: Sequence[int]) -> None:
        if name in _ENGINES:
            for instance in instances:
                self._choose_for_engine(f"{name}-{instance}", instance)
        elif name == names.TRAIN:
            self._choose_for_ranks(instances)
        elif name == names.EVALUATE:
            self._choose_for_evaluation()
        else:
            key, named = _scorer(self._job, name)
            later = name == names.VALUE  # than the critic itself
            for instance in instances:
                self._take(f"{name}-{instance}", key, named, instance + later)

    def _choose_for_engine(self, label: str, instance: int) -> None:
        engine = engine_of(self._job, instance)
        entry = _entry(self._job, label)
        turn = instance - sum(other.count for other in self._job.engine[:entry])
        self._take(label, f"engine.{entry}.devices", engine.devices, turn, engine.tensor_parallel)

    def _choose_for_ranks(self, ranks: Sequence[int]) -> None:
        key, named = _trainer(self._job)
        if isinstance(named, tuple) and (len(named) != len(ranks) or len(set(named)) < len(ranks)):
            raise UsageError(
                f"trainer.devices={[*named]} with trainer.ranks={len(ranks)}: each rank has a GPU of its own; give "
                f"{counted(len(ranks), 'number')}, all different"
            )
        if named == "auto" and 0 < len(self._devices) < len(ranks):
            raise NotFound(
                f"trainer.ranks={len(ranks)}: each rank has a GPU of its own, and here {_are(len(self._devices))}; set "
                'fewer ranks, or trainer.devices="cpu"'
            )
        if len(self._open) < len(ranks):
            self._open = [*range(len(self._devices))]
        for rank in ranks:
            self._take(f"{names.TRAIN}-{rank}", key, named, rank)

    def _choose_for_evaluation(self) -> None:
        """Beside the first engine, unless the job says another place. On Ray a tensor-parallel engine has its GPUs
        alone."""
        named, width = self._job.evaluation.devices, 1
        generating = (names.TRAIN,) if is_colocated(self._job) else _ENGINES
        beside = next((process for process in self._placed.values() if _name(process.label) in generating), None)
        if beside is not None:
            width = evaluation_engine(self._job).tensor_parallel
        label = f"{names.EVALUATE}-0"
        if named != "auto" or beside is None or (width > 1 and self._job.on == "ray"):
            self._take(label, "evaluation.devices", named, 0, width)
        else:
            self._put(label, beside.devices[:width])
            self._on_cpu |= {label} if beside.label in self._on_cpu else set()

    def _take(self, label: str, key: str, named: Devices, turn: int, width: int = 1) -> None:
        """Give a process `width` GPUs: the next ones, or those of its turn."""
        if isinstance(named, tuple):
            if len(named) % width:
                raise UsageError(
                    f"{key}={[*named]} with tensor_parallel={width}: give {width} GPUs for each process, or for all"
                )
            at = turn * width % len(named)
            self._put(label, named[at : at + width], key)
        elif named == "cpu" or not self._devices:
            self._on_cpu |= {label} if named == "cpu" else set()
            self._put(label, ())
        else:
            self._put(label, self._next_ones(label, width))

    def _next_ones(self, label: str, width: int) -> tuple[int, ...]:
        for step in range(len(self._open)):
            at = (self._next + step) % len(self._open)
            group = tuple(self._open[at : at + width])
            if len(group) == width and len(self._hosts(group)) == 1:
                self._next = at + width
                return group
        raise NotFound(
            f"{label} needs {width} GPUs of one host (tensor_parallel={width}), and here {_are(len(self._devices))}, "
            f"{len(self._open)} of them for processes without devices of their own; set a smaller tensor_parallel"
        )

    def _put(self, label: str, devices: tuple[int, ...], key: str = "") -> None:
        if len(set(devices)) < len(devices) or len(self._hosts(devices)) > 1:
            raise UsageError(
                f"{key}: {label} would be on {[*devices]}; a tensor-parallel engine has different GPUs of one host"
            )
        held = self._bytes(label, on_gpu=bool(devices))
        self._placed[label] = PlacedProcess(label=label, devices=devices, held=held, key=key)

    def _hosts(self, devices: tuple[int, ...]) -> set[str]:
        return {self._devices[device].host for device in devices}

    # ------------------------------------------------------------ bytes

    def _bytes(self, label: str, *, on_gpu: bool) -> DeviceBytes:
        parts: dict[str, int] = {}
        for held in self._models_of(label):
            if held is None:
                return DeviceBytes()
            for name, size in held.parts.items():
                parts[name] = parts.get(name, 0) + size
        own = 2 if self._is_shared(label) and engine_of(self._job, 0).kind == "vllm" else 1  # processes
        context = own * PROCESS_BYTES if on_gpu else 0
        return DeviceBytes(parts=parts | {"process": context})

    def _models_of(self, label: str) -> Iterator[DeviceBytes | None]:
        """Yield the bytes of each model of a process; None for a model that is not here."""
        job, name = self._job, _name(label)
        if name in _ENGINES:
            yield self._engine(engine_of(job, _instance(label)))
        elif self._is_shared(label):
            yield self._trainer_and_engine()
        elif name == names.TRAIN:
            yield self._counted(job.model.path, lambda sizes: device_bytes.trained(job, sizes))
        elif name == names.TRAIN_CRITIC:
            yield self._counted(job.critic.path, lambda sizes: device_bytes.trained(job, sizes, critic=True))
        elif name == names.REWARD:
            yield from self._reward_models()
        elif name == names.EVALUATE:
            yield from self._evaluation()
        elif name == names.PROXIMAL:
            yield self._policy_passes()
        else:
            yield self._scorer(
                {names.REFERENCE: job.reference, names.VALUE: job.critic, names.TEACHER: job.teacher}[name]
            )

    def _is_shared(self, label: str) -> bool:
        """Whether the process has a trainer and an engine."""
        return is_colocated(self._job) and _name(label) == names.TRAIN

    def _trainer_and_engine(self) -> DeviceBytes | None:
        engine = engine_of(self._job, 0)
        generated = self._engine(engine)
        trained = self._counted(self._job.model.path, lambda sizes: device_bytes.trained(self._job, sizes))
        if trained is None or generated is None:
            return None
        return device_bytes.in_turn(trained, generated, sleeps=engine.kind == "vllm")

    def _evaluation(self) -> Iterator[DeviceBytes | None]:
        if self._job.algorithm.kind == "sft":
            yield self._policy_passes()
            return
        yield self._engine(evaluation_engine(self._job))
        yield from self._reward_models()
        if self._job.algorithm.kind == "distill":
            yield self._scorer(self._job.teacher)

    def _policy_passes(self) -> DeviceBytes | None:
        job = self._job
        return self._scorer(ScorerSettings(path=job.model.path, tokens=job.trainer.micro_tokens))

    def _reward_models(self) -> Iterator[DeviceBytes | None]:
        return (self._scorer(ScorerSettings(path=reward.model)) for reward in self._job.reward if reward.model)

    def _scorer(self, scorer: ScorerSettings) -> DeviceBytes | None:
        dtype = self._job.model.dtype
        return self._counted(scorer.path, lambda sizes: device_bytes.scored(sizes, dtype, scorer.tokens))

    def _engine(self, engine: EngineSettings) -> DeviceBytes | None:
        path = engine.model or self._job.model.path
        return self._counted(path, lambda sizes: device_bytes.generated(self._job, sizes, engine))

    def _counted(self, path: str, count: Callable[[ModelSizes], DeviceBytes]) -> DeviceBytes | None:
        sizes = self._models.get(path)
        return None if sizes is None else count(sizes)

    # ------------------------------------------------------------ shares and fit

    def _engine_of(self, process: PlacedProcess) -> EngineSettings | None:
        """The settings of a process with vLLM on a GPU that takes a share of it."""
        if _name(process.label) in _ENGINES or self._is_shared(process.label):
            engine = engine_of(self._job, _instance(process.label))
        elif _name(process.label) == names.EVALUATE and self._job.algorithm.kind != "sft":
            engine = evaluation_engine(self._job)
        else:
            return None
        return engine if engine.kind == "vllm" and process.devices and CACHE not in engine.options else None

    def _has_no_share(self, process: PlacedProcess) -> bool:
        engine = self._engine_of(process)
        return engine is None or SHARE not in engine.options

    def _with_share(self, process: PlacedProcess) -> PlacedProcess:
        """Give a vLLM process its share. The bytes of it that hold no weights are its KV cache."""
        engine = self._engine_of(process)
        if engine is None:
            return process
        share = float(engine.options.get(SHARE, 0)) or min(self._left(device, process) for device in process.devices)
        parts = process.held.parts
        taken = self._taken(process, share)
        if taken and TURN in parts:
            parts = parts | {TURN: max(parts[TURN], taken)}
        elif taken:
            parts = parts | {"KV cache": taken - sum(parts.values()) + parts.get("KV cache", 0)}
        return changed(process, share=share, held=changed(process.held, parts=parts))

    def _taken(self, process: PlacedProcess, share: float) -> int:
        """The bytes of a share of each GPU of a process."""
        return int(share * min(self._devices[device].total for device in process.devices))

    def _left(self, device: int, process: PlacedProcess) -> float:
        """The share that other processes, and a trainer in the same process, leave of a GPU."""
        found, others = self._devices[device], [other for other in self._on(device) if other.label != process.label]
        for other in others:
            if process.key and other.key:
                raise UsageError(
                    f"{process.label} ({process.key}) and {other.label} ({other.key}) are both on GPU {device}: name "
                    f"another GPU, or say how much of it vLLM takes, in {process.key.replace('devices', 'options')}."
                    f"{SHARE}; {self._arithmetic(device)}"
                )
        if not found.total:
            return math.floor(100 * SHARE_MAX / (len(others) + 1)) / 100
        open_too = [other for other in others if self._engine_of(other) and self._has_no_share(other)]
        taken = sum(other.held.total for other in others if other not in open_too)
        if (own := process.held.parts).get(TURN):
            taken += sum(own.values()) - own[TURN]
        left = min(SHARE_MAX, (found.free - taken) / found.total) / (len(open_too) + 1)
        return max(0.01, math.floor(100 * left + _ROUNDING) / 100)

    def _on(self, device: int) -> list[PlacedProcess]:
        return [process for process in self._placed.values() if device in process.devices]

    def _arithmetic(self, device: int) -> str:
        found = self._devices[device]
        free = f"; {gib(found.free)} of {gib(found.total)} are free" if found.total else ""
        return added(self._on(device)) + free

    def _check_fit(self) -> None:
        for number, device in enumerate(self._devices):
            held = self._on(number)
            short = [process.label for process in held if not self._has_cache(process)]
            if device.total and (short or sum(process.held.total for process in held) > device.free):
                cache = (
                    f"; the share of {short[0]} leaves no KV cache for the longest row beside its weights"
                    if short
                    else ""
                )
                raise Impossible(
                    f"GPU {number} cannot hold what is placed on it: {self._arithmetic(number)}{cache}. Name other "
                    f"devices, or set a smaller micro_tokens, slots or {SHARE}, gradient_checkpointing=true, or "
                    'parallel="fsdp2" with more ranks'
                )

    def _has_cache(self, process: PlacedProcess) -> bool:
        """Whether the share of a vLLM process holds the keys and values of the longest row."""
        engine = self._engine_of(process)
        sizes = engine and self._models.get(engine.model or self._job.model.path)
        if not engine or not sizes:
            return True
        row = tokens_of_row(self._job) * cache_bytes(sizes, self._job.model.dtype) // engine.tensor_parallel
        cache = process.held.parts.get("KV cache")
        if cache is None:
            cache = self._taken(process, process.share) - sizes.parameters * NUMBER_BYTES[self._job.model.dtype]
        return cache >= row


def _instances(job: Job, processes: Sequence[StageJob]) -> dict[str, list[int]]:
    """The numbers of the processes with a model, by their task, in the order in which they get GPUs."""
    found: dict[str, list[int]] = {}
    for process in processes:
        found.setdefault(process.name, []).append(process.instance)
    for name in _ENGINES:
        if name in found:
            found[name] += range(len(found[name]), job.elastic.max)
            found[name] = [instance for instance in found[name] if engine_of(job, instance).kind in _HERE]
    if not any(reward.model for reward in job.reward):
        found.pop(names.REWARD, None)
    return {name: found[name] for name in _TASKS if found.get(name)}


def _keys(job: Job, instances: Mapping[str, Sequence[int]]) -> dict[str, Devices]:
    """What the job says of the devices of its processes here, by key."""
    keys: dict[str, Devices] = {}
    for name, numbers in instances.items():
        if name in _ENGINES:
            entries = [_entry(job, f"{name}-{number}") for number in numbers]
            keys |= {f"engine.{entry}.devices": job.engine[entry].devices for entry in entries}
        elif name == names.TRAIN:
            keys |= [_trainer(job)]
        elif name == names.EVALUATE:
            keys["evaluation.devices"] = job.evaluation.devices
        else:
            keys |= [_scorer(job, name)]
    return keys


def _trainer(job: Job) -> tuple[str, Devices]:
    """Key and value of the devices of the trainer; where it has the engine in its process, of either."""
    if is_colocated(job) and job.trainer.devices == "auto":
        return "engine.0.devices", job.engine[0].devices
    return "trainer.devices", job.trainer.devices


def _scorer(job: Job, name: str) -> tuple[str, Devices]:
    """Key and value of the devices of a process that scores, or trains the critic."""
    table = {
        names.REFERENCE: "reference",
        names.TRAIN_CRITIC: "critic",
        names.VALUE: "critic",
        names.TEACHER: "teacher",
    }
    if name in table:
        return f"{table[name]}.devices", getattr(job, table[name]).devices
    return f"{name}.devices", "cpu" if name == names.PROXIMAL and job.trainer.devices == "cpu" else "auto"


def _are(gpus: int) -> str:
    return "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"


def _name(label: str) -> str:
    return label.rpartition("-")[0]


def _instance(label: str) -> int:
    return int(label.rpartition("-")[2])


def _entry(job: Job, label: str) -> int:
    """The place in ``engine`` of the settings of a process that generates."""
    if _name(label) not in _ENGINES:
        return next(place for place, engine in enumerate(job.engine) if engine.kind == "vllm")
    places = [place for place, engine in enumerate(job.engine) for _ in range(engine.count)]
    return places[min(_instance(label), len(places) - 1)]
