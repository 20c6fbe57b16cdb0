"""One process per engine: what one engine's threads do between its turns disturbs no other's."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.columns import Column, Course, sizes
from bench.compiled import BenchError
from bench.runners import open_runner

_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Spec:
    """What a worker runs: see `bench.runners.open_runner`."""

    name: str
    model: Path
    file: Path | None
    columns: tuple[Column, ...]
    threads: int
    options: dict[str, Any]


class Worker:
    """The parent's side. Raises BenchError where the engine cannot be had, or fails."""

    def __init__(self, spec: Spec) -> None:
        self.name = spec.name
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()
        self.about: dict[str, Any] = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def timing(self, column: str) -> dict[str, Any]:
        """`seconds`, `tokens` and `rows` of one timing."""
        timing: dict[str, Any] = self._ask("timing", column)
        return timing

    def alone(self, column: str) -> list[str]:
        rows: list[str] = self._ask("alone", column)
        return rows

    def close(self) -> None:
        self._end.close()
        self._process.join()

    def _ask(self, what: str, column: str) -> Any:
        self._end.send((what, column))
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._end.poll(_TIMEOUT_S):
                raise BenchError(f"{self.name} did not answer in {_TIMEOUT_S:.0f} s")
            status, value = self._end.recv()
        except EOFError as error:
            self._process.join()
            raise BenchError(f"the process of {self.name} ended with status {self._process.exitcode}") from error
        if status != "ok":
            raise BenchError(f"{self.name}: {value}")
        return value


def _serve(end: Connection, spec: Spec) -> None:
    try:
        runner = open_runner(spec.name, spec.model, spec.file, sizes(spec.columns, spec.threads), spec.options)
        course = Course(runner, spec.columns)
        end.send(("ok", runner.about))
        while True:
            what, column = end.recv()
            if what == "timing":
                end.send(("ok", asdict(course.measure(column))))
            else:
                end.send(("ok", course.alone(column)))
    except EOFError:
        os._exit(0)  # the parent is done; threads of foreign libraries are not waited for
    except BenchError as error:
        end.send(("failed", str(error)))
    except Exception:
        end.send(("failed", traceback.format_exc(limit=3)))


def open_workers(specs: Sequence[Spec]) -> tuple[dict[str, Worker], dict[str, str]]:
    """Workers by name, and why the others cannot be had."""
    workers: dict[str, Worker] = {}
    absent: dict[str, str] = {}
    for spec in specs:
        try:
            workers[spec.name] = Worker(spec)
        except BenchError as error:
            absent[spec.name] = str(error)
    return workers, absent
