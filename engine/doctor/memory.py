"""Where the memory went (systems: the memory doctor). Failing at the start and failing under load are different: the
first is arithmetic and happens every time, the second is growth."""

from __future__ import annotations

from typing import Final

from engine.doctor.figures import Death, Figures, Measured, Predicted, size
from engine.doctor.findings import Finding, Remedy, Report, Value, found
from engine.doctor.kinds import kv_dtype
from engine.doctor.pool import fits

PART: Final = "memory"
LEAST_TOKENS: Final = 64  # of a pool
KILLED: Final = -9
RECENT_S: Final = 86_400.0
SPARE_BYTES: Final = 2 * 2**30  # what a process may hold beyond its bill: libraries, copies on their way, scratch
_SAID = ("cannot be had", "out of memory", "MemoryError", "Cannot allocate", "bad_alloc", "ENOMEM")


def examine(figures: Figures) -> Report:
    """Findings of memory. Works on a node whose engine does not answer, by what is known of its last end."""
    notes = tuple(where(figures.predicted, figures.measured))
    owed, there = figures.predicted, figures.measured
    death = figures.death
    if not figures.answers and death is not None and not death.served:
        return Report(PART, (_at_start(owed, there, death),), notes)
    findings = []
    if death is not None and death.served and death.status == KILLED and death.age_s < RECENT_S:
        findings.append(_under_load(owed, there, death))
    if figures.answers and owed is not None and there is not None:
        findings += [one for one in (_overpromised(owed, there), _unaccounted(owed, there)) if one is not None]
    return Report(PART, tuple(findings), notes)


def where(owed: Predicted | None, there: Measured | None) -> list[str]:
    """Where the memory went, predicted against measured."""
    lines = []
    if owed is not None:
        loaded = f", {size(there.weights)} loaded" if there is not None and there.weights else ""
        lines.append(f"weights: {size(owed.weights_bytes)} by arithmetic{loaded}")
        each = f"{owed.pool_tokens:,} tokens of {owed.kv_bytes_per_token:,} B"
        place = "the device" if owed.on_device else "the process"
        lines.append(f"KV pool: {size(owed.kv_bytes)} of {place} ({each})")
        lines.append(f"host arena: up to {size(owed.arena_bytes)}, in shared memory")
    if there is not None:
        if there.resident is not None:
            lines.append(
                f"the engine's process: {size(there.resident)} resident, {size(there.shared or 0)} of it shared"
            )
        if there.device is not None:
            lines.append(f"device: {size(there.device_used or 0)} in use of {size(there.device)}")
        lines.append(f"workspaces of {there.sandboxes} sandboxes: up to {size(there.workspaces)}, in memory")
        lines.append(f"machine: {size(there.machine)}, of which {size(there.available)} could be had now")
    return lines


# -- at the start -----------------------------------------------------------------------------------------------------


def _at_start(owed: Predicted | None, there: Measured | None, death: Death) -> Finding:
    evidence: dict[str, Value] = {
        "weights_bytes": owed.weights_bytes if owed else None,
        "pool_bytes": owed.kv_bytes if owed else None,
        "arena_bytes": owed.arena_bytes if owed else None,
        "machine_bytes": there.machine if there else None,
        "available_bytes": there.available if there else None,
        "said": death.words,
    }
    if owed is None or there is None:
        return found("memory.start_failed", evidence, f"the engine did not start: {death.words}")
    room = there.device if owed.on_device and there.device is not None else there.machine
    fits_tokens = fits(owed, room)
    if fits_tokens < LEAST_TOKENS and (owed.weights_bytes > room or _is_memory(death)):
        cause = f"the weights are {size(owed.weights_bytes)} and there are {size(room)}: no pool fits beside them"
        return found("memory.never_fits", evidence, cause, _smaller_model(owed))
    if _is_memory(death) or owed.weights_bytes + owed.kv_bytes > room:
        cause = (
            f"the pool of {owed.pool_tokens:,} tokens takes {size(owed.kv_bytes)} beside {size(owed.weights_bytes)} of"
            f" weights, and there are {size(room)}; {fits_tokens:,} tokens fit"
        )
        evidence["fits_tokens"] = fits_tokens
        return found("memory.pool_too_large", evidence, cause, _four(owed, there, fits_tokens))
    return found(
        "memory.start_failed", evidence, f"the engine did not start, and not for want of memory: {death.words}"
    )


