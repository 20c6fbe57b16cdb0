"""Triton asks once, where a kernel is decorated, whether it is to be interpreted. Here it is told so for just as long.

The environment variable does not stay: processes that tests start must not inherit it. Kernels that a test defines are
defined within `interpreted()`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "TRITON_INTERPRET"


@contextmanager
def interpreted() -> Iterator[None]:
    before = os.environ.get(_NAME)
    os.environ[_NAME] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before


def import_kernels() -> None:
    """Import Triton and every kernel, interpreted."""
    early = "triton" in sys.modules and "engine.kernels.target" not in sys.modules
    if early and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("triton was imported before tests/kernels could have it interpreted: import it later")
    with interpreted():
        from engine.kernels import interpreter, sample, target

        assert target.INTERPRETED, "engine.kernels was imported before tests/kernels could have it interpreted"
        sample.kernel_names()
        interpreter.apply()  # its first launch has Triton import the rest of itself
