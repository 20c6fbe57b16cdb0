"""What the agent answers when it will not do something."""

from __future__ import annotations


class Refused(Exception):
    """A request that will not be done; `code` is what the client's error tree is built from."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
