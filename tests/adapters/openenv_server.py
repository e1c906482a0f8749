"""A server of OpenEnv's protocol for tests: a calculator. Each WebSocket at ``/ws`` is a session of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web

from transferqueue.adapters.engines.background_loop import BackgroundLoop


class Calculator:
    """The action ``{"message": "12+34"}`` is answered by the sum. A number ends the episode with the reward 1, another
    text with 0. "crash" is an error of the environment, "gone" ends the session, and "hang" is never answered."""

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []
        self.steps: list[str] = []
        self.ended = 0
        self.is_full = False
        self.status = 0
        """HTTP status that refuses each session; 0: none does."""

    async def session(self, request: web.Request) -> web.StreamResponse:
        if self.status:
            return web.Response(status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for said in socket:
            if said.type is not WSMsgType.TEXT:
                break
            message = json.loads(said.data)
            if message["type"] == "close" or message["data"].get("message") == "gone":
                break
            if (answer := self.answer(message["type"], message["data"])) is not None:
                await socket.send_str(json.dumps(answer))
        self.ended += 1
        await socket.close()
        return socket

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        if self.is_full:
            return {"type": "error", "data": {"message": "no session is free", "code": "CAPACITY_REACHED"}}
        if kind == "reset":
            self.resets.append(data)
            return {"type": "observation", "data": {"observation": {"result": ""}, "reward": None, "done": False}}
        said = data["message"]
        self.steps.append(said)
        if said == "hang":
            return None
        if said == "crash":
            return {"type": "error", "data": {"message": "division by zero", "code": "EXECUTION_ERROR"}}
        terms = [int(term) for term in said.split("+") if term.isdecimal() and term.isascii()]
        done = len(terms) < 2
        observation = {"result": str(sum(terms)), "terms": terms}
        reward = float(len(terms) == 1)
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


@contextmanager
def calculator_server() -> Iterator[tuple[str, Calculator]]:
    """Serve a calculator on a port of this machine; yields its address."""
    calculator = Calculator()
    app = web.Application()
    app.router.add_get("/ws", calculator.session)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    loop = BackgroundLoop("openenv")

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield loop.submit(start()).result(60), calculator
    finally:
        loop.submit(runner.cleanup()).result(60)
        loop.close()
