"""Who may see the page."""

from http import HTTPStatus

import pytest

from transferqueue.errors import UsageError
from transferqueue.transport import TcpAddress
from transferqueue.web.access import HEADERS, AccessPolicy, web_place

HOST = {"host": "127.0.0.1:8787"}


METRICS_TOKEN = "of-the-metrics"  # noqa: S105


@pytest.fixture
def access():
    return AccessPolicy(TcpAddress("127.0.0.1", 8787), "secret", METRICS_TOKEN)


def status(refusal):
    return refusal and refusal.status


def test_who_brings_the_token_is_let_in_by_any_of_three_ways(access):
    assert access.refuses("/", HOST, {}, "secret") is None
    assert access.refuses("/", HOST, {access.cookie: "secret"}) is None
    assert access.refuses("/", HOST | {"authorization": "Bearer secret"}, {}) is None


@pytest.mark.parametrize("shown", ["", "secre", "secret ", "sécret", "\0"])
@pytest.mark.parametrize("path", ["/", "/metrics"])
def test_who_does_not_is_not(access, path, shown):
    assert status(access.refuses(path, HOST, {access.cookie: shown}, shown or None)) is HTTPStatus.UNAUTHORIZED


def test_the_token_of_the_metrics_opens_the_metrics_and_nothing_else(access):
    bearer = HOST | {"authorization": f"Bearer {METRICS_TOKEN}"}
    assert access.refuses("/metrics", bearer, {}) is None
    for path in ("/", "/events", "/metrics/", "/metrics/x", "//metrics", "/METRICS", "/action/seal"):
        assert status(access.refuses(path, bearer, {})) is HTTPStatus.FORBIDDEN
    assert access.refuses("/metrics", HOST | {"authorization": "Bearer secret"}, {}) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example:8787", "127.0.0.1", "127.0.0.1:8788", "127.0.0.1:8787.evil.example"]
)
def test_a_name_that_is_not_the_pages_gets_nothing_even_with_the_token(access, host):
    assert status(access.refuses("/", {"host": host}, {}, "secret")) is HTTPStatus.MISDIRECTED_REQUEST


def test_another_site_gets_nothing_even_with_the_token(access):
    assert status(access.refuses("/", HOST | {"origin": "http://evil.example"}, {}, "secret")) is HTTPStatus.FORBIDDEN
    assert status(access.refuses("/", HOST | {"origin": "null"}, {}, "secret")) is HTTPStatus.FORBIDDEN
    assert access.refuses("/", HOST | {"origin": "http://localhost:8787"}, {}, "secret") is None


def test_the_page_loads_nothing_from_elsewhere():
    policy = dict(one.split(" ", 1) for one in HEADERS["Content-Security-Policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}


def test_a_port_alone_is_at_this_machine():
    assert web_place("8787") == TcpAddress("127.0.0.1", 8787)
    assert web_place("[::1]:8787") == TcpAddress("[::1]", 8787)


@pytest.mark.parametrize("where", ["0.0.0.0:8787", "*:8787", "10.0.0.7:8787"])
def test_a_page_for_other_machines_is_refused_with_the_way_to_have_it(where):
    with pytest.raises(UsageError, match=r"is not encrypted; give 127\.0\.0\.1:PORT, .* ssh -L"):
        web_place(where)
    with pytest.raises(UsageError, match="has port 'x'"):
        web_place("x")
