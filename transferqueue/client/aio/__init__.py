"""The asyncio API."""
