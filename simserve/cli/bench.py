"""`simserve bench`: measure the kernels and whole steps of the real executor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simserve.cli.measurement import check_writable, command_line, print_table, write_measurement
from simserve.cli.options import OverrideOption, naming_options
from simserve.errors import SimserveError

if TYPE_CHECKING:
    from simserve.executor.real.bench.kernel_cases import Case
    from simserve.executor.real.bench.step_cases import StepCase

__all__ = ["app"]

_STEP_OPTIONS = {
    "model": "--model",
    "executor.device": "--device",
    "scheduler.max_num_seqs": "--case",
    "scheduler.max_num_batched_tokens": "--case",
}
"""Which option of `step` sets a key."""

app = typer.Typer(
    help="Measure kernels and whole steps on a GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the rows with all raw samples there."),
]


@app.command()
def kernels(
    cases: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Names or patterns of cases, separated by commas: 'decode b64*,prefill 8192'. "
            "Default: all but those with over 3 GB of K and V.",
        ),
    ] = None,
    paths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Of auto, v1, v2, article (decode), varlen, split (prefill and mixed), flash, "
            "naive (dense), kv_write. Default: all but article.",
        ),
    ] = None,
    layouts: Annotated[
        str, typer.Option(metavar="LIST", help="KV layouts, of nhd and packed.")
    ] = "nhd",
    json_file: JsonOption = None,
) -> None:
    """Time the Triton kernels, beside what this GPU reads and multiplies at best.

    Every case runs on buffers that take turns, so that none is found in a cache; a sample is one
    replay of a CUDA graph of all calls, and medians are shown. Each is compared with float64 first.
    GB/s counts K and V once.

    Exit status: 0 done, 1 a kernel was wrong or did not fit, 2 no GPU or an unknown case.
    """
    from simserve.executor.real.bench.gpu import require_gpu
    from simserve.executor.real.bench.kernel_cases import choose_cases, choose_ways

    chosen, ways = choose_cases(_items(cases)), choose_ways(_items(paths))
    wanted = _layouts(layouts)
    check_writable(json_file)
    require_gpu("simserve bench kernels")
    options = {"--cases": cases, "--paths": paths, "--layouts": layouts}
    content: dict[str, Any] = {"rows": []}
    try:
        _measure_kernels(chosen, ways, wanted, content)
    finally:  # what is measured is kept, whatever stops the rest
        write_measurement(json_file, command_line("kernels", options), content)
    if any(row["failure"] for row in content["rows"]):
        raise typer.Exit(1)


def _measure_kernels(
    cases: Sequence[Case], ways: tuple[str, ...], layouts: list[Any], content: dict[str, Any]
) -> None:
    """Fill `content`, and print it at the end."""
    from simserve.executor.real.bench.ceilings import measure_ceilings
    from simserve.executor.real.bench.kernel_report import kernel_cells, resource_cells
    from simserve.executor.real.bench.kernels import measure_kernels
    from simserve.executor.real.bench.timing import time_graph

    ceilings = measure_ceilings(time_graph)
    rows: list[dict[str, Any]] = content["rows"]
    content["ceilings"] = ceilings._asdict()
    for row in measure_kernels(cases, ways=ways, layouts=layouts):
        rows.append(row.as_json(ceilings.read_gb_s, ceilings.matmul_tflop_s))
        shown = row.failure or f"{rows[-1]['median_us']:.1f} µs"
        typer.echo(f"{row.case} {row.path} {row.layout}: {shown}", err=True)
    typer.echo(
        f"Reached in this run: {ceilings.read_gb_s:,.0f} GB/s read, "
        f"{ceilings.matmul_tflop_s:,.0f} TFLOP/s of a bfloat16 matrix product.\n"
    )
    print_table(kernel_cells(rows))
    print_table(resource_cells(rows))


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def _layouts(text: str) -> list[Any]:
    names = _items(text)
    if unknown := [name for name in names if name not in ("nhd", "packed")]:
        raise SimserveError(f"--layouts: '{unknown[0]}' is neither nhd nor packed")
    return names or ["nhd"]


@app.command()
def step(
    case: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=][N*]Q[@K[~S]],…",
            help="N requests (1) of Q new tokens after K computed ones (0), of which they have the "
            "first S together; parts joined by commas make one step: 64*1@2048,1984. Repeatable.",
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Preset, or the path of a Hugging Face config.json.")
    ] = "llama-3.1-8b",
    device: Annotated[str, typer.Option(help="cuda, or cpu (plain torch).")] = "cuda",
    num_iters: Annotated[int, typer.Option(min=1, help="Measured steps of each case.")] = 20,
    num_iters_warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 5,
    override: OverrideOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time whole steps of the real executor: prepare, forward, sample, sync.

    Decodes go on from step to step, as they do in service; prompts and chunks are computed again.
    Neither a scheduler nor a trace takes part. Medians are shown, in milliseconds.

    Exit status: 0 done, 2 no GPU, or a case that is not in the grammar or does not fit.
    """
    from simserve.executor.real.bench.step_cases import parse_step_case
    from simserve.executor.real.bench.step_report import step_cells

    cases = [parse_step_case(text) for text in case]
    check_writable(json_file)
    rows: list[dict[str, Any]] = []
    options = {
        "--case": case,
        "--model": model,
        "--device": device,
        "--num-iters": num_iters,
        "--num-iters-warmup": num_iters_warmup,
        "--override": override,
    }
    try:
        with naming_options("simserve bench step", model, _STEP_OPTIONS):
            setup = (model, device, override or [])
            _measure_steps(cases, setup, (num_iters_warmup, num_iters), rows)
    finally:
        write_measurement(json_file, command_line("step", options), {"rows": rows})
    print_table(step_cells(rows))


