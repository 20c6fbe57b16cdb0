"""What the kernels run on, and which configuration they take there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import triton

from engine.errors import BackendUnavailable

INTERPRETER = "interpreter"
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)  # as at decoration, when Triton reads it


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a kernel is compiled; a kernel's own tile sizes are fields of its own subclass."""

    num_warps: int = 4
    num_stages: int = 2


C = TypeVar("C", bound=Config)


def arch() -> str:
    """`sm_90`, `gfx942` and the like, of the active driver; `interpreter` where kernels are interpreted.

    Raises BackendUnavailable where Triton finds no device.
    """
    if INTERPRETED:
        return INTERPRETER
    target = _driver().get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]


def device() -> str:
    """The torch device of tensors that kernels take: `cuda` on a GPU, `cpu` in the interpreter and in the gate."""
    return "cpu" if INTERPRETED else str(_driver().get_active_torch_device().type)


def pick(table: Mapping[tuple[str, Any], C], key: object) -> C:
    """The configuration for this arch and `key`, or the one for any arch, or the one for anything.

    Raises BackendUnavailable where the table has none of them.
    """
    here = arch()
    for entry in ((here, key), ("*", key), (here, "*"), ("*", "*")):
        if entry in table:
            return table[entry]
    raise BackendUnavailable(f"no kernel configuration for {key!r} on {here}; the CPU backend runs it: backend = cpu")


def _driver() -> Any:
    try:
        return triton.runtime.driver.active
    except RuntimeError as error:
        raise BackendUnavailable(f"Triton finds no GPU to run on ({error}); set backend = cpu") from error
