"""Puts an engine together from its settings."""

from __future__ import annotations

import os
import queue
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.backends.choose import BackendSettings, check_choice, open_backend, refuse_early
from engine.collector import Collector
from engine.constraint import Constraints
from engine.core import EngineCore
from engine.decisions import DecisionLog
from engine.draftmodel import DraftModel
from engine.errors import ModelFileError, RequestError
from engine.facts import PAGE_SIZE, fingerprint
from engine.intents import Intents
from engine.keeper import Keeper
from engine.keyring import SaltKeys
from engine.lanes import Lanes
from engine.memory_use import MemoryUse, bill
from engine.modelfile import model_name, open_model
from engine.moves import Moves
from engine.pages import PagePool
from engine.precision import Precision, element_bytes
from engine.request import Limits
from engine.scheduler import Scheduler
from engine.server import EngineServer
from engine.speculator import Speculator
from engine.speeds import Room, Speeds, measure
from engine.store import KvStore
from engine.weights import load_weights
from engine.wire import ModelCard
from kvtier import CodecConfig, Compression, S3Place, SharedConfig, TierConfig, TierStack

Progress = Callable[[str, float], None]  # what, fraction done


@dataclass(frozen=True)
class EngineSettings:
    """Sizes in bytes, the pool in tokens; a tier without path or size is off.

    `shared` is a directory on a file system that machines share, or s3://bucket/prefix.

    `backend` is auto, triton, cpu or torch; `dtype` and `kv_dtype` are of `engine.precision`. `weights_cache` None:
    nothing is cached. `decision_log`: a file to which every decision of the tier policy is appended, with all that it
    depended on. `compression` (off, zlib, zstd) and `encrypted` are of pages below host memory. `admission`: measured,
    a tier is used where it is quicker than computing; or always. `speculation`: auto, or off for everyone;
    `draft_model`: a smaller one of the same vocabulary, which drafts.
    """

    model: Path
    kv_tokens: int = 16_384
    threads: int = 2
    dtype: str = "bf16"
    kv_dtype: str = "auto"
    backend: str = "auto"
    host_arena: Path | None = None
    host_bytes: int = 0
    nvme_dir: Path | None = None
    nvme_bytes: int = 0
    shared: str | None = None
    shared_bytes: int = 0
    decision_log: Path | None = None
    admission: str = "measured"
    compression: str = "off"
    encrypted: bool = False
    weights_cache: Path | None = None
    speculation: str = "auto"
    draft_model: Path | None = None


@dataclass(frozen=True)
class Engine:
    """An engine that is ready to be served. Close it when serving has ended."""

    server: EngineServer
    core: EngineCore
    card: ModelCard
    lanes: Lanes
    stack: TierStack | None

    def close(self) -> None:
        """End the compute thread, then I/O, then the tiers. Pages below the device stay for the next start."""
        self.core.stop()
        self.lanes.close()
        if self.stack is not None:
            self.stack.close()


