"""A session whose machine is gone goes on from what it left in the shared store."""

from __future__ import annotations

from pathlib import Path

from engine.client import EngineClient
from tests.engine.process import engine, hear


async def test_another_machine_goes_on_from_the_shared_store(talkative: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = {"shared": store, "shared_bytes": 64 << 20}
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    prompt = list(range(3, 90))
    async with engine(talkative, tmp_path / "there", **options) as there:
        async with await EngineClient.connect(there.socket) as second:
            async with engine(talkative, tmp_path / "here", **options) as here:
                async with await EngineClient.connect(here.socket) as first:
                    whole = await hear(first, "a", prompt, 20)
                    begun = await hear(first, "s", prompt, 10)
                    receipt = await first.kv("offload", session="s", tier="shared", wait=True)
                    assert receipt.status == "accepted"
                    state = await first.kv_state("s")
                    assert state.shared_pages == state.device_pages == receipt.pages
            rest = await hear(second, "s", [*prompt, *begun.tokens], 10, known_tokens=len(prompt) + 9)
            assert rest.prefill is not None
            assert rest.prefill.shared == len(prompt) + 9
            assert rest.prefill.recomputed == 0
            assert [*begun.tokens, *rest.tokens] == whole.tokens
