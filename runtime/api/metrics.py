"""`/v1/admin/metrics`: the installation's figures for Prometheus. Prometheus sends an admin key as its
bearer token.

Times are in seconds. What a node does not answer is left out, and `tenuto_node_answers` of it is 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response

from runtime.api.admin import state_of
from runtime.api.admin_attention import needs_attention
from runtime.api.admin_kv import ASK_S
from runtime.api.asking import of_nodes
from runtime.api.guard import Db, Tenant, admin
from runtime.store import fleet, search

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(admin)])

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_SAMPLE: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

# Every metric, its kind and what it says. Alerts (deploy/alerts.yml) use these names.
METRICS: Final[Mapping[str, tuple[str, str]]] = {
    "tenuto_sessions": ("gauge", "Sessions by state."),
    "tenuto_nodes": ("gauge", "Nodes by state."),
    "tenuto_node_heartbeat_age_seconds": ("gauge", "Since a node last beat."),
    "tenuto_node_answers": ("gauge", "1 where the node's engine answered this scrape."),
    "tenuto_nodes_away_sessions": ("gauge", "Open sessions of nodes that do not beat."),
    "tenuto_questions_open": ("gauge", "What sessions wait for a person with, by kind."),
    "tenuto_sessions_need_attention": (
        "gauge",
        "Sessions that are stuck, failed or retried; 20 of each at most.",
    ),
    "tenuto_workflow_tasks_failing": ("gauge", "Workflows whose tasks fail again and again."),
    "tenuto_temporal_answers": ("gauge", "1 where Temporal answered this scrape."),
    "tenuto_messages_waiting": ("gauge", "Accepted messages that no step has taken yet."),
    "tenuto_sandboxes_live": ("gauge", "Sandboxes that sessions have."),
    "tenuto_sandbox_pool_ready": ("gauge", "Sandboxes that a node keeps ready."),
    "tenuto_sandbox_pool_failing": ("gauge", "1 where a node cannot start sandboxes."),
    "tenuto_step_seconds": ("gauge", "Of the newest 2,000 steps, by kind and quantile."),
    "tenuto_tokens_today": ("gauge", "Sampled today (UTC), and of prompts by where their KV came from."),
    "tenuto_api_requests_total": ("counter", "Requests that this process answered."),
    "tenuto_api_failed_total": ("counter", "Of these, with 5xx."),
    "tenuto_api_streams_open": ("gauge", "Event streams that are followed."),
    "tenuto_engine_waiting": ("gauge", "Requests that wait for the engine."),
    "tenuto_engine_running": ("gauge", "Requests that are on the engine."),
    "tenuto_engine_pool_pages": ("gauge", "Pages of the device, by kind."),
    "tenuto_engine_preemptions_total": ("counter", "Requests that gave their pages back."),
    "tenuto_engine_seconds": ("histogram", "What the engine measures of itself, by name."),
    "tenuto_tier_used_bytes": ("gauge", "Bytes that a tier holds."),
    "tenuto_tier_budget_bytes": ("gauge", "Bytes that a tier may hold."),
    "tenuto_tier_hits_total": ("counter", "Pages that were found."),
    "tenuto_tier_quarantined_total": ("counter", "Pages that were not what they should be; they are computed again."),
    "tenuto_tier_io_errors_total": ("counter", "Reads and writes that failed."),
    "tenuto_books_balance": ("gauge", "1 where an engine's account of its pages adds up."),
}


@dataclass
class Exposition:
    """Samples by metric, written in the order of METRICS."""

    _samples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, value: float | None, suffix: str = "", /, **labels: object) -> None:
        """What is not known is left out."""
        if value is None:
            return
        assert name in METRICS, name
        told = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
        line = f"{name}{suffix}{{{told}}} {value}" if told else f"{name}{suffix} {value}"
        self._samples.setdefault(name, []).append(line)

    def text(self) -> str:
        lines: list[str] = []
        for name, (kind, about) in METRICS.items():
            if name in self._samples:
                lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *self._samples[name]]
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@router.get("/metrics", response_class=Response, responses=_SAMPLE)
async def metrics(request: Request, db: Db, tenant: Tenant) -> Response:
    """The installation's figures, as Prometheus reads them."""
    told = Exposition()
    overview, nodes, attention, engines = await asyncio.gather(
        search.overview(db),
        fleet.nodes(db),
        needs_attention(request, db),
        of_nodes(request, db, tenant, "engine", {}, None, ASK_S),
    )
    _of_overview(told, overview, asdict(request.app.state.counts))
    _of_nodes(told, nodes)
    _of_attention(told, attention)
    for name, answer in engines:
        _of_engine(told, name, answer)
    return Response(told.text(), media_type=_TEXT)


