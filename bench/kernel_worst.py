"""Runs every tiny sample in Triton's interpreter and compares it with its meaning. A process of its own.

    python -m bench.kernel_worst --kernel merge

Prints a JSON line for each sample: {"kernel", "sample", "triton", "worst", "bound"}.
"""

from __future__ import annotations

import json
import os

import click

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the next lines do

import torch
import triton

from engine.kernels import interpreter
from engine.kernels.sample import kernel_names, samples_of


@click.command()
@click.option("--kernel", "chosen", multiple=True, help="Only this kernel; may be given again.")
def main(chosen: tuple[str, ...]) -> None:
    """The largest error of every sample."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    interpreter.apply()
    for kernel in chosen or kernel_names():
        for sample in samples_of(kernel, "tiny"):
            click.echo(
                json.dumps(
                    {
                        "kernel": kernel,
                        "sample": sample.name,
                        "triton": triton.__version__,
                        "worst": sample.worst(),
                        "bound": sample.bound,
                    }
                )
            )


if __name__ == "__main__":
    main()
