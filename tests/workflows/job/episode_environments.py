"""Environments of one turn for tests. The row with the question ``1+1=`` fails, each in its own way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

Step = tuple[Any, float, bool, bool, dict[str, Any]]
FAILS = "1+1="


class Answers:
    """Ends at once with the reward 1."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.question = (options or {}).get("question", "")
        return None, {}

    def step(self, action: str) -> Any:
        return self.fails(action) if self.question == FAILS else ("", 1.0, True, False, {})

    def fails(self, action: str) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""


class SaysItsSeed(Answers):
    """The reward is made from the seed."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seed = seed
        return None, {}

    def step(self, action: str) -> Step:
        return "", float(self.seed % 1009), True, False, {}


class BeginsLong(Answers):
    """The first observation of the row that fails is longer than a whole response may be."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return ("so " * 100 if self.question == FAILS else None), {}


class Begins(Answers):
    """Has a first observation."""

    def __init__(self, said: Any = "look") -> None:
        self.said = said

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.said, super().reset(seed=seed, options=options)[1]

    def fails(self, action: str) -> Any:
        return "", 1.0, True, False, {}


class BeginsOne(Begins):
    """One of two questions has a first observation."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        said, info = super().reset(seed=seed, options=options)
        return (said if self.question == FAILS else None), info


class Twice(Answers):
    """Two turns."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.turns = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.turns += 1
        return "1", 1.0, self.turns == 2, False, {}


class Gated(Answers):
    """Waits until a file is there."""

    def __init__(self, gate: str = "/nowhere") -> None:
        self.gate = gate

    def step(self, action: str) -> Step:
        # Calls of C alone: a late call is in `step`, not in a function of pathlib.
        while self.question == FAILS and not os.access(self.gate, os.F_OK):
            time.sleep(0.005)
        return "", 1.0, True, False, {}


class Broken(Answers):
    def fails(self, action: str) -> Any:
        raise RuntimeError("the tool is gone")


class Shaky(Answers):
    """Fails so often, each time with other words."""

    def __init__(self, failures: int, file: str) -> None:
        self.failures, self.file = failures, Path(file)

    def step(self, action: str) -> Step:
        failed = len(self.file.read_text()) if self.file.exists() else 0
        if failed < self.failures:
            self.file.write_text("x" * (failed + 1))
            raise RuntimeError(f"timeout {failed + 1}")
        return "", 1.0, True, False, {}


class FailsAlike(Shaky):
    """Fails so often with the same words."""

    def step(self, action: str) -> Step:
        try:
            return super().step(action)
        except RuntimeError:
            raise RuntimeError("the tool rejects that") from None


class Numbers(Answers):
    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 7, {}


class TooLong(Answers):
    def fails(self, action: str) -> Any:
        return "x" * ((1 << 20) + 1), 0.0, False, False, {}


class HalfACharacter(Answers):
    def fails(self, action: str) -> Any:
        return "a\ud800", 0.0, False, False, {}


class MessageWith(Answers):
    """Its message has a further key, of one kind."""

    further: Any = None

    def fails(self, action: str) -> Any:
        return [{"role": "tool", "content": "a", "name": self.further}], 0.0, False, False, {}


class AnObject(MessageWith):
    further = Answers()


class ALongNumber(MessageWith):
    further = 1 << 64


class HalfAName(MessageWith):
    further = "a\ud800"


class RaisesHalfACharacter(Answers):
    def fails(self, action: str) -> Any:
        raise RuntimeError("a\ud800")


