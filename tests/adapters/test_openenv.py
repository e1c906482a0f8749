"""Sessions of an OpenEnv server as environments: its texts, rewards and ends, and what fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.adapters.openenv_server import Calculator, calculator_server
from transferqueue.adapters.stages.openenv import OpenEnv
from transferqueue.adapters.stages.reward_functions import may_pass


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Calculator]]:
    with calculator_server() as served:
        yield served


def test_an_episode_is_a_session_with_the_columns_of_its_row(served: tuple[str, Calculator]) -> None:
    url, calculator = served
    with closing(OpenEnv(url + "/", observation="result")) as environment:
        assert environment.reset(seed=7, options={"prompt": "12+34=", "level": 2}) == (None, {})
        assert calculator.resets[-1] == {"level": 2, "seed": 7}
        assert environment.step("12+34") == ("46", 0.0, False, False, {})
        assert environment.step("46") == ("46", 1.0, True, False, {})
    environment.close()


def test_an_observation_is_all_its_fields_unless_one_is_named(served: tuple[str, Calculator]) -> None:
    with closing(OpenEnv(served[0])) as environment:
        assert environment.step("1+2")[0] == '{"result": "3", "terms": [1, 2]}'
    with closing(OpenEnv(served[0], observation="terms")) as environment:
        assert environment.step("1+2")[0] == "[1, 2]"
    with (
        closing(OpenEnv(served[0], observation="text")) as environment,
        pytest.raises(ValueError, match="an observation with result, terms, and without 'text'"),
    ):
        environment.step("1+2")


def test_an_error_of_the_environment_is_none_of_the_network(served: tuple[str, Calculator]) -> None:
    with closing(OpenEnv(served[0])) as environment, pytest.raises(RuntimeError, match="division by zero") as error:
        environment.step("crash")
    assert not may_pass(error.value)


def test_a_session_that_is_refused_or_ends_may_be_tried_again(served: tuple[str, Calculator]) -> None:
    url, calculator = served
    with closing(OpenEnv(url)) as environment, pytest.raises(OSError, match=r"ended the session \(CLOSE") as error:
        environment.step("gone")
    assert may_pass(error.value)
    calculator.is_full = True
    with closing(OpenEnv(url)) as environment, pytest.raises(OSError, match="no session is free"):
        environment.reset()
    calculator.is_full = False
    with closing(OpenEnv("http://127.0.0.1:1")) as environment, pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
        environment.reset()


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_session_that_http_refuses_may_be_tried_again(served: tuple[str, Calculator], status: int) -> None:
    url, calculator = served
    calculator.status = status
    with closing(OpenEnv(url)) as environment, pytest.raises(OSError, match=rf"refused the session: {status}") as error:
        environment.reset()
    assert may_pass(error.value)
    calculator.status = 0
    with closing(OpenEnv(url)) as environment:
        environment.reset()
