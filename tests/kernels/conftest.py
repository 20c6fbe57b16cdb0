"""Kernels run in Triton's interpreter here; `make test-kernels` also compiles them, in processes of its own."""

from __future__ import annotations

from tests.kernels.interpreted import import_kernels

import_kernels()

import torch  # noqa: E402 (after Triton)

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # and what a result of attention may be off
