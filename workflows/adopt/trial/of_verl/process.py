"""verl's side of a trial as a process: the driver of its trainer, with a Ray of its own."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.adapters.transfer_queue_hook import activate
from transferqueue.workflows.adopt.trial.compare import SideStep
from transferqueue.workflows.adopt.trial.of_verl.job import ENVIRONMENT, PLUGIN
from transferqueue.workflows.adopt.trial.side import Send, run_side

MODULE: Final = __name__
_THIS: Final = "this"
QUEUES: Final = {"own": "its own queue", _THIS: "this queue"}
"""The installed ``transfer_queue``, and the drop-in: the word of each, and its name."""


def run(words: list[str], send: Send) -> None:
    """Train. words: file with the settings as JSON; file for the steps; how many; a word of `QUEUES`."""
    settings, path, steps, queue = words
    os.environ |= {**ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": PLUGIN, "RAY_ADDRESS": "local"}
    if queue == _THIS:
        activate()
    main: Any = importlib.import_module("verl.trainer.main_ppo")
    from ray.exceptions import RayTaskError

    from transferqueue.workflows.adopt.trial.of_verl.recorder import Runner

    main.TaskRunnerV1 = _Started(Runner, path, int(steps))
    config = _config(Path(main.__file__).with_name("config"), msgspec.json.decode(Path(settings).read_bytes()))
    try:
        main.main(config)
    except RayTaskError as error:
        raise _first_cause(error) from error
    for line in Path(path).read_bytes().splitlines():
        send(msgspec.json.decode(line, type=SideStep))


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
