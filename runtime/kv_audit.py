"""Disk, RAM and record compared: whether the pages that lie in the tiers are exactly those that open sessions name.

    record    keys that checkpoints of open sessions name (Postgres)
    engine    keys that its sessions hold: the record's, and those that a think under way runs on or looks for
    tiers     keys in host memory, on NVMe, in the shared store; each page read and verified
    orphan    a page in a tier that neither the record nor the engine names

A page that is named and in no tier was evicted, lawfully: it will be computed again. It is counted, no flaw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine import EngineClient
from runtime.store import Database

_BATCH = 100_000  # keys in a frame
_NAMED = (
    "SELECT session_id, encode(key, 'hex') AS key FROM checkpoints JOIN sessions s USING (session_id),"
    " unnest(kv_new) AS key WHERE s.state NOT IN ('cancelled', 'completed')"
)


@dataclass(frozen=True)
class KvAudit:
    """`orphans`: by tier. `strangers`: sessions that the engine holds pages of and the record does not know as open.
    `findings`: what is wrong with bytes and indexes (kvtier.Finding). `absent`: named pages that are nowhere."""

    named: int
    in_tiers: dict[str, int]
    on_device: int
    verified: int
    orphans: dict[str, list[str]]
    strangers: list[str]
    absent: int
    integrity: str
    findings: list[dict[str, Any]] = field(default_factory=list)
    deleted: int = 0

    @property
    def clean(self) -> bool:
        flaws = [one for one in self.findings if one["flaw"] != "quarantined" and not one["repaired"]]
        left = sum(map(len, self.orphans.values())) - self.deleted
        return not flaws and left <= 0 and not self.strangers and self.integrity == "ok"


async def audit(db: Database, client: EngineClient, *, repair: bool = False, shared: bool = False) -> KvAudit:
    """Read everything anew and compare. With `repair`, orphans are deleted and half files removed; in the shared store
    only with `shared` as well, since another installation with a record of its own may use it.

    The engine is asked first: what a think under way adds meanwhile is then in neither list.
    """
    await teach(db, client)
    found = await client.audit(repair=repair, every_key=True)
    rows = await db.fetch(_NAMED)
    named = {row["key"] for row in rows}
    open_sessions = await _open(db)
    held = set(found["held"])
    tiers = {tier: set(keys) for tier, keys in found["tiers"].items()}
    orphans = {tier: sorted(keys - named - held) for tier, keys in tiers.items()}
    strangers = sorted(set(found["sessions"]) - open_sessions)
    deleted = 0
    if repair:
        deleted = await _remove(client, orphans if shared else _local(orphans), strangers)
        strangers = []
    somewhere = set(found["device"]).union(*tiers.values())
    return KvAudit(
        named=len(named),
        in_tiers={tier: len(keys) for tier, keys in tiers.items()},
        on_device=len(found["device"]),
        verified=found["pages"],
        orphans={tier: keys for tier, keys in orphans.items() if keys},
        strangers=strangers,
        absent=len(named - somewhere),
        integrity=found["integrity"],
        findings=found["findings"],
        deleted=deleted,
    )


async def teach(db: Database, client: EngineClient) -> None:
    """Give the engine every salt that the record has: an engine that was restarted has none, and what is encrypted
    cannot be looked at without. Salts of domains that have ended are gone, and so is what was written under them."""
    rows = await db.fetch("SELECT salt FROM tenants UNION ALL SELECT salt FROM kv_domains")
    await client.learn([row["salt"] for row in rows])


async def collect(db: Database, client: EngineClient) -> int:
    """Delete from this machine's tiers what neither the record nor the engine names: what a crash left."""
    await teach(db, client)
    found = await client.audit(verify=False)
    named = {row["key"] for row in await db.fetch(_NAMED)}
    named |= set(found["held"])
    orphans = {tier: sorted(set(keys) - named) for tier, keys in found["tiers"].items()}
    return await _remove(client, _local(orphans), ())


def _local(orphans: dict[str, list[str]]) -> dict[str, list[str]]:
    return {tier: keys for tier, keys in orphans.items() if tier != "shared"}


async def _open(db: Database) -> set[str]:
    rows = await db.fetch("SELECT session_id FROM sessions WHERE state NOT IN ('cancelled', 'completed')")
    return {row["session_id"] for row in rows}


async def _remove(client: EngineClient, orphans: dict[str, list[str]], strangers: Iterable[str]) -> int:
    keys = sorted({key for one in orphans.values() for key in one})
    for session in strangers:
        await client.kv("drop", session=session, epoch=(1 << 62), wait=True)
    for start in range(0, len(keys), _BATCH):
        await client.delete_keys(keys[start : start + _BATCH], unheld=True)  # a think may have found them since
    return sum(map(len, orphans.values()))
