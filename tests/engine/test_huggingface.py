"""Models in Hugging Face directories, against what transformers makes of the same directory."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.face import cut
from engine.client import EngineClient
from engine.errors import BackendUnavailable, ModelFileError
from tests.engine.conftest import Loaded, load, share_native
from tests.engine.process import engine, hear
from tests.engine.tiny_hf import CONTEXT, FAMILIES, VOCAB, read_hf, write_hf, write_json

Damage = Callable[[Path], object]

PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB, 75)]
LATENT = ("deepseek_v2", "deepseek_v3")
FP32_BOUND = 1e-4  # of a logit: fp32 products in another order
BACKENDS = [("torch", family) for family in FAMILIES] + [("cpu", family) for family in FAMILIES if family not in LATENT]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_hf(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def logits(loaded: Loaded, backend: str, dtype: str) -> Any:
    """Of every position of the prompt: [tokens, vocab]."""
    opened = loaded.backend(backend, dtype, 8)
    rows = [opened.forward(cut(range(8), at, [token]))[-1].copy() for at, token in enumerate(PROMPT)]
    return np.stack(rows)


def theirs(directory: Path, dtype: torch.dtype) -> Any:
    with torch.inference_mode():
        return read_hf(directory, dtype)(torch.tensor([PROMPT])).logits[0].float().numpy()


@pytest.mark.parametrize(("backend", "family"), BACKENDS)
def test_logits_are_those_of_transformers(directories: dict[str, Path], backend: str, family: str) -> None:
    wanted = theirs(directories[family], torch.float32)
    assert np.abs(wanted).max() > 3
    assert np.abs(logits(load(directories[family]), backend, "fp32") - wanted).max() < FP32_BOUND


@pytest.mark.parametrize(("backend", "family"), BACKENDS)
def test_logits_in_bf16_are_as_near_to_those_in_fp32_as_transformers_own(
    directories: dict[str, Path], backend: str, family: str
) -> None:
    exact, rounded = (theirs(directories[family], dtype) for dtype in (torch.float32, torch.bfloat16))
    found = logits(load(directories[family]), backend, "bf16")
    assert np.square(found - exact).mean() < 1.5 * np.square(rounded - exact).mean()


def test_a_window_holds_over_many_pages_and_alone_or_in_a_batch_a_token_has_the_same_bits(
    directories: dict[str, Path],
) -> None:
    """Alone, segments of the context are shared out among threads; in a batch they are not."""
    ids = [int(i) for i in np.random.default_rng(6).integers(0, VOCAB, CONTEXT)]
    with torch.inference_mode():
        wanted = read_hf(directories["mistral"])(torch.tensor([ids])).logits[0].numpy()
    backend = load(directories["mistral"]).backend("cpu", "fp32", 64)
    backend.forward(cut(range(32), 0, ids[:-1]))
    alone = backend.forward(cut(range(32), CONTEXT - 1, ids[-1:]))[-1].copy()
    assert np.abs(alone - wanted[-1]).max() < FP32_BOUND
    others = [tile for block in range(32, 64) for tile in cut([block], 0, ids[:1])]
    assert np.array_equal(backend.forward([*cut(range(32), CONTEXT - 1, ids[-1:]), *others])[0], alone)


def test_a_model_in_shards_behind_links_is_the_model_in_one_file(directories: dict[str, Path], tmp_path: Path) -> None:
    """The hub's cache is a directory of links into another one."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    write_hf(blobs, "qwen2", shard="60KB")
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert len(list(snapshot.glob("model-*.safetensors"))) > 2
    whole, shards = (load(path).weights("fp32", None).arrays for path in (directories["qwen2"], snapshot))
    assert whole.keys() == shards.keys()
    assert all(np.array_equal(whole[name], shards[name]) for name in whole)


def test_the_digest_is_of_every_file_that_is_read(tmp_path: Path) -> None:
    write_hf(tmp_path, "llama")
    digests = {load(tmp_path).digest}
    (tmp_path / "README.md").write_text("not read")
    assert {load(tmp_path).digest} == digests
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + " ")
        digests.add(load(tmp_path).digest)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert len(digests | {load(tmp_path).digest}) == 6


