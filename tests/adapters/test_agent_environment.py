"""The endpoint of an agent as an environment: what it answers, and that nothing of it stays."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from transferqueue.adapters.stages.agent_environment import AgentEnvironment

seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


async def asks(data: dict[str, Any], base_url: str, **more: Any) -> float:
    """Ask once for the prompt, with more fields."""
    body = {"messages": [{"role": "user", "content": data["prompt"]}], **more}
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base_url}/models") as answer:
                seen.append(await answer.json())
            async with session.post(f"{base_url}/chat/completions", json=body) as answer:
                seen.append(await answer.json())
    finally:
        seen.append(base_url)
    return 0.5


def opened(**args: Any) -> AgentEnvironment:
    return AgentEnvironment(f"{__name__}:asks", args)


def test_the_answer_to_a_request_is_the_action() -> None:
    environment = opened(model="mine")
    assert environment.reset(options={"prompt": "2+2"}) == (None, {})
    assert environment.step("4") == (None, 0.5, True, False, {})
    environment.close()
    models, answer, _ = seen
    assert models["data"][0]["id"] == "policy"
    assert (answer["model"], answer["choices"][0]["message"]) == ("mine", {"role": "assistant", "content": "4"})


@pytest.mark.parametrize("more", [{"tools": [{"type": "function"}]}, {"n": 2}])
def test_a_request_that_no_turn_answers_is_refused(more: dict[str, Any]) -> None:
    environment = opened(**more)
    with pytest.raises(ValueError, match="the agent returned without a request to its model"):
        environment.reset(options={"prompt": "2+2"})
    environment.close()
    assert "asks for one chat completion, without tools; name those in model.tools" in seen[1]["error"]["message"]


def test_an_agent_and_its_endpoint_end_with_the_episode() -> None:
    environment = opened()
    environment.reset(options={"prompt": "2+2"})
    environment.close()
    environment.close()
    address = urlsplit(seen[-1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=20).close()
