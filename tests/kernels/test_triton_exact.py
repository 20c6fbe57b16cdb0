"""All of the exact mode's contract, over the Triton backend in the interpreter."""

from __future__ import annotations

import pytest

from tests.engine import test_exact
from tests.engine.conftest import load
from tests.engine.test_exact import PAGES, Rig
from tests.engine.tiny_hf import write_hf
from tests.kernels.adopted import adopt

pytestmark = pytest.mark.soak
adopt(globals(), test_exact)


@pytest.fixture(scope="module", params=["bf16", "fp32", "w4a16", "w8a16", "w8a8+e4m3kv", "bf16+e4m3kv"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    sizes = {"hidden_size": 128, "intermediate_size": 128}  # whole groups of 4-bit weights
    loaded = load(write_hf(tmp_path_factory.mktemp("rig"), "qwen3", **sizes))
    return Rig(loaded.backend("triton", request.param, 6 * PAGES), loaded.facts.vocab)
