"""How models write tool calls, as data. Grammar, parser and renderer work from it, and know no model.

A message is text, then calls. Calls stand each between `marker` and `end`, or, where there is a `separator`, all of
them between one `marker` and one `end`. A call is an object of a name and of arguments, or the name, `between`, and the
arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import TemplateError


@dataclass(frozen=True)
class CallFormat:
    """One way of writing calls.

    marker, lead: what begins calls, and what follows it; without a marker, a message that begins as a call is one
    may_be_marked: a marker that such a message may have, though nobody asked for it
    separator: between calls that share a marker and an end; None: each has its own
    end: what follows a call, or the last one
    gap: what stands between calls that each have their own marker
    name_key, arguments_key: of the object; between: what stands between name and arguments where there is none
    more: members of the object after these, as they are written
    text_before: whether text may stand before calls
    several: whether a message may have more than one
    """

    name: str
    marker: str = ""
    may_be_marked: str = ""
    lead: str = ""
    separator: str | None = None
    end: str = ""
    gap: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    between: str = ""
    more: str = ""
    text_before: bool = True
    several: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that mean something, which may be tokens of their own."""
        return tuple(m for m in (self.marker, self.may_be_marked, self.between, self.end.strip()) if len(m) > 1)

    def before_arguments(self, name: str) -> str:
        """A call up to its arguments."""
        return "".join(text for text, _ in self._named(name))

    @property
    def after_arguments(self) -> str:
        return "" if self.between else f"{self.more}}}"

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls as they stand in a transcript: name and arguments of each."""
        return "".join(text for text, _ in self.pieces(calls))

    def pieces(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, bool]]:
        """The same in pieces, each with whether it is the format's own: what a call says spells no mark."""
        begin = self.marker + self.lead
        between = self.separator if self.separator is not None else self.end + self.gap + begin
        for index, (name, arguments) in enumerate(calls):
            yield between if index else begin, True
            yield from self._named(name)
            yield json.dumps(arguments, ensure_ascii=False), False
            yield self.after_arguments, True
        if calls:
            yield self.end, True

    def _named(self, name: str) -> list[tuple[str, bool]]:
        if self.between:
            return [(name, False), (self.between, True)]
        return [(f'{{"{self.name_key}": ', True), (json.dumps(name), False), (f', "{self.arguments_key}": ', True)]


HERMES = CallFormat("hermes", marker="<tool_call>", lead="\n", end="\n</tool_call>", gap="\n")
LLAMA3 = CallFormat(
    "llama3", may_be_marked="<|python_tag|>", arguments_key="parameters", text_before=False, several=False
)
# One id for every call: results follow in the order of their calls.
CALL_ID = "tenuto000"
MISTRAL = CallFormat("mistral", marker="[TOOL_CALLS]", lead=" [", separator=", ", end="]", more=f', "id": "{CALL_ID}"')
MISTRAL_NAMED = CallFormat("mistral-named", marker="[TOOL_CALLS]", between="[ARGS]")
FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED)


def format_named(name: str) -> CallFormat | None:
    """The format of this name; None for auto, which leaves it to the template. Raises TemplateError."""
    found = next((kind for kind in FORMATS if kind.name == name), None)
    if found is None and name != "auto":
        known = ", ".join(kind.name for kind in FORMATS)
        raise TemplateError(f"{name[:80]!r} is no format of calls; use auto, or one of {known}")
    return found
