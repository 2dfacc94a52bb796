"""Durable storage: the database, blobs, the data directory, migrations and retention. Runs in the API process."""

from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory

__all__ = ["DataDirectory", "Store"]
