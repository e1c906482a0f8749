"""An agent that calls an OpenAI-compatible endpoint, as an environment in Gymnasium's form.

The agent is a coroutine function ``run(data, base_url=…)``, or a class with such a method, and returns its reward. Its
endpoint is served here: a request for a chat completion is an observation, the next action is the answer, and the
return of the agent ends the episode. So any generator plays it, and its tokens are never made from text again.

1. The agent runs in the thread that calls `reset` and `step`, and only meanwhile.
2. An episode is one conversation. The first request has the messages of the row's prompt. Each further one has those of
   the request before, the answer, and new ones, which are the observation.
3. The player decides how tokens are drawn: of a request, `messages` and `stream` are read.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Mapping
from types import CoroutineType, FrameType
from typing import Any, Final

from aiohttp import web

from transferqueue.adapters.stages.agent_endpoint import (
    STREAM_END,
    event,
    event_stream,
    listen,
    refusal,
    request_body,
)
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.errors import UsageError

CANCEL_S: Final = 10.0
"""Time that an agent gets to end when its episode is over before it is."""
_MODEL: Final = "policy"

Message = dict[str, str]


class AgentEnvironment:
    """One episode of an agent. Blocks; its calls are made by one thread.

    Args:
        agent: ``module:name`` or ``file.py:name`` of the coroutine function or class.
        args: of the class, or further arguments of the function.
    """

    def __init__(self, agent: str, args: Mapping[str, Any]) -> None:
        made = load_callable(agent, "environment.agent")
        is_class = inspect.isclass(made)
        self._agent: Any = getattr(made(**args), "run", None) if is_class else made
        self._args: Mapping[str, Any] = {} if is_class else args
        if not inspect.iscoroutinefunction(self._agent):
            raise UsageError(f"agent {agent} has no coroutine function; write async def run(data, base_url)")
        self._loop = asyncio.new_event_loop()
        self._messages: list[Message] = []
        """Those of the conversation so far, with the answers."""
        self._asked: asyncio.Future[list[Message]] = self._loop.create_future()
        """New messages of the request that waits for its answer."""
        self._answer: asyncio.Future[str] = self._loop.create_future()
        self._coroutine: CoroutineType[Any, Any, Any] | None = None
        self._running: asyncio.Future[Any] = self._loop.create_future()
        self._server: web.AppRunner | None = None
        self._is_first = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[None, dict[str, Any]]:
        """Start the agent, and wait for its first request. options: the row, with its ``prompt``."""
        data = dict(options or {})
        prompt = data["prompt"]
        self._messages = [_plain(each) for each in ([_of_user(prompt)] if isinstance(prompt, str) else prompt)]
        self._loop.run_until_complete(self._start(data))
        if self._next() is None:
            raise UsageError("the agent returned without a request to its model; a row has at least one answer")
        return None, {}

    def step(self, action: str) -> tuple[list[Message] | None, float, bool, bool, dict[str, Any]]:
        """Answer the request, and wait for the next one or the end."""
        self._messages.append({"role": "assistant", "content": action})
        self._asked = self._loop.create_future()
        self._answer.set_result(action)
        said = self._next()
        if said is None:
            return None, float(self._running.result()), True, False, {}
        return said, 0.0, False, False, {}

    def waits_at(self) -> FrameType | None:
        """Return the frame of the agent while it awaits something; None while it runs."""
        coroutine = self._coroutine
        return None if coroutine is None or coroutine.cr_await is None else coroutine.cr_frame

    def close(self) -> None:
        """End the agent and its endpoint. A second call does nothing."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._end())
            self._loop.close()

    # ------------------------------------------------------------ on the loop

    async def _start(self, data: dict[str, Any]) -> None:
        token = secrets.token_urlsafe(16)
        self._server, url = await listen(f"/{token}/v1/{{path:.+}}", self._respond, "127.0.0.1")
        self._coroutine = self._agent(data, base_url=f"{url}/{token}/v1", **self._args)
        self._running = asyncio.ensure_future(self._coroutine)

    def _next(self) -> list[Message] | None:
        """Let the agent run to its next request. Returns its new messages; None at its end. Raises what it raises."""
        waits = {self._asked, self._running}
        self._loop.run_until_complete(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
        if self._asked.done():
            return self._asked.result()
        self._running.result()
        return None

    async def _end(self) -> None:
        self._answer.cancel()
        self._running.cancel()
        await asyncio.wait({asyncio.gather(self._running, return_exceptions=True)}, timeout=CANCEL_S)
        if self._server is not None:
            await self._server.cleanup()

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["path"] == "models":
            return web.json_response({"object": "list", "data": [{"id": _MODEL, "object": "model"}]})
        try:
            body = await request_body(request)
            said = self._new_messages(request.match_info["path"], body)
        except UsageError as error:
            return refusal(400, str(error))
        self._answer = self._loop.create_future()
        self._asked.set_result(said)
        return await _completion(request, body, await self._answer)

    def _new_messages(self, path: str, body: Mapping[str, Any]) -> list[Message]:
        """Take the messages of a request, and return the new ones. Raises `UsageError` for one that is not answered."""
        if path != "chat/completions" or body.get("tools") or body.get("n") not in (None, 1):
            raise UsageError(
                f"{path} with {', '.join(body)}: an agent of a job asks for one chat completion, without tools; name "
                "those in model.tools, and read the model's calls from its text"
            )
        if self._asked.done():
            raise UsageError("the agent has another request that waits for its answer; a row is one conversation")
        messages, known = [_plain(each) for each in body.get("messages") or []], self._messages
        if messages[: len(known)] != known or (len(messages) > len(known)) == self._is_first:
            at = next((at for at, each in enumerate(known) if messages[at : at + 1] != [each]), len(known))
            raise UsageError(
                f"message {at} of the agent's request does not continue the conversation of the row; begin with the "
                "messages of data['prompt'] alone, then give all of those so far, the answer as it was, and new ones"
            )
        self._messages, self._is_first = messages, False
        return messages[len(known) :]


def _of_user(text: str) -> Message:
    return {"role": "user", "content": text}


def _plain(message: Any) -> Message:
    """Return role and text of a message. Raises `UsageError` for one without."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError(f"the message {str(message)[:200]!r} has no role or no text; give both, and text alone")
    return {"role": role, "content": content}


async def _completion(request: web.Request, body: Mapping[str, Any], text: str) -> web.StreamResponse:
    message = {"role": "assistant", "content": text}
    is_stream = bool(body.get("stream"))
    completion = {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion.chunk" if is_stream else "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or _MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "delta" if is_stream else "message": message}],
    }
    if not is_stream:
        return web.json_response(completion)
    response = await event_stream(request)
    await response.write(event(completion) + STREAM_END)
    return response