def _of_overview(told: Exposition, overview: Mapping[str, Any], process: Mapping[str, Any]) -> None:
    for state, count in overview["sessions"].items():
        told.add("tenuto_sessions", count, state=state)
    told.add("tenuto_messages_waiting", overview["messages_waiting"])
    told.add("tenuto_sandboxes_live", overview["sandboxes_live"])
    for source, count in overview["tokens_today"].items():
        told.add("tenuto_tokens_today", count, source=source)
    told.add("tenuto_api_requests_total", process["requests"])
    told.add("tenuto_api_failed_total", process["failed"])
    told.add("tenuto_api_streams_open", process["streams_open"])


def _of_nodes(told: Exposition, nodes: Iterable[Mapping[str, Any]]) -> None:
    states: dict[str, int] = {}
    for row in nodes:
        states[state_of(row)] = states.get(state_of(row), 0) + 1
        told.add("tenuto_node_heartbeat_age_seconds", round(row["age_s"], 3), node=row["node_id"])
        pool = row["sandbox"].get("pool") or {}
        told.add("tenuto_sandbox_pool_ready", pool.get("ready"), node=row["node_id"])
        told.add("tenuto_sandbox_pool_failing", int(bool(pool.get("failure"))), node=row["node_id"])
    for state, count in states.items():
        told.add("tenuto_nodes", count, state=state)


def _of_attention(told: Exposition, attention: Any) -> None:
    for kind, count in attention.questions.items():
        told.add("tenuto_questions_open", count, kind=kind)
    for why in ("stuck", "failed", "retrying"):
        told.add("tenuto_sessions_need_attention", len(getattr(attention, why)), why=why)
    told.add("tenuto_nodes_away_sessions", sum(one.sessions for one in attention.nodes_away))
    told.add("tenuto_workflow_tasks_failing", attention.workflow_tasks_failing)
    told.add("tenuto_temporal_answers", int(attention.temporal == "ok"))
    for one in attention.latency:
        for quantile, value in (("0.5", one.p50), ("0.95", one.p95), ("0.99", one.p99)):
            told.add("tenuto_step_seconds", value, kind=one.kind, quantile=quantile)


def _of_engine(told: Exposition, node: str, answer: Mapping[str, Any]) -> None:
    told.add("tenuto_node_answers", int("error" not in answer), node=node)
    stats = answer.get("stats")
    if stats is None:
        return
    told.add("tenuto_engine_waiting", stats["waiting"], node=node)
    told.add("tenuto_engine_running", stats["running"], node=node)
    told.add("tenuto_engine_preemptions_total", stats["counters"]["preemptions"], node=node)
    told.add("tenuto_books_balance", int(stats["integrity"] == "ok"), node=node)
    for kind, pages in stats["pool"].items():
        told.add("tenuto_engine_pool_pages", pages, node=node, kind=kind)
    for name, found in stats["metrics"].items():
        if name.endswith("_s"):
            _histogram(told, found, node=node, name=name.removesuffix("_s"))
    for tier, counts in stats["tiers"].items():
        about = {"node": node, "tier": tier}
        told.add("tenuto_tier_used_bytes", counts["used_bytes"], **about)
        told.add("tenuto_tier_budget_bytes", counts["budget_bytes"], **about)
        told.add("tenuto_tier_hits_total", counts["hits"], **about)
        told.add("tenuto_tier_quarantined_total", counts["quarantined"], **about)
        told.add("tenuto_tier_io_errors_total", counts["io_errors"], **about)


def _histogram(told: Exposition, found: Mapping[str, Any], **labels: str) -> None:
    for bound, count in found["buckets"]:
        told.add("tenuto_engine_seconds", count, "_bucket", **labels, le=bound)
    told.add("tenuto_engine_seconds", found["count"], "_bucket", **labels, le="+Inf")
    told.add("tenuto_engine_seconds", found["sum"], "_sum", **labels)
    told.add("tenuto_engine_seconds", found["count"], "_count", **labels)
