"""All of the exact mode's contract, over the Triton backend in the interpreter."""

from __future__ import annotations

import pytest

from tests.engine import test_exact
from tests.engine.conftest import load
from tests.engine.test_exact import PAGES, Rig
from tests.engine.tiny import write_tiny
from tests.kernels.adopted import adopt

pytestmark = pytest.mark.soak
adopt(globals(), test_exact)


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    loaded = load(write_tiny(tmp_path_factory.mktemp("rig") / "tiny.gguf"))
    return Rig(loaded.backend("triton", request.param, 6 * PAGES), loaded.facts.vocab)
