"""verl's side of a trial as a process: the driver of its trainer, with a Ray of its own."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.adapters.transfer_queue_hook import FOLDER, REAL, activate
from transferqueue.errors import UsageError
from transferqueue.workflows.adopt.trial.compare import SideStep
from transferqueue.workflows.adopt.trial.of_verl.job import ENVIRONMENT, PLUGIN
from transferqueue.workflows.adopt.trial.side import Send, run_side
from transferqueue.workflows.job.reward_terms.piped_process import read_message

MODULE: Final = __name__
_THIS: Final = "this"
_PYTHONPATH: Final = "ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH"
QUEUES: Final = {"own": "its own queue", _THIS: "this queue"}
"""The installed ``transfer_queue``, and the drop-in: the word of each, and its name."""


def run(words: list[str], send: Send) -> None:
    """Train. words: file with the settings as JSON; file for the steps; how many; a word of `QUEUES`."""
    settings, path, steps, queue = words
    os.environ |= {**ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": PLUGIN}
    if queue == _THIS:
        activate()
    main: Any = importlib.import_module("verl.trainer.main_ppo")
    import ray
    from ray.exceptions import RayTaskError

    from transferqueue.workflows.adopt.trial.of_verl.recorder import Runner

    Path(path).touch()
    main.TaskRunnerV1 = _Started(Runner, path, int(steps))
    given = msgspec.json.decode(Path(settings).read_bytes())
    # in /tmp, as Ray's own: a longer path has no room for the names of its sockets
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as session:
        given["ray_kwargs.ray_init._temp_dir"] = session
        config = _config(Path(main.__file__).with_name("config"), given)
        _complete_path(config, [FOLDER] if queue == _THIS else [])
        try:
            main.main(config)
        except RayTaskError as error:
            raise _first_cause(error) from error
        finally:
            ray.shutdown()
    for step in steps_in(Path(path)):
        check_queue(step, is_this=queue == _THIS)
        send(step)


def steps_in(path: Path) -> Iterator[SideStep]:
    """Yield the steps that a recorder wrote."""
    with path.open("rb") as file:
        while file.peek(1):
            yield read_message(file.read, SideStep)


def check_queue(step: SideStep, *, is_this: bool) -> None:
    """Raise `UsageError` unless the trainer of a step imported the queue of its side."""
    if (step.queue == REAL) != is_this:
        raise UsageError(
            f"its transfer_queue is {step.queue}, not the one to try: the job's ray_kwargs.ray_init.runtime_env has "
            "another; leave out what names one there"
        )


def _complete_path(config: Any, first: list[str]) -> None:
    """Put folders before the PYTHONPATH that a job gives Ray's workers, and the driver's, which has this package, after
    it."""
    from omegaconf import OmegaConf

    if given := OmegaConf.select(config, _PYTHONPATH):
        OmegaConf.update(config, _PYTHONPATH, os.pathsep.join([*first, str(given), os.environ["PYTHONPATH"]]))


def _first_cause(error: Any) -> BaseException:
    """Return the exception of the actor where an error began; Ray's own text has the traces of all on the way."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error  # type: ignore[no-any-return]


class _Started:
    """An actor class with the arguments of its construction."""

    def __init__(self, actor: Any, *arguments: Any) -> None:
        self._actor, self._arguments = actor, arguments

    def remote(self) -> Any:
        return self._actor.remote(*self._arguments)


def _config(folder: Path, settings: dict[str, Any]) -> Any:
    """Return verl's own configuration with these settings."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.set_struct(config, True)
    return config


if __name__ == "__main__":
    run_side(run)
