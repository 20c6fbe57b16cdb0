"""How a child process last ended, other than by being stopped: kept beside its log, for whoever asks why."""

from __future__ import annotations

import contextlib
import datetime
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from runtime.home import write_private

_WORDS: Final = 2000  # characters
_ONE_DAY_S: Final = 86_400.0
_SUFFIX: Final = ".death.json"


@dataclass(frozen=True)
class Death:
    """`at`: ISO 8601, UTC; `served`: it had been ready; `status`: as of a process, None where it could not be started;
    `how`: the same in words; `words`: its last."""

    name: str
    at: str
    served: bool
    status: int | None
    how: str
    words: str

    @property
    def age_s(self) -> float:
        ended = datetime.datetime.fromisoformat(self.at)
        return (datetime.datetime.now(datetime.UTC) - ended).total_seconds()


def note(logs: Path, name: str, *, served: bool, status: int | None, how: str, words: str) -> None:
    """Keep it in place of the one before. A disk that is full loses it and nothing else."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    death = Death(name, now, served, status, how, words[:_WORDS])
    with contextlib.suppress(OSError):
        write_private(_path(logs, name), json.dumps(asdict(death)) + "\n")


def last(logs: Path, name: str) -> Death | None:
    """None where it never ended so, or nothing of it can be read."""
    try:
        told = json.loads(_path(logs, name).read_text())
        death = Death(**{one.name: told[one.name] for one in fields(Death)})
        return death if death.age_s > -_ONE_DAY_S else None  # of a clock that is right now
    except (OSError, ValueError, KeyError, TypeError):
        return None


def everyone(logs: Path) -> list[Death]:
    """The last of each process, by name."""
    names = sorted(path.name.removesuffix(_SUFFIX) for path in logs.glob(f"*{_SUFFIX}"))
    return [death for name in names if (death := last(logs, name)) is not None]


def _path(logs: Path, name: str) -> Path:
    return logs / f"{name}{_SUFFIX}"
