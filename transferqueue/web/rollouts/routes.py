"""The routes of the browser of rows. One thread asks the record, so a slow question delays the next one and nothing
else of the page; a question has a deadline (`record.QUERY_S`), few may wait, and none waits whose client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from transferqueue.errors import Full
from transferqueue.web.rollouts.document import encoded
from transferqueue.web.rollouts.questions import GroupName, RowFilter, RowName, TableName, asked
from transferqueue.web.rollouts.record import RecordBrowser

WAITING_MAX: Final = 16
"""Questions that run or wait. A page asks one at a time."""
INDEX: Final = "/rollouts"

Endpoint = Callable[[Request], Awaitable[Response]]
AskedT = TypeVar("AskedT", bound=msgspec.Struct)


def rollouts(record: RecordBrowser | None, *, live: bool, why_not_live: str = "") -> dict[str, Endpoint]:
    """The routes, by path. record: None: the page shows a queue without a record. live: it shows a queue.
    why_not_live: the reason, of a run that may go on."""
    if record is None:
        return {INDEX: _without_record}
    questions = _Questions(record)

    async def index(_request: Request) -> Response:
        found = await asyncio.to_thread(record.index)  # lists a directory: no slow question delays the live view
        about = {"live": live, "why_not_live": why_not_live, "path": record.name}
        return _json(about | msgspec.structs.asdict(found))

    return {
        INDEX: index,
        f"{INDEX}/about": questions.answering(TableName, lambda wanted: record.about(wanted.table)),
        f"{INDEX}/rows": questions.answering(RowFilter, record.rows),
        f"{INDEX}/groups": questions.answering(RowFilter, record.groups),
        f"{INDEX}/row": questions.answering(RowName, record.row),
        f"{INDEX}/group": questions.answering(GroupName, record.group),
    }


class _Questions:
    """Runs questions about a record one after another."""

    def __init__(self, record: RecordBrowser) -> None:
        self._path = record.path
        self._waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")

    async def run(self, question: Callable[[], Any], request: Request) -> Any:
        """The answer to a question; None if the client of its request left before. `Full` if too many wait."""
        if self._waiting >= WAITING_MAX:
            raise Full(f"{WAITING_MAX} questions about {self._path} wait, which is the most; ask again in a moment")
        self._waiting += 1
        answer = asyncio.wrap_future(self._thread.submit(question))
        gone = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            self._waiting -= 1
            answer.cancel()  # so that a question which waits is never asked
            gone.cancel()

    def answering(self, kind: type[AskedT], question: Callable[[AskedT], Any]) -> Endpoint:
        """The endpoint that answers a question, whose words are of this kind."""

        async def answer(request: Request) -> Response:
            wanted = asked(kind, request.query_params)
            return _json(await self.run(lambda: question(wanted), request))

        return answer


async def _left(request: Request) -> None:
    """Returns when the client closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _without_record(_request: Request) -> Response:
    return _json({"live": True, "path": "", "tables": [], "damaged": []})


def _json(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")