def _is_memory(death: Death) -> bool:
    """Whether it was memory, as far as its end tells: killed from outside, or by its words."""
    return death.status == KILLED or any(word in death.words for word in _SAID)


def _smaller_model(owed: Predicted) -> list[Remedy]:
    by_bits = "w4a16 or w8a16" if owed.on_device else "w4a8"
    return [
        Remedy("TENUTO_MODEL", "a model whose weights fit; `tenuto model list` names sizes", "another model"),
        Remedy(f"TENUTO_ENGINE_DTYPE={by_bits}", "the same model in fewer bytes", "other bits: run the evals"),
    ]


# -- under load -------------------------------------------------------------------------------------------------------


def _under_load(owed: Predicted | None, there: Measured | None, death: Death) -> Finding:
    evidence: dict[str, Value] = {
        "died_at": death.at,
        "machine_bytes": there.machine if there else None,
        "available_bytes": there.available if there else None,
        "arena_bytes": owed.arena_bytes if owed else None,
        "workspaces_bytes": there.workspaces if there else None,
        "resident_bytes": there.resident if there else None,
    }
    cause = f"the engine had served when it was ended by SIGKILL at {death.at}: it fits, until something grows"
    return found("memory.killed_under_load", evidence, cause, _four(owed, there, None))


def _overpromised(owed: Predicted, there: Measured) -> Finding | None:
    """What may still be taken, against what could be had."""
    promised = max(0, owed.on_host_bytes - (there.resident or 0)) + there.workspaces
    if promised <= there.available:
        return None
    evidence: dict[str, Value] = {
        "promised_bytes": promised,
        "available_bytes": there.available,
        "arena_bytes": owed.arena_bytes,
        "pool_bytes": owed.kv_bytes,
        "workspaces_bytes": there.workspaces,
        "resident_bytes": there.resident,
    }
    cause = f"{size(promised)} may still be taken, and {size(there.available)} could be had now"
    return found("memory.overpromised", evidence, cause, _four(owed, there, None))


def _unaccounted(owed: Predicted, there: Measured) -> Finding | None:
    if there.resident is None:
        return None
    own = there.resident - (there.shared or 0)
    expected = owed.on_host_bytes - owed.arena_bytes
    if own <= expected + SPARE_BYTES:
        return None
    evidence: dict[str, Value] = {
        "resident_bytes": there.resident,
        "expected_bytes": expected,
        "unaccounted_bytes": own - expected,
    }
    cause = f"the engine's process holds {size(own - expected)} beyond weights and pool"
    return found("memory.unaccounted", evidence, cause, [Remedy("restart the engine", "it starts small", "seconds")])


def _four(owed: Predicted | None, there: Measured | None, fits_tokens: int | None) -> list[Remedy]:
    """The four settings that move it."""
    kv = owed.kv_bytes_per_token if owed else 0
    freed = 1000 * kv
    tokens = f"={fits_tokens}" if fits_tokens else ""
    pool = f"{size(freed)} for each 1,000 tokens" if kv else "KV of a token for each token"
    choice = kv_dtype(owed.dtype, "triton" if owed.on_device else "cpu") if owed else None
    each = there.workspaces / there.sandboxes if there is not None and there.sandboxes else 256 * 2**20
    smaller = "nothing smaller runs on this backend"
    halves = f"{size(owed.kv_bytes * (1 - choice.factor))} of the pool" if owed and choice else smaller
    return [
        Remedy(f"TENUTO_KV_TOKENS{tokens}", pool, "fewer users at once; a restart", freed, "bytes"),
        Remedy(
            "tenuto tenants limit TENANT --sandboxes N",
            f"up to {size(each)} for each sandbox less, and the pages of its session",
            "calls wait for their turn",
            each,
            "bytes",
        ),
        Remedy(
            "context_policy: drop_tool_output, in agents",
            f"{size(kv * owed.context / 2)} for each session of half the context" if owed else "shorter contexts",
            "old outputs are forgotten",
            kv * owed.context / 2 if owed else 0.0,
            "bytes",
        ),
        Remedy(choice.setting if choice else "TENUTO_KV_DTYPE", halves, "other bits: run the evals; a restart"),
    ]
