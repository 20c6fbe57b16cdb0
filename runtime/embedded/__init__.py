"""Postgres and Temporal from the package index, run as supervised children and reached by address only."""

from runtime.embedded.postgres import PostgresServer
from runtime.embedded.temporal import TemporalServer

__all__ = ["PostgresServer", "TemporalServer"]
