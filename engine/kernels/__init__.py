"""Triton kernels, one a file, each with its float64 meaning beside it.

Imported by the Triton backend, the tests and the benches only: it needs torch and triton. What a kernel file holds:

    _kernel      the kernel, in the subset that Triton's interpreter runs: no autotuning, inline assembly, libdevice or
                 block pointers
    CONFIGS      tile sizes, warps and stages by (arch, shape); see `target.pick`
    NAME(...)    the launch: checks shapes, picks a configuration, allocates nothing
    meaning(...) the same in plain torch, float64
    samples(size) calls with their bounds, which tests, the compile gate and the benches run; see `sample`
"""

__all__: list[str] = []
