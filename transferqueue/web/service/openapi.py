"""Description of the HTTP service: an OpenAPI 3.1 document and a page for people. Does no I/O.

Both come from the structs that the calls read (`schemas`), so they agree with the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from inspect import cleandoc
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.web.service.actions import ACTIONS, Action
from transferqueue.web.service.bodies import BODY_BYTES_MAX, JSON, MSGPACK
from transferqueue.web.service.schemas import WAIT_S_MAX, ErrorBody

_REF: Final = "#/components/schemas/"
_REFUSALS: Final = {
    "400": "The call is wrong; the text names the mistake and the remedy. Nothing was changed.",
    "401": "No token, or a wrong one. (Plain text, as are 403 and 421.)",
    "404": "The table, stage, row or key does not exist.",
    "409": "AlreadyExists, Sealed, or LeaseExpired: other workers have the rows, or an earlier call did this.",
    "410": "EndOfTable: the table is sealed and drained; no more rows will come.",
    "413": f"More than {BODY_BYTES_MAX >> 20} MiB; send fewer rows at a time.",
    "503": "No room, or the queue's server is gone; call again.",
    "504": "DeadlineExceeded: not within timeout_s; the text names the missing rows and their holders. Call again.",
}
_ABOUT: Final = f"""\
The calls of AsyncFlow (arXiv 2507.01663, section 5) and StreamRL (arXiv 2504.15930, section 4), by which engines
share one queue without importing this library, and the calls that end a job. Bodies are JSON, or MessagePack if the
content type is {MSGPACK.media_type}; the answer has the encoding of the request. Send the token of the service as
Authorization: Bearer TOKEN. A call waits for at most timeout_s (up to {WAIT_S_MAX:g} s). When a lease ends, other
workers get its remaining rows."""


def described() -> dict[str, Any]:
    """The OpenAPI document."""
    kinds = [kind for action in ACTIONS for kind in (action.takes, action.gives)]
    _, schemas = msgspec.json.schema_components([*kinds, ErrorBody], ref_template=_REF + "{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "TransferQueue", "version": tq.__version__, "description": _ABOUT},
        "security": [{"token": []}],
        "paths": {f"/action/{action.name}": {"post": _operation(action)} for action in ACTIONS}
        | {"/metrics": {"get": _METRICS}},
        "components": {
            "schemas": {name: _plain(schema) for name, schema in schemas.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_METRICS: Final = {
    "operationId": "metrics",
    "summary": "Figures of the queue in the Prometheus text format, for the token of the service or of the metrics.",
    "responses": {"200": {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
}


_ARGUMENT: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def _operation(action: Action) -> dict[str, Any]:
    refused: dict[str, dict[str, Any]] = {status: {"description": text} for status, text in _REFUSALS.items()}
    for status, refusal in refused.items():
        if status != "401":
            refusal |= {"content": _content(ErrorBody)}
    return {
        "operationId": action.name,
        "summary": action.about,
        "requestBody": {"required": True, "content": _content(action.takes)},
        "responses": {"200": {"description": _doc(action.gives), "content": _content(action.gives)}} | refused,
    }


def _content(kind: Any) -> dict[str, Any]:
    schema = {"$ref": f"{_REF}{kind.__name__}"}
    return {codec.media_type: {"schema": schema} for codec in (JSON, MSGPACK)}


def _doc(kind: Any) -> str:
    return " ".join(cleandoc(kind.__doc__ or "").partition("\nArgs:\n")[0].split())


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose description is of one line; each line of its ``Args:`` describes the property of that name."""
    if "description" not in schema:
        return schema
    about, _, arguments = cleandoc(schema["description"]).partition("\nArgs:\n")
    plain = schema | {"description": " ".join(about.split())}
    for name, text in _ARGUMENT.findall(arguments):
        explained = plain["properties"][name] | {"description": " ".join(text.split())}
        plain["properties"] = plain["properties"] | {name: explained}
    return plain


# ---------------------------------------------------------------- the page


def shown(document: Mapping[str, Any]) -> bytes:
    """The document as one HTML page without scripts; it loads nothing but `/service.css` beside it."""
    return "".join(_page(document)).encode()


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    about = document["info"]
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>TransferQueue: HTTP service</title>'
    yield (
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" '
        'href="/service.css">'
    )
    yield f"</head><body><main><h1>TransferQueue {escape(about['version'])}: HTTP service</h1>"
    yield f"<p>{escape(about['description'])}</p>"
    yield (
        '<p>The same for programs: <a href="/openapi.json">openapi.json</a>. Figures: <a '
        'href="/metrics">metrics</a>.</p>'
    )
    yield f"<pre>{escape(_EXAMPLE)}</pre>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _shown_operation(f"{method.upper()} {path}", operation)
    yield "<h2>Refusals</h2><table>"
    yield from (f"<tr><td>{status}</td><td>{escape(text)}</td></tr>" for status, text in _REFUSALS.items())
    yield "</table>"
    for name, schema in document["components"]["schemas"].items():
        yield from _shown_schema(name, schema)
    yield "</main></body></html>\n"


_EXAMPLE: Final = """\
curl http://127.0.0.1:8788/action/get_experience_data \\
     -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" \\
     -d '{"experience_consumer_stage": "rollout", "experience_count": 8, "at_least": 1, "timeout_s": 60}'"""


def _shown_operation(name: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2><p>{escape(operation['summary'])}</p>"
    if "requestBody" not in operation:
        return
    takes, gives = (
        body["content"][JSON.media_type]["schema"] for body in (operation["requestBody"], operation["responses"]["200"])
    )
    yield f"<p>takes {_type(takes)}, gives {_type(gives)}</p>"


def _shown_schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p><table>'
    required = set(schema.get("required", ()))
    for member, kind in schema.get("properties", {}).items():
        default = "required" if member in required else f"default {JSON.encode(kind.get('default')).decode()}"
        about = escape(kind.get("description", ""))
        cells = (f"<code>{escape(member)}</code>", _type(kind), escape(default), about)
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with links to the schemas that it names."""
    if "$ref" in schema:
        name = re.sub(f"^{re.escape(_REF)}", "", schema["$ref"])
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(escape(JSON.encode(option).decode()) for option in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        return (
            f"object of {_type(inner)}" if isinstance(inner := schema.get("additionalProperties"), dict) else "object"
        )
    return escape(" ".join(["base64" if "contentEncoding" in schema else str(schema.get("type", "anything"))]))
