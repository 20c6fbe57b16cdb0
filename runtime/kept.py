"""A session's configuration as its row has it."""

from __future__ import annotations

from typing import Any

from runtime.config import SessionConfig
from runtime.sealing import LITERAL, Sealer
from runtime.tools.kinds import with_values


def as_kept(sealer: Sealer, tenant_id: str, config: SessionConfig) -> dict[str, Any]:
    """No value of a tool stands there as it is. Raises SealError without a key."""

    def seal(value: Any) -> Any:
        return {"sealed": sealer.seal(tenant_id, LITERAL, value)} if isinstance(value, str) else value

    made = config.model_dump()
    return {**made, "tools": [with_values(tool, seal) for tool in made["tools"]]}
