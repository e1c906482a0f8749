"""A server with an HTTP service beside it, for tests, asked by the standard library alone."""

import http.client
import json
from typing import NamedTuple

import msgspec

GENEROUS_S = 60
TOKEN = "token-of-the-test-service"  # noqa: S105


class HttpAnswer(NamedTuple):
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def msgpack(self):
        return msgspec.msgpack.decode(self.body)


class Asking:
    """One service; every request is a connection of its own."""

    def __init__(self, host, port):
        self.host, self.port = host, port

    def request(self, method, path, body=None, **headers):
        client = http.client.HTTPConnection(self.host, self.port, timeout=GENEROUS_S)
        client.request(method, path, body, {"Authorization": f"Bearer {TOKEN}"} | headers)
        answer = client.getresponse()
        found = HttpAnswer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        client.close()
        return found

    def call(self, action, **body):
        """The answer of a call that must succeed."""
        answer = self.refused(action, **body)
        assert answer.status == 200, answer.body
        return answer.json

    def refused(self, action, **body):
        return self.request("POST", f"/action/{action}", json.dumps(body), **{"Content-Type": "application/json"})
