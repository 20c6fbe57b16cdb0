"""The live timeline of a session: a table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tenuto import Event

_STYLES = {"running": "bold cyan", "completed": "green", "resuming": "bold yellow", "killed": "bold red"}


@dataclass
class _Row:
    kind: str
    state: str = "running"
    tokens: int = 0
    kv: list[str] = field(default_factory=list)  # where the pages went, in order
    notes: list[str] = field(default_factory=list)


@dataclass
class Timeline:
    """Feed it events; it keeps one row per step and where the KV is."""

    title: str
    console: Console
    rows: dict[int, _Row] = field(default_factory=dict)
    tiers: set[str] = field(default_factory=set)  # where the pages have been
    _live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Timeline]:
        if not self.console.is_terminal:
            self.console.print(f"\n{self.title}")
            yield self
            return
        with Live(self._render(), console=self.console, refresh_per_second=8) as live:
            self._live = live
            yield self
            live.update(self._render())
        self._live = None

    def say(self, note: str) -> None:
        """Something that happened to the session from outside."""
        if self.rows:
            row = self.rows[max(self.rows)]
            row.notes.append("kill -9")
            row.state = "killed"
        self._changed(f"    {note}")

    def feed(self, event: Event) -> None:
        line = self._apply(event)
        if line is not None:
            self._changed(line)

    def _apply(self, event: Event) -> str | None:
        data, step = event.data, event.step
        row = self.rows.get(step) if step is not None else None
        if event.type == "step.started" and step is not None:
            self.rows[step] = _Row(data["kind"])
            return f"  {step:>2} {data['kind']:<6} started on {data['node']}, epoch {data['epoch']}"
        if row is None:
            return None
        if event.type == "step.retrying":
            where = f"after token {data['keep']}" if row.kind == "think" else "with the call that was running"
            row.state = "resuming"
            row.notes.append(f"attempt {event.attempt} goes on {where}")
            return f"  {step:>2} {row.kind:<6} resumes: {row.notes[-1]}"
        if event.type == "model.delta":
            row.tokens = data["offset"] + len(data["token_ids"])
            row.state = "running"
            return "" if self._live else None
        if event.type == "step.completed":
            row.state = "completed"
            row.tokens = data.get("sampled", data.get("tokens", row.tokens))
            if data.get("kv", {}).get("device"):
                row.kv.append(f"{data['kv']['device']} tokens were on the device")
            return f"  {step:>2} {row.kind:<6} completed, {row.tokens} tokens"
        if event.type == "tool.started":
            row.notes.append(data["name"])
            return f"  {step:>2} tool   {data['name']} runs"
        if event.type.startswith("kv."):
            row.kv.append(_where(event))
            self.tiers.add(data.get("tier", "device"))
            return f"  {step:>2} kv     {row.kv[-1]}"
        return None

    def _changed(self, line: str) -> None:
        if self._live is not None:
            self._live.update(self._render())
        elif line:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, expand=False)
        for name, justify in (("step", "right"), ("", "left"), ("state", "left"), ("tokens", "right")):
            table.add_column(name, justify=justify, style="dim" if name == "step" else "")  # type: ignore[arg-type]
        table.add_column("kv")
        table.add_column("")
        for number, row in self.rows.items():
            state = Text(row.state, style=_STYLES.get(row.state, ""))
            kv, notes = Text(" > ".join(row.kv)), Text(", ".join(row.notes), style="dim")
            table.add_row(str(number), row.kind, state, str(row.tokens or ""), kv, notes)
        return Group(Text(f"\n{self.title}", style="bold"), table)


def _where(event: Event) -> str:
    """A few words on a KV event: what moved, where, how much, how long."""
    data, verb = event.data, event.type.removeprefix("kv.")
    if verb == "restored":
        sources = [f"{data[tier]} tokens from {tier}" for tier in ("host", "nvme") if data[tier]]
        return f"restored {', '.join(sources)}"
    if verb == "recomputed":
        return f"recomputed {data['tokens']} tokens"
    place = data.get("tier", {"pinned": "pinned", "released": "dropped"}.get(verb, "device"))
    return f"{place} {data['ms']:.0f} ms"
