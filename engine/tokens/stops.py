"""Texts that end a message, found wherever tokens are cut; and the text that may be shown meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.tokens.vocabulary import StreamDecoder, Tokenizer


class StopText:
    """Token ids in, text out, up to the first stop text, without it: what may be the beginning of one is held back
    until it is known. Which one is first does not depend on how the tokens come: the one that is whole first, and of
    several that end together the longest. Control tokens are no text, so none of them is found in it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], shown: Collection[int] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer, shown)
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """What may be shown now; nothing any more once a stop text was found."""
        return self._told(self._decoder.push(ids))

    def finish(self) -> str:
        """What is left at the end of the message."""
        told = self._told(self._decoder.finish())
        held, self._held = self._held, ""
        return told + held

    @classmethod
    def ends(cls, tokenizer: Tokenizer, stops: Sequence[str], ids: Sequence[int]) -> bool:
        """Whether one of them is in the text of these tokens."""
        watch = cls(tokenizer, stops)
        watch.push(ids)
        return watch.found is not None

    def _told(self, text: str) -> str:
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        kept = self._kept(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _kept(self, text: str) -> int:
        """Characters at the end that a stop text may begin with."""
        most = max((len(stop) for stop in self._stops), default=1) - 1
        return next(
            (n for n in range(min(most, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0
        )
