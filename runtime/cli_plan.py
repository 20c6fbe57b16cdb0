"""`tenuto plan`: what a model needs and a device holds, before anything is downloaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from engine.capacity import (
    Device,
    PlanError,
    TierSizes,
    TraceReport,
    Wish,
    devices,
    explain,
    make_plan,
    model_facts,
    plots,
    read_trace,
)
from runtime.cli_listing import show
from runtime.plan_report import report
from runtime.settings import Settings

_OPTIONS = (
    ("--device", str, "NAME", "See --list-devices; cpu is this machine, measured now.  [default: h100]"),
    ("--tp", int, "N", "Devices of a replica; the fewest that hold the model where it is not said."),
    ("--context", int, "TOKENS", "Of a session.  [default: 8192]"),
    ("--users", int, "N", "At the same time."),
    ("--requests-per-second", float, "RATE", "Of all users together."),
    ("--prompt-tokens", int, "TOKENS", "Of a request that are new.  [default: the context less the output]"),
    ("--output-tokens", int, "TOKENS", "Of a request.  [default: 256]"),
    ("--kv-dtype", str, "DTYPE", "bf16, fp8, fp32, int8.  [default: bf16]"),
    ("--weights-dtype", str, "DTYPE", "bf16, fp8, int8, int4, mxfp4, nvfp4; as the checkpoint is by default."),
    ("--util", float, "PART", "Of a device's memory that may be used.  [default: 0.9]"),
    ("--overhead-gb", float, "GB", "Of a replica, for neither weights nor KV.  [default: 0]"),
    ("--mfu", float, "PART", "Of peak FLOP/s that is reached.  [default: 0.5]"),
    ("--mbu", float, "PART", "Of peak bandwidth that is reached.  [default: 1]"),
    ("--headroom", float, "PART", "Of each replica that stays free.  [default: 0.2]"),
    ("--acceptance", float, "PART", "Of drafted tokens.  [default: 0.8]"),
    ("--draft-cost", float, "STEPS", "Of one drafted token.  [default: 0.05]"),
    ("--host-gb-s", float, "GB/S", "To host memory, all devices together; by the device's data sheet by default."),
    ("--nvme-gb-s", float, "GB/S", "Of NVMe; of one drive by default."),
)


class Duration(click.ParamType[float]):
    """Seconds; `50ms` and `2s` are understood."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        scale = 1e-3 if text.endswith("ms") else 1.0
        try:
            return float(text.removesuffix("ms").removesuffix("s")) * scale
        except ValueError:
            self.fail(f"{text[:40]!r} is no time; write 50ms, 2s or 0.05", param, ctx)


def _with_options(command: Any) -> Any:
    for flag, kind, metavar, words in reversed(_OPTIONS):
        command = click.option(flag, type=kind, metavar=metavar, help=words)(command)
    return command


@click.command()
@click.argument("model", required=False)
@_with_options
@click.option("--slo-ttft", "slo_ttft_s", type=Duration(), help="To the first token at most: 2s.")
@click.option(
    "--slo-tpot", "slo_tpot_s", type=Duration(), help="For each token after it at most: 50ms.  [default: 50ms]"
)
@click.option("--dp-attention", is_flag=True, help="Experts are spread; attention and sessions are whole on a device.")
@click.option("--beyond-context", is_flag=True, help="Plan past what the model was made for.")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Traffic: is a tier worth it?"
)
@click.option("--host-gb", type=float, default=512.0, show_default=True, help="Host memory for KV, for --trace.")
@click.option("--nvme-gb", type=float, default=3840.0, show_default=True, help="NVMe for KV, for --trace.")
@click.option("--explain", "explained", is_flag=True, help="Each result with its formula and its numbers.")
@click.option("--svg", type=click.Path(file_okay=False, path_type=Path), help="Put three plots into this directory.")
@click.option("--list-devices", is_flag=True, help="The devices with published figures, and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; its keys are in docs/plan.md.")
def plan(
    model: str | None,
    trace: Path | None,
    host_gb: float,
    nvme_gb: float,
    explained: bool,
    svg: Path | None,
    list_devices: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """What MODEL needs, and what a device holds, before anything is downloaded.

    MODEL is a config.json, a Hugging Face directory, a GGUF file, a name from `tenuto model list`, or - for either kind
    of file on standard input. No server is asked.
    """
    if list_devices:
        show([vars(one) for one in devices()], as_json, _DEVICE_COLUMNS, _device_cells)
        return
    if model is None:
        raise click.UsageError(
            "give a MODEL: a config.json, a directory, a GGUF file, a name from `tenuto model list`, -"
        )
    wish = Wish(**asked)
    facts = model_facts(model, Settings.load().models_dir, sys.stdin.buffer)
    planned = make_plan(facts, wish, _measured(wish.device))
    traffic = _traffic(planned, trace, TierSizes(host_gb, nvme_gb)) if trace else None
    lines = explain(planned) if explained else []
    if svg is not None:
        _draw(svg, plots(planned))
    if as_json:
        found = planned.plan.as_json()
        if explained:
            found["explain"] = [{**vars(one), "text": str(one)} for one in lines]
        if traffic is not None:
            found["trace"] = traffic.as_json()
        click.echo(json.dumps(found))
        return
    for text in report(planned, lines, traffic):
        click.echo(text)


_DEVICE_COLUMNS = ("device", "memory", "bandwidth", "bf16", "fp8", "source")


def _device_cells(row: Any) -> tuple[str, ...]:
    fp8 = f"{row['fp8_flops'] / 1e12:,.0f} TFLOPS" if row["fp8_flops"] else "-"
    return (
        row["id"],
        f"{row['hbm_bytes'] / 1e9:.0f} GB",
        f"{row['hbm_bps'] / 1e12:.3g} TB/s",
        f"{row['bf16_flops'] / 1e12:,.0f} TFLOPS",
        fp8,
        row["source"],
    )


def _measured(device: str | None) -> Device | None:
    if (device or "").strip().lower() != "cpu":
        return None
    from engine.cpuspeed import measure_cpu

    return measure_cpu()


def _traffic(planned: Any, path: Path, sizes: TierSizes) -> TraceReport:
    try:
        with path.open("rb") as lines:
            return read_trace(planned, lines, sizes)
    except OSError as error:
        raise PlanError("trace", f"{path} cannot be read: {error.strerror or error}") from None


def _draw(directory: Path, drawn: dict[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in drawn.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise PlanError("svg", f"{directory} cannot be written: {error.strerror or error}") from None
