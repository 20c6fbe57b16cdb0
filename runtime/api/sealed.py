"""Values of tools on their way into the record: those by name must be there, those that were given are sealed."""

from __future__ import annotations

from typing import Any

from runtime.api.models import children_of
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.sealing import LITERAL, Sealer
from runtime.store import Database, vault
from runtime.tools.kinds import SecretRef, with_values


def secrets_of(config: SessionConfig) -> set[str]:
    """Names of the secrets that a session's tools use, and those of the sessions that run as its tools."""
    values = [value for tool in config.declared for value in tool.secrets.values()]
    own = {value.secret for value in values if isinstance(value, SecretRef)}
    return own.union(*(secrets_of(child) for child in children_of(config)))


async def ensure_secrets(db: Database, tenant: str, config: SessionConfig) -> None:
    """Raises InvalidRequest where a tool uses a secret that is not there."""
    names = secrets_of(config)
    if missing := names - (await vault.sealed(db, tenant, names)).keys():
        name = min(missing)
        raise InvalidRequest(
            f"tools: there is no secret {name}; make it with PUT /v1/secrets/{name}",
            param="tools",
            code="secret_not_found",
        )


def as_kept(sealer: Sealer, tenant: str, config: SessionConfig) -> dict[str, Any]:
    """The configuration as its row has it: no value of a tool stands there as it is."""

    def seal(value: Any) -> Any:
        return {"sealed": sealer.seal(tenant, LITERAL, value)} if isinstance(value, str) else value

    made = config.model_dump()
    return {**made, "tools": [with_values(tool, seal) for tool in made["tools"]]}