class ErrorWithoutText(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


class RaisesWithoutText(Answers):
    def fails(self, action: str) -> Any:
        raise ErrorWithoutText


class GivesAnObject(Answers):
    """Its state is no plain value."""

    def state(self) -> Any:
        return self if self.question == FAILS else None

    def restore(self, state: Any) -> None:
        """Nothing."""


class GivesMuch(GivesAnObject):
    """Its state is too large."""

    def state(self) -> Any:
        return "x" * (1 << 20) if self.question == FAILS else None


class NoTuple(Answers):
    def fails(self, action: str) -> Any:
        return "done"


class NotANumber(Answers):
    def fails(self, action: str) -> Any:
        return "", float("nan"), True, False, {}


class LeavesAChild(Answers):
    """Its child is in a group of its own, and has the files of its process; the observation is its process id."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        child = os.fork()
        if not child:
            os.setsid()
            signal.pause()
        return str(child), {}


class Exits(Answers):
    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options["question"] == FAILS:
            sys.exit("no licence")
        return super().reset(seed=seed, options=options)


class CallsAServer(Answers):
    """Its tool is at a port where nothing listens."""

    def fails(self, action: str) -> Any:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            socket.create_connection(taken.getsockname(), timeout=5)


class KeepsTheInterpreter(Answers):
    """A search that never ends, in C."""

    def fails(self, action: str) -> Any:
        return re.match(r"(a+)+$", "a" * 60 + "b")


class Kills(Answers):
    """Kills its process; with the name of a file only if that is not there."""

    def __init__(self, once: str = "") -> None:
        self.once = once

    def fails(self, action: str) -> Step:
        if not self.once or not Path(self.once).exists():
            if self.once:
                Path(self.once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "", 1.0, True, False, {}


class Agent:
    """Asks its endpoint, and again with two messages more. Its reward is whether the second answer is "46"."""

    def __init__(self, forgets: bool = False, hangs: bool = False, twice: bool = False, stream: bool = False) -> None:
        self.forgets, self.hangs, self.twice, self.stream = forgets, hangs, twice, stream

    async def run(self, data: dict[str, Any], base_url: str) -> float:
        messages = [{"role": "user", "content": data["prompt"]}]
        if self.twice:
            await asyncio.gather(self.answer(messages, base_url), self.answer(messages, base_url))
        said = await self.answer(messages, base_url)
        if self.hangs:
            await asyncio.Event().wait()
        if said == "nothing":
            return 0.25
        messages = [] if self.forgets else [*messages, {"role": "assistant", "content": said}]
        messages += [{"role": "tool", "content": "46"}, {"role": "user", "content": "so?"}]
        return float(await self.answer(messages, base_url) == "46")

    async def answer(self, messages: list[dict[str, str]], base_url: str) -> str:
        async with aiohttp.ClientSession() as session:
            body = {"model": "policy", "messages": messages, "stream": self.stream}
            async with session.post(f"{base_url}/chat/completions", json=body) as answer:
                said = await answer.text()
        if answer.status != 200:
            raise RuntimeError(said)
        choice = json.loads(said.removeprefix("data: ").partition("\n\n")[0])["choices"][0]
        return str((choice["delta"] if self.stream else choice["message"])["content"])


async def silent(data: dict[str, Any], base_url: str) -> float:
    """An agent without a request."""
    return 1.0


class Endless(Answers):
    """Each turn takes half a second, and none is the last."""

    def fails(self, action: str) -> Any:
        time.sleep(0.5)
        return None, 0.0, False, False, {}


class Logs(Answers):
    """Three turns. Its calls are lines of ``calls.jsonl``; a step with a file ``fail-TURN`` fails once."""

    def __init__(self, folder: str, gone: bool = False) -> None:
        self.folder, self.gone = Path(folder), gone

    def note(self, call: str, **said: Any) -> None:
        with (self.folder / "calls.jsonl").open("a") as log:
            log.write(json.dumps({"call": call, **said}) + "\n")

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.turn = 0
        self.note("reset")
        return None, {}

    def step(self, action: str, key: str) -> Step:  # type: ignore[override]
        self.turn += 1
        self.note("step", turn=self.turn, action=action, key=key)
        if (flag := self.folder / f"fail-{self.turn}").exists():
            flag.unlink()
            raise ConnectionResetError("once")
        return "again", 1.0, self.turn == 3, False, {}


class Resumes(Logs):
    """Gives its state; gone: it cannot be restored."""

    def state(self) -> Any:
        return {"turn": self.turn}

    def restore(self, state: Any) -> None:
        self.note("restore", turn=state["turn"])
        if self.gone:
            raise RuntimeError("no such sandbox")
        self.turn = state["turn"]


class GivesATuple(GivesAnObject):
    """Its state comes back as another one."""

    def state(self) -> Any:
        return {"at": (1, 2)} if self.question == FAILS else None


class KeyOfItsOwn(Answers):
    """A parameter ``key`` with a default was there before."""

    def step(self, action: str, key: str = "own") -> Step:
        return "", float(key == "own"), True, False, {}