def test_weights_in_16_bits_are_those_in_32_rounded(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        path = write_hf(tmp_path / str(dtype), "qwen3", dtype=dtype)
        wanted = read_hf(path).state_dict()["model.layers.1.self_attn.o_proj.weight"].numpy()
        assert np.array_equal(load(path).weights("fp32", None).arrays["1.o"], wanted)


def without(*names: str) -> Damage:
    return lambda path: [(path / name).unlink() for name in names]


def indexed(**places: str) -> Damage:
    """An index instead of the one file, which becomes the shard `a.safetensors`."""

    def damage(path: Path) -> None:
        (path / "model.safetensors").rename(path / "a.safetensors")
        write_json(path / "model.safetensors.index.json", {"weight_map": places})

    return damage


def reconfigured(**changes: Any) -> Damage:
    def damage(path: Path) -> None:
        write_json(path / "config.json", json.loads((path / "config.json").read_text()) | changes)

    return damage


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without("config.json"), r"config\.json cannot be read"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda path: (path / "config.json").write_text("[" * 9999), r"config\.json is not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda path: (path / "config.json").write_bytes(b"\xff"), "is not text"),
        (lambda path: (path / "config.json").write_text(" " * 2_000_000), "more than the 1048576 bytes"),
        (without("model.safetensors"), "has neither model.safetensors nor model.safetensors.index.json"),
        (pickled, "pickled weights are not read, save them as safetensors"),
        (indexed(), "has no 'weight_map'"),
        (indexed(x="../a.safetensors"), r"names the file '../a.safetensors', which is not one beside it"),
        (indexed(x="/etc/passwd"), "names the file '/etc/passwd'"),
        (indexed(x="b.safetensors"), r"b\.safetensors cannot be read"),
        (indexed(x="a.safetensors"), r"tensor 'x' is not in a\.safetensors, where"),
        (reconfigured(num_hidden_layers=3), r"tensor 'model\.layers\.2\.\S+' is missing from a llama model"),
        (reconfigured(num_hidden_layers=1), r"tensor 'model\.layers\.1\.\S+' is not part of the llama models"),
        (reconfigured(hidden_size=128), r"is \[288, 64\], a llama model of this size needs \[288, 128\]"),
        (reconfigured(vocab_size=100), r"is \[288, 64\], a llama model of this size needs \[100, 64\]"),
        (reconfigured(model_type="mamba"), "it holds a 'mamba' model"),
    ],
)
def test_a_directory_that_is_no_model_is_a_sentence(tmp_path: Path, damage: Damage, told: str) -> None:
    path = write_hf(tmp_path / "model", "llama")
    damage(path)
    with pytest.raises(ModelFileError, match=told) as error:
        load(path)
    assert str(path) in str(error.value)


def test_what_the_cpu_backend_does_not_run_is_a_sentence(directories: dict[str, Path]) -> None:
    with pytest.raises(BackendUnavailable, match="does not run latent attention"):
        load(directories["deepseek_v3"]).backend("cpu", "fp32", 8)


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
async def test_an_engine_serves_a_directory_and_a_killed_one_goes_on_from_its_pages(
    tmp_path: Path, family: str
) -> None:
    share_native(tmp_path)
    model = write_hf(tmp_path / "Tiny-0.1B", family)
    async with engine(model, tmp_path) as process, await EngineClient.connect(process.socket) as client:
        assert (client.card.model, client.card.backend) == ("Tiny-0.1B", "torch" if family in LATENT else "cpu")
        whole = (await hear(client, "s", PROMPT, 20)).tokens
        assert len(whole) == 20
        await client.kv("offload", session="s", wait=True)
        await process.stop(signal.SIGKILL)
    left = PROMPT + whole[:10]
    known = len(left) // 16 * 16
    async with engine(model, tmp_path) as process, await EngineClient.connect(process.socket) as client:
        rest = await hear(client, "s", left, 10, replay=10, known_tokens=known, epoch=1)
    assert whole[:10] + rest.tokens == whole
    assert rest.prefill is not None
    assert (rest.prefill.host, rest.prefill.recomputed) == (known, 0)
