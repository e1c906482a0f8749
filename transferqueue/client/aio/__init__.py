"""The API for event loops. It is the source of the API for threads: `python -m tests.sync_api` writes `client/sync`
from it.

A cancelled wait leaves nothing behind, and the connection usable. Values over `INLINE_WORK_BYTES` are copied in a
thread; the caller must not change them before the call returns. Only the loaders and `awaitable` are written for one
API alone.
"""
