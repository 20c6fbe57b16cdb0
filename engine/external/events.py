"""Server-sent events, as the living standard has them: bytes in any pieces in, the data of each event out."""

from __future__ import annotations

import codecs

from engine.errors import RequestError

MAX_EVENT_CHARS = 16 * 1024 * 1024


class EventData:
    """Lines end with LF, CRLF or CR; comments and fields other than `data` are passed over."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._rest = ""
        self._data: list[str] = []
        self._size = 0

    @property
    def waits(self) -> bool:
        """Whether something came that no empty line has ended yet."""
        return bool(self._rest.strip() or self._data)

    def push(self, piece: bytes) -> list[str]:
        """Raises RequestError (bad_answer) for an event that does not end."""
        self._rest += self._decoder.decode(piece)
        held = self._rest.endswith("\r")  # the other half of a line's end may follow
        text = self._rest[:-1] if held else self._rest
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._rest = rest + ("\r" if held else "")
        told = [data for line in lines if (data := self._line(line)) is not None]
        if self._size + len(self._rest) > MAX_EVENT_CHARS:
            raise RequestError("bad_answer", f"the server sent an event of more than {MAX_EVENT_CHARS} characters")
        return told

    def finish(self) -> list[str]:
        """The stream has ended: an event that only lacks its empty line counts."""
        return self.push(b"\n\n") if self.waits else []

    def _line(self, line: str) -> str | None:
        if not line:
            data, self._data, self._size = self._data, [], 0
            return "\n".join(data) if data else None
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
            self._size += len(value)
        return None
