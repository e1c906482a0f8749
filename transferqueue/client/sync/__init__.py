"""The API for threads. All but the loader is written by `python -m tests.sync_api` from `client/aio`: change it
there."""