def open_engine(settings: EngineSettings, progress: Progress) -> Engine:
    """Load the model, adopt the tiers, start the compute thread. Blocking: a second or two, longer at a model's first
    start.

    Raises ModelError, BackendUnavailable, RequestError (impossible settings), or kvtier's errors.
    """
    if settings.kv_tokens < 4 * PAGE_SIZE:
        raise RequestError("pool_too_small", f"a pool of {settings.kv_tokens} tokens is too small; 64 is the least")
    if settings.threads < 1:
        raise RequestError("bad_request", f"--threads is {settings.threads}; 1 is the least")
    precision, blocks = Precision(settings.dtype, settings.kv_dtype), settings.kv_tokens // PAGE_SIZE
    wanted = BackendSettings(settings.backend, blocks, settings.threads, settings.weights_cache, precision)
    with open_model(settings.model) as model:
        facts = model.facts()
        check_choice(wanted, facts, precision)
        refuse_early(settings.backend, facts, precision)
        tokenizer = model.tokenizer()
        progress("checking", 0.0)
        digest = model.digest()
        weights = load_weights(
            model, digest, facts, precision.loaded, settings.weights_cache, lambda done: progress("weights", done)
        )
    backend = open_backend(wanted, facts, weights, progress)
    mark = fingerprint(digest, facts, backend.identity)
    keys = SaltKeys() if settings.encrypted else None
    page_bytes = facts.page_bytes(str(precision))
    stack = _open_tiers(settings, mark, page_bytes, keys)
    inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    lanes = Lanes(inbox.put)
    pool = PagePool(blocks)
    store = KvStore(backend, pool, stack, lanes, mark, page_bytes, keys)
    limits = Limits(facts.context, facts.vocab, blocks * PAGE_SIZE)
    drafts = _draft_model(settings, wanted, tokenizer.digest, progress)
    speculator = Speculator(enabled=settings.speculation == "auto", model=drafts)
    eos = tokenizer.eos_token_ids
    core = EngineCore(backend, store, Scheduler(pool), limits, eos, inbox, speculator=speculator)
    card = ModelCard(
        model=model_name(settings.model),
        fingerprint=mark.hex(),
        backend=backend.identity.backend,
        mode=backend.identity.mode,
        dtype=str(precision),
        context_length=facts.context,
        vocab_size=facts.vocab,
        kv_bytes_per_token=facts.kv_bytes_per_token(str(precision)),
        page_size=PAGE_SIZE,
        tokenizer_digest=tokenizer.digest,
        boot_id=secrets.token_hex(8),
        eos_token_ids=tokenizer.eos_token_ids,
        kv_pool_tokens=blocks * PAGE_SIZE,
    )
    log = DecisionLog(settings.decision_log)
    log.check()
    speeds = Speeds()
    if settings.admission == "measured":
        progress("measuring", 0.0)
        speeds = measure(backend, stack, store.page_bytes, Room(blocks, facts.context))
    keeper = Keeper(core, Moves(core), log, speeds)
    intents = Intents(core, keeper)
    Collector(core)
    owed = bill(
        facts, precision, blocks * PAGE_SIZE, settings.host_bytes, on_device=backend.identity.backend == "triton"
    )
    memory = MemoryUse(owed, backend, sum(array.nbytes for array in weights.arrays.values()))
    server = EngineServer(core, intents, Constraints(settings.model, facts.vocab), card, memory)
    core.start()
    return Engine(server, core, card, lanes, stack)


def _draft_model(
    settings: EngineSettings, wanted: BackendSettings, tokens: str, progress: Progress
) -> DraftModel | None:
    """The model that drafts, with as many pages as the served one. Raises ModelError for one of another vocabulary."""
    if settings.draft_model is None or settings.speculation == "off":
        return None
    with open_model(settings.draft_model) as model:
        facts = model.facts()
        if model.tokenizer().digest != tokens:
            raise ModelFileError(
                f"{settings.draft_model} has other tokens than {settings.model}: name a draft model of its family"
            )
        progress("loading the draft model", 0.0)
        loaded = wanted.precision.loaded if wanted.precision is not None else settings.dtype
        weights = load_weights(model, model.digest(), facts, loaded, settings.weights_cache, lambda _: None)
    backend = open_backend(replace(wanted, precision=None), facts, weights, progress)
    return DraftModel(backend, wanted.pool_blocks, facts.context)


def _open_tiers(settings: EngineSettings, mark: bytes, page_bytes: int, keys: SaltKeys | None) -> TierStack | None:
    host = settings.host_arena if settings.host_bytes else None
    nvme = settings.nvme_dir if settings.nvme_bytes else None
    shared = _shared(settings)
    if host is None and nvme is None and shared is None:
        return None
    return TierStack.open(
        TierConfig(
            page_bytes=page_bytes,
            fingerprint=mark,
            host_path=host,
            host_bytes=settings.host_bytes if host else 0,
            nvme_dir=nvme,
            nvme_bytes=settings.nvme_bytes if nvme else 0,
            shared=shared,
            codec=CodecConfig(
                compression=Compression[settings.compression.upper()],
                element_bytes=element_bytes(str(Precision(settings.dtype, settings.kv_dtype))),
                keys=keys,
            ),
        )
    )


def _shared(settings: EngineSettings) -> SharedConfig | None:
    if settings.shared is None or not settings.shared_bytes:
        return None
    if not settings.shared.startswith("s3://"):
        return SharedConfig(Path(settings.shared), settings.shared_bytes)
    bucket, _, prefix = settings.shared.removeprefix("s3://").partition("/")
    if not bucket:
        raise RequestError("bad_request", f"shared is {settings.shared!r}; s3://BUCKET or s3://BUCKET/PREFIX is needed")
    place = S3Place(bucket, endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3"))
    return SharedConfig(replace(place, prefix=f"{prefix.rstrip('/')}/") if prefix else place, settings.shared_bytes)
