"""The engine process in front of a model server: `python -m engine.external --url URL --socket PATH ...`.

As of `python -m engine`: one JSON line on standard output when serving, JSON progress lines on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import signal
import sys
from pathlib import Path, PurePosixPath

from engine.errors import EngineError, RequestError, ServerUnavailable
from engine.external.kinds import KINDS
from engine.external.look import Served, look
from engine.external.remote import Place, Remote, Timeouts
from engine.external.server import ExternalServer
from engine.tokens.bytewise import VOCAB_SIZE, byte_chat
from engine.wire import ModelCard, parse_address

_ASK_AGAIN_S = 1.0


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 for a mistake of the caller."""
    options = _parser().parse_args(argv)
    if options.socket is None and options.tcp is None:
        _parser().error("name an address to listen on: --socket, --tcp, or both")
    try:
        return asyncio.run(_serve(options))
    except EngineError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), file=sys.stderr, flush=True)
        return 2


async def _serve(options: argparse.Namespace) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    timeouts = Timeouts(options.connect_s, options.first_s, options.between_s)
    async with Remote(Place(options.url.rstrip("/"), _key(options.key_file), timeouts)) as remote:
        stop = asyncio.create_task(ended.wait())
        looking = asyncio.create_task(_found(remote, options))
        await asyncio.wait({stop, looking}, return_when=asyncio.FIRST_COMPLETED)
        if not looking.done():
            looking.cancel()
            return 0
        served = looking.result()
        card = card_of(served)
        server = ExternalServer(card, remote, served)
        try:
            addresses = await server.listen(options.socket, _tcp(options.tcp))
            print(json.dumps({"ready": True, "addresses": addresses, **card.as_message()}), flush=True)
            await stop
        finally:
            await server.close()
    return 0


async def _found(remote: Remote, options: argparse.Namespace) -> Served:
    """Waits for a server that is away; whoever looks at the progress sees why."""
    while True:
        try:
            return await look(remote, options.name, options.kind, options.context)
        except ServerUnavailable as error:
            print(json.dumps({"progress": 0.0, "what": f"waiting for {error};"}), file=sys.stderr, flush=True)
            await asyncio.sleep(_ASK_AGAIN_S)


def card_of(served: Served) -> ModelCard:
    """`fingerprint` is of the model's name: whoever serves it, a session may go on there."""
    tokenizer, _ = byte_chat()
    name = PurePosixPath(served.model).stem if served.model.startswith("/") else served.model
    return ModelCard(
        model=name[:200],
        fingerprint=hashlib.sha256(f"external\0{name}\0{tokenizer.digest}".encode()).hexdigest(),
        backend="openai",
        mode="external",
        dtype="external",
        context_length=served.context_length,
        vocab_size=VOCAB_SIZE,
        kv_bytes_per_token=0,
        page_size=16,
        tokenizer_digest=tokenizer.digest,
        boot_id=secrets.token_hex(8),
        eos_token_ids=tokenizer.eos_token_ids,
        kv_pool_tokens=0,
        kv="external",
        exact=False,
        server=served.kind.name,
        continues=served.kind.going_on is not None,
        refuses=served.kind.refuses,
    )


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip() or None
    except OSError as error:
        raise RequestError("bad_request", f"--key-file {path} cannot be read: {error.strerror}") from error


def _tcp(address: str | None) -> tuple[str, int] | None:
    if address is None:
        return None
    parsed = parse_address(address)
    if isinstance(parsed, str) or parsed[1] > 65_535:
        _parser().error(f"--tcp is {address!r}; HOST:PORT is needed")
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.external", description="Speak the token-level protocol for a model server."
    )
    parser.add_argument("--url", required=True, help="of its API, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--name", help="the model, where the server has several")
    parser.add_argument("--kind", choices=("auto", *KINDS), default="auto", help="what the server takes beyond the API")
    parser.add_argument("--context", type=int, help="tokens of the context, where the server does not say")
    parser.add_argument("--key-file", type=Path, help="a file that holds the server's key")
    parser.add_argument("--socket", type=Path, help="unix socket to listen on")
    parser.add_argument("--tcp", metavar="HOST:PORT", help="TCP address to listen on, for trusted networks only")
    usual = Timeouts()
    parser.add_argument("--connect-s", type=float, default=usual.connect_s, help="seconds to connect")
    parser.add_argument("--first-s", type=float, default=usual.first_s, help="seconds to the first token")
    parser.add_argument("--between-s", type=float, default=usual.between_s, help="seconds between two tokens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
