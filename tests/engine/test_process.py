"""The engine as a process of its own, over its socket, killed and cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import EngineClient
from engine.errors import EngineGone
from engine.sampling import Sampling
from engine.tokens import ToolSpec, load_chat_format
from engine.wire import encode_frame, read_frame
from tests.engine.conftest import MODELS, model_path, share_native
from tests.engine.process import Process, engine, hear, refusal
from tests.engine.tiny import write_tiny

PROMPT = [3 + (5 * i) % 250 for i in range(70)]


@pytest.fixture(scope="module")
async def served(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    async with engine(tiny_path, tmp_path_factory.mktemp("served")) as process:
        yield process


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def raw(process: Process) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(process.socket))


async def test_the_ready_line_names_model_backend_and_mode(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        card = client.card
    assert served.ready["ready"] is True
    assert served.ready["fingerprint"] == card.fingerprint
    assert (card.model, card.backend, card.mode, card.dtype) == ("tiny", "cpu", "exact", "bf16")
    assert (card.page_size, card.kv_pool_tokens, card.context_length) == (16, 1024, 512)
    assert card.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


async def test_only_its_owner_may_open_the_socket(served: Process) -> None:
    assert served.socket.stat().st_mode & 0o777 == 0o600


async def test_a_seeded_stream_is_the_same_again_and_resumed_anywhere(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        whole = await hear(client, "whole", PROMPT, 40)
        again = await hear(client, "again", PROMPT, 40, kv_source="none")
        assert whole.tokens == again.tokens
        for cut in (1, 13, 39):
            resumed = await hear(client, f"cut{cut}", PROMPT + whole.tokens[:cut], 40 - cut, replay=cut)
            assert whole.tokens[:cut] + resumed.tokens == whole.tokens


async def test_many_at_once_give_what_each_gives_alone(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        prompts = [[i + 3, *PROMPT[: 9 * i + 1]] for i in range(6)]
        together = await asyncio.gather(*(hear(client, f"t{i}", p, 12) for i, p in enumerate(prompts)))
        for index, prompt in enumerate(prompts):
            alone = await hear(client, f"a{index}", prompt, 12, kv_source="none")
            assert together[index].tokens == alone.tokens


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"token_ids": []}, "empty_prompt", "token_ids is empty"),
        ({"token_ids": [0, 265]}, "token_out_of_range", "token_ids[1] is 265"),
        ({"token_ids": [-1]}, "token_out_of_range", "token_ids[0] is -1"),
        ({"token_ids": [1] * 512}, "context_length_exceeded", "token_ids has 512 tokens"),
        ({"token_ids": "abc"}, "bad_request", "token_ids"),
        ({"token_ids": [1.5]}, "bad_request", "token_ids"),
        ({"token_ids": [True]}, "bad_request", "token_ids"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"max_tokens": "many"}, "bad_request", "max_tokens"),
        ({"sampling": {"temperature": -1}}, "bad_request", "sampling.temperature"),
        ({"sampling": {"top_p": 2}}, "bad_request", "sampling.top_p"),
        ({"sampling": {"seed": -5}}, "bad_request", "sampling.seed"),
        ({"sampling": [1]}, "bad_request", "sampling"),
        ({"sampling": {"min_p": 1.5}}, "bad_request", "sampling.min_p"),
        ({"sampling": {"repetition_penalty": 0}}, "bad_request", "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": "much"}}, "bad_request", "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": 1e9}}, "bad_request", "sampling.frequency_penalty"),
        ({"sampling": {"logit_bias": {"-3": 1}}}, "bad_request", "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {"3": 1e9}}}, "bad_request", "sampling.logit_bias.3"),
        ({"sampling": {"logit_bias": {"265": 1}}}, "token_out_of_range", "sampling.logit_bias names 265"),
        ({"sampling": {"logit_bias": {str(n): 1 for n in range(2000)}}}, "bad_request", "2000 tokens"),
        ({"sampling": {"typical_p": 0.5}}, "bad_request", "sampling.typical_p is no option"),
        ({"stop": [""]}, "bad_request", "stop[0] has 0 characters"),
        ({"stop": "x"}, "bad_request", "stop"),
        ({"stop": ["x"] * 17}, "bad_request", "stop has 17 texts"),
        ({"stop": ["hello"], "token_ids": [1, 260, 262], "replay": 2}, "bad_request", "end with the stop text"),
        ({"logprobs": 21}, "bad_request", "logprobs"),
        ({"logprobs": True}, "bad_request", "logprobs"),
        ({"speculation": "always"}, "bad_request", "speculation"),
        ({"grammar": "start: ("}, "bad_grammar", "grammar"),
        ({"grammar": 5}, "bad_request", "grammar"),
        ({"replay": 9}, "bad_request", "replay"),
        ({"salt": "xyz"}, "bad_request", "salt"),
        ({"session": ""}, "bad_request", "session"),
        ({"session": "x" * 5000}, "bad_request", "session"),
        ({"epoch": -1}, "bad_request", "epoch"),
        ({"kv_source": "magic"}, "bad_request", "kv_source"),
        ({"type": "dance"}, "bad_request", "'dance'"),
        ({"type": None}, "bad_request", "type is None"),
        ({"type": "kv", "intent": "burn"}, "bad_request", "intent"),
        ({"type": "kv", "intent": "pin", "tier": "tape"}, "bad_request", "tier"),
        ({"type": "delete_keys", "keys": ["zz"]}, "bad_request", "keys"),
    ],
)
async def test_a_bad_request_is_refused_by_code_and_field(
    served: Process, change: dict[str, Any], code: str, told: str
) -> None:
    message = {"type": "generate", "id": 7, "request_id": "r", "session": "s", "token_ids": [1, 2], "max_tokens": 2}
    reader, writer = await raw(served)
    writer.write(encode_frame({**message, **change}))
    frame = await read_frame(reader)
    assert (frame["type"], frame["id"], frame["code"]) == ("error", 7, code)
    assert told in frame["message"]
    writer.write(encode_frame({"type": "hello", "id": 8}))  # and the connection lives on
    assert (await read_frame(reader))["id"] == 8
    writer.close()


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\0\0\0\x05hello", b"\0\0\0\x02[]", b"\0\0\0\x04nul"])
async def test_junk_ends_that_connection_and_no_other(served: Process, junk: bytes) -> None:
    async with await EngineClient.connect(served.socket) as client:
        reader, writer = await raw(served)
        writer.write(junk)
        writer.write_eof()
        while await reader.read(4096):
            pass
        writer.close()
        assert len((await hear(client, "alive", PROMPT, 3)).tokens) == 3


async def test_a_thousand_calls_in_one_piece_are_all_answered(served: Process) -> None:
    reader, writer = await raw(served)
    writer.write(b"".join(encode_frame({"type": "cancel", "id": n, "request_id": "none"}) for n in range(1000)))
    assert [(await read_frame(reader))["id"] for _ in range(1000)] == list(range(1000))
    writer.close()


async def test_a_lost_connection_cancels_its_generations(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        reader, writer = await raw(served)
        message = {
            "type": "generate",
            "id": 1,
            "request_id": "lost",
            "session": "lost",
            "token_ids": PROMPT,
            "max_tokens": 400,
        }
        writer.write(encode_frame(message))
        while (await read_frame(reader))["type"] != "tokens":
            pass
        writer.transport.abort()
        while (await client.stats())["running"]:
            pass
        stats = await client.stats()
        assert (stats["integrity"], stats["pool"]["held"]) == ("ok", 0)


async def test_a_reader_that_never_reads_does_not_slow_the_others(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        _, writer = await raw(served)
        for number in range(8):
            message = {"type": "generate", "id": number, "request_id": f"deaf{number}", "session": f"deaf{number}"}
            writer.write(encode_frame({**message, "token_ids": PROMPT, "max_tokens": 40}))
        await writer.drain()
        assert len((await hear(client, "brisk", PROMPT, 20)).tokens) == 20
        writer.transport.abort()


async def test_leaving_the_stream_early_cancels_and_keeps_the_pages(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        stream = client.generate(request_id="early", session="early", token_ids=PROMPT, max_tokens=400)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        while (await client.stats())["running"]:
            pass
        state = await client.kv_state("early")
        assert state.tokens in (0, *range(state.device_pages * 16 - 15, state.device_pages * 16 + 1))
        assert (await client.kv("drop", session="early")).status in ("accepted", "missing")


async def test_cancel_by_name_works_from_another_connection(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as one, await EngineClient.connect(served.socket) as two:
        running = asyncio.create_task(hear(one, "c", PROMPT, 400, request_id="victim"))
        while not await two.cancel("victim"):
            assert not running.done()
        heard = await running
        assert heard.done is not None
        assert heard.done.finish_reason == "cancelled"
        assert not await two.cancel("victim")


async def test_a_cancel_right_behind_its_generation_finds_it_while_its_grammar_is_read(served: Process) -> None:
    reader, writer = await raw(served)
    named = {"request_id": "brief", "session": "brief"}
    asked = {
        **named,
        "type": "generate",
        "id": 1,
        "token_ids": PROMPT,
        "max_tokens": 400,
        "grammar": "start: /[a-z ]*/",
    }
    writer.write(encode_frame(asked) + encode_frame({**named, "type": "cancel", "id": 2}))
    told = [await read_frame(reader)]
    while {"done", "result"} - {frame["type"] for frame in told}:
        told.append(await read_frame(reader))
    writer.close()
    assert [frame["cancelled"] for frame in told if frame["type"] == "result"] == [True]
    assert [frame["finish_reason"] for frame in told if frame["type"] == "done"] == ["cancelled"]


async def test_a_refused_twin_whose_connection_is_lost_cancels_nobody_elses_generation(
    talkative: Path, tmp_path: Path
) -> None:
    message = {"type": "generate", "id": 1, "request_id": "twin", "session": "other", "token_ids": PROMPT}
    async with engine(talkative, tmp_path, kv_tokens=8192) as process:
        async with await EngineClient.connect(process.socket) as client:
            for _ in range(8):  # whether the refusal or the loss comes first is a race
                running = asyncio.create_task(hear(client, "first", PROMPT, 3000, request_id="twin"))
                while not (await client.stats())["running"]:
                    assert not running.done()
                _, writer = await raw(process)
                writer.write(encode_frame(message))
                await writer.drain()
                writer.transport.abort()
                heard = await running
                assert heard.done is not None
                assert heard.done.finish_reason != "cancelled"


async def test_a_grammar_holds_to_the_end(served: Process) -> None:
    grammar = "start: /[a-c]{5}/"
    async with await EngineClient.connect(served.socket) as client:
        heard = await hear(client, "g", PROMPT, 30, grammar=grammar)
    assert heard.done is not None
    assert heard.done.finish_reason == "stop"
    assert heard.tokens[-1] in served.ready["eos_token_ids"]
    assert len(heard.tokens) == 6


@pytest.mark.parametrize("shared", ["socket", "arena"])
async def test_a_second_engine_on_the_same_socket_or_arena_is_refused(
    served: Process, tiny_path: Path, shared: str
) -> None:
    root = served.socket.parent
    socket = served.socket if shared == "socket" else root / "other.sock"
    command = [sys.executable, "-m", "engine", "--model", str(tiny_path), "--socket", str(socket)]
    if shared == "arena":
        command += ["--host-arena", str(root / "arena"), "--host-bytes", str(256 << 20)]
    child = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    out, err = await child.communicate()
    assert (child.returncode, out) == (2, b"")
    told = json.loads(err.splitlines()[-1])["error"]
    assert ("another engine answers" if shared == "socket" else "arena") in told


async def test_a_model_that_is_none_ends_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine", "--model", str(path), "--socket", str(tmp_path / "s"), stdout=-1, stderr=-1
    )
    out, err = await child.communicate()
    assert (child.returncode, out) == (2, b"")
    assert "does not start with 'GGUF'" in json.loads(err.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--socket", "{root}/absent/s"], "cannot listen on"),
        (["--tcp", "127.0.0.1:99999"], "HOST:PORT is needed"),
        ([], "name an address"),
        (["--socket", "{root}/s", "--threads", "0"], "--threads is 0"),
        (["--socket", "{root}/s", "--kv-tokens", "100000000000000"], "lower --kv-tokens"),
        (["--socket", "{root}/s", "--dtype", "w8a16"], "needs a GPU, and PyTorch sees none: set --dtype bf16"),
    ],
)
async def test_a_setting_that_cannot_be_had_ends_with_a_sentence(tmp_path: Path, options: list[str], told: str) -> None:
    share_native(tmp_path)
    model = write_tiny(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "engine", "--model", str(model), *(o.format(root=tmp_path) for o in options)]
    child = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    out, err = await child.communicate()
    assert (child.returncode, out) == (2, b"")
    assert told in err.decode().splitlines()[-1]


async def test_sigterm_while_the_kernels_are_built_ends_the_compiler_too(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    compiler, told = tmp_path / "g++", tmp_path / "told"
    os.mkfifo(told)
    compiler.write_text(f'#!/bin/sh\n[ "$1" = -v ] && exit\necho $$ > {told}\nexec sleep 600\n')
    compiler.chmod(0o755)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine", "--model", str(model), "--socket", str(tmp_path / "s")),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=-1,
        stderr=-1,
    )
    number = int(await asyncio.to_thread(told.read_text))
    child.terminate()
    await child.communicate()
    assert child.returncode == 0
    assert not psutil.pid_exists(number)


async def test_sigterm_ends_it_cleanly_and_tells_running_calls(talkative: Path, tmp_path: Path) -> None:
    async with engine(talkative, tmp_path, kv_tokens=65_536) as process:
        assert any("progress" in line for line in process.progress)
        client = await EngineClient.connect(process.socket)
        running = asyncio.create_task(hear(client, "s", PROMPT, 60_000, sampling=Sampling()))  # greedy: no last word
        while not (await client.stats())["running"]:
            pass
        assert await process.stop(signal.SIGTERM) == 0
        with pytest.raises(EngineGone):
            await running
        with pytest.raises(EngineGone):
            await client.stats()
        await client.close()
        assert not process.socket.exists()
        with pytest.raises(EngineGone, match="no engine answers"):
            await EngineClient.connect(process.socket)


async def kill_and_restore(
    model: Path,
    root: Path,
    prompt: list[int],
    count: int,
    other: int = 400,
    other_sampling: Sampling = Sampling(temperature=0.8, seed=11),  # noqa: B008 (frozen)
    **fields: Any,
) -> None:
    """Generate, offload, SIGKILL in the middle of another generation, start again, go on from what is left."""
    keep, pool = count // 2, 2 * other + 512
    async with engine(model, root, kv_tokens=pool) as process:
        client = await EngineClient.connect(process.socket)
        whole = await hear(client, "s", prompt, count, **fields)
        receipt = await client.kv("offload", session="s", wait=True)
        assert receipt.status == "accepted"
        boot = client.card.boot_id
        running = asyncio.create_task(hear(client, "other", prompt[::-1], other, sampling=other_sampling))
        while not (await client.stats())["running"]:
            pass
        assert await process.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(EngineGone):
            pytest.fail(f"it was not running any more: {(await running).done}")
        await client.close()
    async with engine(model, root, kv_tokens=pool) as process:
        async with await EngineClient.connect(process.socket) as client:
            assert client.card.boot_id != boot
            left = prompt + whole.tokens[:keep]
            known = len(left) // 16 * 16
            resumed = await hear(client, "s", left, count - keep, replay=keep, known_tokens=known, epoch=1, **fields)
            assert whole.tokens[:keep] + resumed.tokens == whole.tokens
            assert resumed.prefill is not None
            assert resumed.prefill.host == known
            assert resumed.prefill.recomputed == 0
            await client.kv("drop", session="s", epoch=1)
            stats = await client.stats()
            assert (stats["integrity"], stats["quarantined"]) == ("ok", 0)
            counters = stats["counters"]
            assert (counters["restored_host_tokens"], counters["recomputed_tokens"]) == (known, 0)


async def test_after_sigkill_the_arena_is_adopted_and_the_stream_goes_on(talkative: Path, tmp_path: Path) -> None:
    await kill_and_restore(talkative, tmp_path, PROMPT, 60, other=60_000, other_sampling=Sampling())


@pytest.mark.model
async def test_a_real_model_goes_on_after_sigkill_and_calls_its_tool(tmp_path: Path) -> None:
    path = model_path(MODELS[0])
    _, chat = load_chat_format(path)
    tools = [
        ToolSpec(
            "write_file", "Write.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        )
    ]
    prompt = chat.opening("You write files.", tools) + chat.user("Write a.txt") + chat.assistant_open()
    await kill_and_restore(path, tmp_path, prompt, 24, sampling=Sampling(temperature=0.8, seed=4))
    async with engine(path, tmp_path) as process, await EngineClient.connect(process.socket) as client:
        heard = await hear(client, "tool", prompt, 120, grammar=chat.tool_grammar(tools, "required"), epoch=2)
        parsed = chat.parse_assistant(heard.tokens)
        if heard.done is not None and heard.done.finish_reason == "stop":
            assert [call.name for call in parsed.calls] == ["write_file"]
        else:
            assert (parsed.calls, parsed.complete) == ((), False)


async def test_an_engine_with_drafts_says_what_one_without_says_and_counts_them(
    tiny_path: Path, tmp_path: Path
) -> None:
    """Its draft model is itself: everything stands that the options let stand."""
    options = Sampling(temperature=0.9, top_k=40, seed=3, frequency_penalty=0.2, logit_bias=((9, 1.5),))
    said: dict[str, list[Any]] = {}
    for name, started in {"drafts": {"draft_model": tiny_path}, "none": {"speculation": "off"}}.items():
        root = tmp_path / name
        root.mkdir()
        async with engine(tiny_path, root, **started) as process, await EngineClient.connect(process.socket) as client:
            heard = [await hear(client, f"s{n}", [*PROMPT, n], 60, sampling=options, logprobs=2) for n in range(3)]
            stopped = await hear(client, "t", PROMPT, 60, sampling=options, stop=["\u00e9", "a", "e"])
            said[name] = [*(one.tokens for one in heard), stopped.tokens, stopped.done and stopped.done.stop_text]
            told = (await client.stats())["speculation"]
            assert told["accepted"] <= told["drafted"]
            assert name == "drafts" or not told["passes"]
    assert said["drafts"] == said["none"]


@pytest.mark.model
async def test_a_draft_model_of_another_vocabulary_is_refused(tiny_path: Path, tmp_path: Path) -> None:
    status, said = await refusal(tiny_path, tmp_path, draft_model=model_path(MODELS[0]))
    assert status == 2
    assert "has other tokens than" in said[-1]["error"]
