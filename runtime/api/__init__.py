"""The HTTP face: sessions in, events out. Everything it accepts is a row in Postgres before it answers."""

from runtime.api.app import make_app

__all__ = ["make_app"]
