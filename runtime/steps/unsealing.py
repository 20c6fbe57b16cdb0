"""Values of tools, opened for a call: what Postgres keeps sealed, and secrets by name, as they are at that moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.config import SessionConfig
from runtime.errors import TenutoError
from runtime.sealing import LITERAL, Sealer, SealError
from runtime.steps.services import Services
from runtime.store import vault
from runtime.tools.kinds import AnyTool, Sealed, SecretRef, Value, is_header_text
from runtime.tools.redacting import NOTHING, Redactor

CALLS = "calls"  # the name under which a think's arguments are sealed


class Unopened(TenutoError):
    """A tool cannot be run without a value that is not to be had; the message names it."""


@dataclass(frozen=True)
class Opened:
    """`kept`: sealed secrets by name."""

    sealer: Sealer
    tenant_id: str
    kept: Mapping[str, str] = field(default_factory=dict)
    redactor: Redactor = NOTHING

    def tool(self, tool: AnyTool) -> AnyTool:
        """With every value as plain text. Raises Unopened."""
        changed = {}
        for part in ("env", "headers"):
            values: Mapping[str, Value] = getattr(tool, part, {})
            if values:
                changed[part] = {name: self._text(value) for name, value in values.items()}
        for name, text in changed.get("headers", {}).items():
            if not is_header_text(text):
                raise Unopened(f"the secret in the header {name!r} cannot be sent: it must be printable ASCII")
        return tool.model_copy(update=changed) if changed else tool

    def _text(self, value: Value) -> str:
        try:
            if isinstance(value, Sealed):
                return self.sealer.open(self.tenant_id, LITERAL, value.sealed)
            if isinstance(value, SecretRef):
                if value.secret not in self.kept:
                    raise Unopened(f"the secret {value.secret} does not exist any more; set it again")
                return value.prefix + self.sealer.open(self.tenant_id, value.secret, self.kept[value.secret])
        except SealError as error:
            raise Unopened(f"the secret {error}") from None
        return value

    # Arguments that hold a secret are kept sealed beside what is shown of them.

    def hide(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Calls as the record keeps them: what `found` reads is what was given."""
        kept = []
        for call in calls:
            shown = self.redactor.json(call["arguments"])
            hidden = {**call, "arguments": shown}
            if shown != call["arguments"]:
                hidden["sealed"] = self.sealer.seal(self.tenant_id, CALLS, json.dumps(call["arguments"]))
            kept.append(hidden)
        return kept

    def found(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call that runs. Raises SealError."""
        if "sealed" not in call:
            return dict(call["arguments"])
        return dict(json.loads(self.sealer.open(self.tenant_id, CALLS, call["sealed"])))


async def opened(s: Services, tenant_id: str, config: SessionConfig, *, using: bool = False) -> Opened:
    """What a session's tools may use now. Without values it asks nobody. `using`: a call is about to."""
    values = [value for tool in config.declared for value in tool.secrets.values()]
    if not values:
        return Opened(s.sealer, tenant_id)
    names = {value.secret for value in values if isinstance(value, SecretRef)}
    found = Opened(s.sealer, tenant_id, await vault.sealed(s.db, tenant_id, names, using=using))
    return Opened(s.sealer, tenant_id, found.kept, Redactor(_known(found, values)))


def _known(found: Opened, values: Sequence[Value]) -> list[str]:
    """Whatever can be opened: what cannot is nothing that a tool could tell."""
    texts = []
    for value in values:
        try:
            text = found._text(value)
        except Unopened:
            continue
        texts += [text, text.removeprefix(value.prefix)] if isinstance(value, SecretRef) else [text]
    return texts