def _measure_steps(
    cases: Sequence[StepCase],
    setup: tuple[str, str, list[str]],
    counts: tuple[int, int],
    rows: list[dict[str, Any]],
) -> None:
    """Fill `rows`. One model and one KV cache serve all cases."""
    from simserve.config.build import build, with_pool_size
    from simserve.config.build_real import open_machine
    from simserve.config.loader import load_config
    from simserve.executor.real.bench.gpu_watch import GpuWatch
    from simserve.executor.real.bench.step_report import step_row
    from simserve.executor.real.bench.steps import measure_steps

    model, device, overrides = setup
    loaded = load_config(_step_config(cases, model, device), overrides)
    longest = max(case.max_len for case in cases) + sum(counts)
    max_model_len = loaded.config.scheduler.max_model_len
    if max_model_len is not None and longest > max_model_len:
        raise SimserveError(
            f"--case: a request grows to {longest} tokens, more than scheduler.max_model_len = "
            f"{max_model_len}"
        )
    machine = open_machine(loaded)
    loaded = with_pool_size(loaded, machine)
    parts = build(loaded, loaded.config.seed, machine=machine).parts
    samples = measure_steps(
        parts.executor,
        cases,
        block_size=parts.kv.block_size,
        num_gpu_blocks=parts.kv.num_gpu_blocks,
        num_warmup_steps=counts[0],
        num_steps=counts[1],
    )
    began = perf_counter()
    with GpuWatch() as watch:
        for case, found in zip(cases, samples, strict=True):
            ended = perf_counter()
            rows.append(step_row(case, found, watch.between(began, ended)))
            typer.echo(f"{case.name}: {rows[-1]['median_ms']:.2f} ms", err=True)
            began = ended


def _step_config(cases: Sequence[StepCase], model: str, device: str) -> dict[str, object]:
    """A configuration whose steps are large enough for all cases; its workload is not run."""
    is_path = model.endswith(".json") or "/" in model
    return {
        "model": {"config": model} if is_path else model,
        "workload": {
            "synthetic": {"num_requests": 1, "output_len": {"kind": "constant", "value": 1}}
        },
        "executor": {"kind": "real", "device": device},
        "scheduler": {
            "max_num_seqs": max(len(case.requests) for case in cases),
            "max_num_batched_tokens": max(case.num_tokens for case in cases),
        },
    }
