"""Kernels run in Triton's interpreter here; `make test-kernels` also compiles them, in processes of its own."""

from __future__ import annotations

from tests.kernels.interpreted import import_kernels

import_kernels()
