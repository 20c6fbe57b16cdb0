"""A session that comes in as an archive: looked through to the last byte before anything is made of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from engine import ModelCard
from runtime import archive_workspace
from runtime.archive_record import branch_of, chain_of
from runtime.archives import Archive
from runtime.config import BudgetLimits, SessionConfig
from runtime.errors import Conflict, InvalidRequest
from runtime.kept import as_kept
from runtime.steps.services import Services
from runtime.store import errands, imports
from runtime.store.errands import Errand
from runtime.store.imports import Imported
from runtime.tools.kinds import SecretRef, SessionTool
from runtime.workspaces import Answer
from sandbox import BlobStore

_AT_ONCE = 8 << 20  # bytes of blobs that are stored together


async def run(s: Services, errand: Errand) -> Answer:
    """The session of the archive that came with the errand. Raises InvalidRequest, and nothing is made then."""
    session_id = errand.request["session_id"]
    with tempfile.TemporaryDirectory(prefix="tenuto-import-") as folder:
        path = Path(folder) / "archive.tar"
        with path.open("wb") as file:
            async for part in errands.parts(s.db, errand.request["parts"]):
                await asyncio.to_thread(file.write, part)
        archive = await asyncio.to_thread(Archive, path)
        try:
            made, blobs = await asyncio.to_thread(_checked, archive, s.engine.card)
            async with s.blob_lock:
                await asyncio.to_thread(_store, s.blobs, archive, blobs)
                made = replace(made, config=as_kept(s.sealer, errand.tenant_id, SessionConfig(**made.config)))
                await imports.create(s.db, errand.tenant_id, session_id, made, errand.request["domain"])
        finally:
            archive.close()
    about = {"from": made.came_from, "secrets": list(made.secrets), "step": made.checkpoints[-1].step}
    return {**about, "tokens": made.checkpoints[-1].tokens}, None


def _checked(archive: Archive, card: ModelCard) -> tuple[Imported, set[str]]:
    """What is to be made, and the blobs that it needs. Blocking."""
    told = archive.session
    _ensure_same_model(archive, card)
    try:
        config = SessionConfig.model_validate(told.config)
        BudgetLimits.model_validate(told.budget or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"the archive's configuration cannot be: {where}: {first['msg']}") from None
    _ensure_no_secrets(config)
    chain = chain_of(archive)
    tokens = branch_of(archive, chain, card.vocab_size)
    if len(tokens) >= card.context_length and not card.external:  # else it is for the server to say
        raise InvalidRequest(f"the archive's transcript does not fit into the context of {card.model}")
    steps = {step.step for step in chain}
    checkpoints = [one for one in archive.checkpoints if one.step in steps]
    if told.snapshots == "last":
        checkpoints = checkpoints[-1:]
    blobs: set[str] = set()
    for root in dict.fromkeys(one.workspace_root for one in checkpoints):
        blobs |= archive_workspace.checked(archive, root, config.limits.workspace_bytes)
    made = Imported(
        came_from=told.id,
        config=config.model_dump(),
        seed=told.seed,
        budget=told.budget,
        listings=told.listings,
        secrets=tuple(told.secrets),
        steps=tuple(chain),
        segments=tuple(one for one in archive.segments if one.step in steps),
        calls=tuple(one for one in archive.calls if one.step in steps and one.status == "settled"),
        checkpoints=tuple(checkpoints),
        fingerprint=card.fingerprint,
    )
    return made, blobs


def _ensure_no_secrets(config: SessionConfig) -> None:
    """An archive names secrets; a value that stands in it was put there by somebody else than the export."""
    for tool in config.declared:
        for name, value in tool.secrets.items():
            if not isinstance(value, SecretRef):
                raise InvalidRequest(
                    f"the archive has a value for {tool.name}.{name}: only names of secrets may be there"
                )
        if isinstance(tool, SessionTool):
            _ensure_no_secrets(config.of_child(tool))


def _ensure_same_model(archive: Archive, card: ModelCard) -> None:
    theirs = archive.session.model
    ours = (card.model, card.fingerprint, card.tokenizer_digest)
    if (theirs.name, theirs.fingerprint, theirs.tokenizer) == ours:
        return
    what = "model" if theirs.name != card.model else "tokenizer" if theirs.tokenizer != ours[2] else "fingerprint"
    named = {"model": (theirs.name, ours[0]), "fingerprint": (theirs.fingerprint, ours[1])}
    named["tokenizer"] = (theirs.tokenizer, ours[2])
    raise Conflict(
        f"the archive's {what} is {named[what][0]!r}; here {named[what][1]!r} is served, which would go on otherwise",
        code="model_not_served",
    )


def _store(store: BlobStore, archive: Archive, digests: Iterable[str]) -> None:
    """Folders name what is put before them; the store does not, so the order among these does not matter until the
    record names the root."""
    batch: list[bytes] = []
    for digest in digests:
        batch.append(archive.get(digest))
        if sum(map(len, batch)) > _AT_ONCE:
            store.put_many(batch)
            batch = []
    store.put_many(batch)
