"""What verifying drafts costs on this GPU: steps of decodes with ngram drafts, and without.

    python benchmarks/speculative.py [--model NAME] [--out FILE] [--seconds N]

B requests with prompts of equal length arrive at once; counted are the steps in which all of them
decode and some verify drafts. Weights are random: what is accepted says nothing of a trained model,
so that it is the times, by drafts and batch, that are of use. All numbers go to a JSON file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simserve.cli.measurement import write_measurement
from simserve.config.build import build, with_pool_size
from simserve.config.build_real import open_machine
from simserve.config.loader import load_config
from simserve.engine.simulation import simulate
from simserve.executor.real.bench.gpu import require_gpu

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine
    from simserve.metrics.recorder import RunData

RESULTS = Path(__file__).resolve().parent / "results" / "speculative_h200.json"
DRAFTS = (0, 3, 1, 5)
"""k; 0: no speculative decoding. In the order of importance, should time run out."""
BATCHES = (1, 16, 64)
PROMPT_LEN, OUTPUT_LEN = 512, 96
PARTS = ("prepare_s", "forward_s", "sample_s", "sync_s", "draft_s", "schedule_s", "update_s")


def config(model: str, k: int, batch: int, device: dict[str, Any] | None = None) -> dict[str, Any]:
    """One run. Ends of one token are looked up too, so that there are drafts at all."""
    drafts = {"method": "ngram", "num_speculative_tokens": k}
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {
        "model": model,
        "workload": {
            "synthetic": {
                "num_requests": batch,
                "prompt_len": {"kind": "constant", "value": PROMPT_LEN},
                "output_len": {"kind": "constant", "value": OUTPUT_LEN},
            }
        },
        "scheduler": {
            "max_num_seqs": max(BATCHES),
            "max_num_batched_tokens": 8192,
            "max_model_len": 1024,
            "quirks": "fixed",
            "speculative": {**drafts, **lookup} if k else None,
        },
        "kv_cache": {"num_gpu_blocks": 8192},
        "executor": {"kind": "real", "tokens": "sampled", **(device or {})},
    }


def run(document: dict[str, Any], machine: Machine) -> RunData:
    """Serve one workload."""
    loaded = with_pool_size(load_config(document), machine)
    built = build(loaded, seed=0, machine=machine)
    simulate(built.parts)
    return built.recorder.data()


def row(k: int, batch: int, data: RunData) -> dict[str, Any]:
    """Medians of the steps in which all requests decode, in milliseconds."""
    steps = data.steps
    decodes = (steps.num_scheduled == batch) & (steps.num_tokens <= batch * (k + 1))
    verifying = decodes & (steps.num_tokens > batch) if k else decodes
    if not verifying.any():
        verifying = decodes
    medians = {
        f"{name.removesuffix('_s')}_ms": 1e3 * statistics.median(steps.parts[name][verifying])
        for name in PARTS
        if name in steps.parts
    }
    return {
        "num_speculative_tokens": k,
        "batch": batch,
        "num_steps": int(verifying.sum()),
        "num_tokens": float(statistics.median(steps.num_tokens[verifying])),
        "step_ms": float(statistics.median(steps.duration_s[verifying]) * 1e3),
        **{name: float(value) for name, value in medians.items()},
        "first_shapes": int(steps.parts["first_shape"][verifying].sum()),
        "all_steps": steps.num_steps,
        "mean_tokens_per_decode_step": batch * (OUTPUT_LEN - 1) / max(1, int(decodes.sum())),
        **data.spec_decode.summary(float(steps.duration_s.sum())),
    }


def main() -> None:
    """Measure as much as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()
    require_gpu("benchmarks/speculative.py")
    end_s = time.monotonic() + arguments.seconds
    command = ["python", "benchmarks/speculative.py", "--model", arguments.model]
    command += ["--seconds", f"{arguments.seconds:g}"]
    rows: list[dict[str, Any]] = []
    longest_s = 0.0
    for k in DRAFTS:
        began_s = time.monotonic()
        if began_s + longest_s > end_s:
            break
        machine = open_machine(load_config(config(arguments.model, k, 1)))
        for batch in BATCHES:
            document = config(arguments.model, k, batch)
            run(document, machine)  # once for what is compiled or grown when it is first met
            rows.append(row(k, batch, run(document, machine)))
            one = rows[-1]
            print(f"k {k}, batch {batch}: {one['step_ms']:.2f} ms, {one['num_tokens']:.0f} tokens")
        machine.close()
        longest_s = max(longest_s, time.monotonic() - began_s)
        done = {"weights": "random", "model": arguments.model, "rows": rows}
        write_measurement(arguments.out, command, done)


if __name__ == "__main__":
    main()
