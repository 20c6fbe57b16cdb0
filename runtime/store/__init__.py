"""Postgres: the record of every session. Functions take a `Database`; each is one transaction, safe to repeat."""

from runtime.store.database import Database
from runtime.store.values import Attempt, Event, Owner, Session

__all__ = ["Attempt", "Database", "Event", "Owner", "Session"]
