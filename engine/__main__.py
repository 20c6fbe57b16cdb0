"""The engine process: `python -m engine --model PATH --socket PATH ...`.

Standard output carries one JSON line when serving; standard error carries JSON progress lines while loading, then logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import psutil

from engine.errors import EngineError


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 for a mistake of the caller, 1 for a fault."""
    options = _parser().parse_args(argv)
    if options.socket is None and options.tcp is None:
        _parser().error("name an address to listen on: --socket, --tcp, or both")
    # Waiting threads spin before they sleep. libgomp's default, milliseconds, starves everyone on a busy machine
    # (seen: seconds per token with two busy neighbours); this much costs nothing on a quiet one. Before torch loads.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from engine.launch import EngineSettings
    from kvtier import TierError

    settings = EngineSettings(
        model=options.model,
        kv_tokens=options.kv_tokens,
        threads=options.threads,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        backend=options.backend,
        host_arena=options.host_arena,
        host_bytes=options.host_bytes,
        nvme_dir=options.nvme_dir,
        nvme_bytes=options.nvme_bytes,
        shared=options.shared,
        shared_bytes=options.shared_bytes,
        decision_log=options.decision_log,
        admission=options.kv_admission,
        compression=options.kv_compression,
        encrypted=options.kv_encryption == "on",
        speculation=options.speculation,
        draft_model=options.draft_model,
        weights_cache=options.weights_cache or options.model.parent / "cache",
    )
    try:
        return asyncio.run(_serve(settings, options.socket, _tcp(options.tcp)))
    except (EngineError, TierError) as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), file=sys.stderr, flush=True)
        return 2


async def _serve(settings: object, socket: Path | None, tcp: tuple[str, int] | None) -> int:
    from engine.launch import EngineSettings, open_engine

    assert isinstance(settings, EngineSettings)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    opening = asyncio.create_task(asyncio.to_thread(open_engine, settings, _progress))
    asked = asyncio.create_task(ended.wait())
    await asyncio.wait({opening, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not opening.done():
        _end_children()
        os._exit(0)  # a thread that loads cannot be stopped; what it was writing is swept by the next start
    engine = opening.result()
    try:
        addresses = await engine.server.listen(socket, tcp)
        ready = {"ready": True, "addresses": addresses, **engine.card.as_message()}
        print(json.dumps(ready), flush=True)
        watch = asyncio.create_task(asyncio.to_thread(engine.core.wait_ended))
        stop = asyncio.create_task(ended.wait())
        await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
    finally:
        await engine.server.close()
        await asyncio.to_thread(engine.close)
    if engine.core.fault is not None:
        print(json.dumps({"error": f"the compute thread failed: {engine.core.fault!r}"}), file=sys.stderr, flush=True)
        return 1
    return 0


def _end_children() -> None:
    """A compiler that builds the kernels would go on for a minute."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)


def _progress(what: str, fraction: float) -> None:
    print(json.dumps({"progress": round(fraction, 3), "what": what}), file=sys.stderr, flush=True)


def _tcp(address: str | None) -> tuple[str, int] | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        _parser().error(f"--tcp is {address!r}; HOST:PORT is needed")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    from engine.backends.choose import BACKENDS
    from engine.precision import DTYPES, KV_DTYPES

    parser = argparse.ArgumentParser(
        prog="python -m engine", description="Serve one model over the token-level protocol."
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a Hugging Face directory")
    parser.add_argument("--socket", type=Path, help="unix socket to listen on")
    parser.add_argument("--tcp", metavar="HOST:PORT", help="TCP address to listen on, for trusted networks only")
    parser.add_argument("--kv-tokens", type=int, default=16_384, help="size of the device pool, in tokens")
    parser.add_argument("--host-arena", type=Path, help="shared-memory file of the host tier")
    parser.add_argument("--host-bytes", type=int, default=0)
    parser.add_argument("--nvme-dir", type=Path, help="directory of the NVMe tier")
    parser.add_argument("--nvme-bytes", type=int, default=0)
    parser.add_argument("--shared", help="a directory that machines share, or s3://bucket/prefix")
    parser.add_argument("--shared-bytes", type=int, default=0)
    parser.add_argument(
        "--kv-compression", choices=("off", "zlib", "zstd"), default="off", help="of pages on NVMe and in the store"
    )
    parser.add_argument(
        "--kv-encryption", choices=("off", "on"), default="off", help="the same, by a key that comes from the salt"
    )
    parser.add_argument(
        "--kv-admission",
        choices=("measured", "always"),
        default="measured",
        help="when a tier is used: where it is quicker than computing, by speeds measured at the start; or always",
    )
    parser.add_argument(
        "--speculation", choices=("auto", "off"), default="auto", help="verify drafts where it pays; changes no token"
    )
    parser.add_argument("--draft-model", type=Path, help="a smaller model of the same vocabulary, which drafts")
    parser.add_argument("--decision-log", type=Path, help="append every decision of the tier policy to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="w4a8, on cpu: weights in the file's own 4 or 8 bits, int8 activations, KV in bf16; fastest and least"
        " exact. On a GPU: w4a16, weights in 4 bits; w8a16, in e4m3; w8a8, activations in e4m3 as well",
    )
    parser.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="e4m3, on a GPU: pages of half the size; auto: as dtype"
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="auto: triton where there is a GPU, else cpu where that can be built and the processor has vectors for it,"
        " else torch",
    )
    parser.add_argument("--weights-cache", type=Path, help="default: 'cache' beside the model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
