"""The doctor's figures of a node: from what its engine says, or, where that is away, from what is known of its last end
and what its settings come to by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine import ModelError, doctor
from engine.memory_use import Bill, bill, machine_memory
from engine.modelfile import open_model
from engine.precision import Precision
from runtime import deaths
from runtime.errors import StartupError
from runtime.seats import Seat, seats
from runtime.settings import Settings

PARTS = tuple(doctor.PARTS)


def seats_here(settings: Settings) -> dict[str, Seat]:
    """Nodes of this home, by name; none where the settings name none."""
    try:
        return {seat.settings.node_id: seat for seat in seats(settings)}
    except StartupError:
        return {}


def death_of(settings: Settings, node: str) -> deaths.Death | None:
    """How the node's engine last ended, if this home has it."""
    seat = seats_here(settings).get(node)
    return deaths.last(settings.logs_dir, seat.engine) if seat is not None else None


def of_engine(node: str, told: Mapping[str, Any], death: deaths.Death | None) -> doctor.Figures:
    """Of an engine that answers; `told`: as the node's errand has it."""
    space = told["workspaces"]
    return doctor.figures(
        node,
        told["card"],
        told["stats"],
        told["engine"],
        workspaces=space["bytes"],
        sandboxes=space["sandboxes"],
        death=_death(death),
    )


def of_silence(settings: Settings, node: str, why: str) -> doctor.Figures:
    """Of a node whose engine does not answer. Blocking: it may look into the model's file."""
    seat = seats_here(settings).get(node)
    owed = None if seat is None else _owed(settings, seat)
    machine, available = machine_memory()
    return doctor.Figures(
        node,
        answers=False,
        why_not=why,
        predicted=None if owed is None else doctor.predicted(asdict(owed)),
        measured=None if seat is None else doctor.Measured(machine, available),
        death=_death(death_of(settings, node)),
    )


def reports(figures: doctor.Figures, part: str | None = None) -> list[dict[str, Any]]:
    """As JSON; `id` is the node's name and the part's."""
    return [
        {"id": f"{figures.node}/{one.part}", "node": figures.node, **asdict(one)}
        for one in doctor.examine(figures, part)
    ]


def _death(death: deaths.Death | None) -> doctor.Death | None:
    if death is None:
        return None
    words = death.words if death.words not in ("", "none") else death.how
    return doctor.Death(death.at, death.served, death.status, words, max(0.0, death.age_s))


def _owed(settings: Settings, seat: Seat) -> Bill | None:
    """What the seat's engine takes by arithmetic; None where its model is not here."""
    try:
        with open_model(settings.model_path) as model:
            facts = model.facts()
    except (ModelError, OSError, ValueError):
        return None
    precision = Precision(settings.engine_dtype, settings.kv_dtype)
    has_gpu = settings.engine_backend == "auto" and Path("/dev/nvidia0").exists()
    on_device = settings.engine_backend == "triton" or has_gpu
    return bill(facts, precision, settings.kv_tokens, seat.settings.host_kv_bytes, on_device=on_device)
