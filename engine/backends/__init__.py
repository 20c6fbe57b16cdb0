"""Backends turn tiles of tokens into logits over a pool of KV pages; see `engine.backends.face`."""

from engine.backends.face import Backend, Tile

__all__ = ["Backend", "Tile"]
