"""A client of OpenEnv's servers, as an environment in Gymnasium's form with texts.

An episode is a session: a WebSocket at ``/ws`` of the server, over which each message is a JSON object with ``type``
and ``data``. ``reset`` (with the seed and the row's columns) and ``step`` (with the action) are answered by an
``observation``, whose data has ``observation``, ``reward`` and ``done``, or by an ``error``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Largest answer; one with a longer text is refused by the job anyway."""
CONNECT_S: Final = 30.0
_FULL: Final = "CAPACITY_REACHED"
_PROMPT: Final = "prompt"


class OpenEnv:
    """One session. Blocks; its calls are made by one thread. Errors of the network are `OSError`.

    Args:
        url: of the server, ``http://`` or ``ws://``.
        action: the field of an action that gets the text of a turn; default "message".
        observation: the field of an observation that is read; default "": all fields, as JSON.
    """

    def __init__(self, url: str, *, action: str = "message", observation: str = "") -> None:
        self._url = f"{url.rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode. options: columns of the row, which the environment's reset gets by their names."""
        columns = {name: value for name, value in (options or {}).items() if name != _PROMPT}
        answer = self._ask("reset", columns if seed is None else {**columns, "seed": seed})
        return self._text(answer) or None, {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act."""
        answer = self._ask("step", {self._action: action})
        return self._text(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")), False, {}

    def close(self) -> None:
        """End the session. A second call does nothing."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._close())
            self._loop.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        said = self._loop.run_until_complete(self._exchange(json.dumps({"type": kind, "data": data})))
        answer = said.get("data")
        if said.get("type") == "error":
            text = f"{self._url} says {json.dumps(answer)}"
            raise ConnectionError(text) if _FULL in text else RuntimeError(text)
        if said.get("type") != "observation" or not isinstance(answer, dict):
            raise ValueError(f"{self._url} answered {kind} with {str(said)[:200]}; OpenEnv gives an observation")
        return answer

    async def _exchange(self, message: str) -> Mapping[str, Any]:
        if self._socket is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=CONNECT_S))
            try:
                self._socket = await self._session.ws_connect(self._url, max_msg_size=MESSAGE_BYTES_MAX)
            except aiohttp.ClientError as error:  # such as an HTTP status, which is no OSError
                raise ConnectionError(f"{self._url} refused the session: {error}") from error
        await self._socket.send_str(message)
        said = await self._socket.receive()
        if said.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"{self._url} ended the session ({said.type.name})")
        answer = json.loads(said.data)
        return answer if isinstance(answer, dict) else {}

    async def _close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _text(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation", {})
        if not self._observation:
            return json.dumps(observation)
        if self._observation not in observation:
            raise ValueError(
                f"{self._url} gave an observation with {', '.join(observation)}, and without {self._observation!r}; "
                "name one of its fields (args.observation)"
            )
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value)
