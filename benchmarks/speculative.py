"""What drafting and verifying cost on this GPU: steps of decodes, by who drafts.

    python benchmarks/speculative.py [--model NAME] [--draft-model NAME] [--out FILE] [--seconds N]

B requests with prompts of equal length arrive at once; counted are the steps in which all of them
decode and some verify drafts. Weights are random, and what is accepted says nothing of a trained
model: of another model's drafts and of those that are looked up next to nothing, of the model's own
drafts (it is its own draft model, with the same weights) nearly all. So it is the times that are of
use. All numbers go to a JSON file.
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
ITSELF = "itself"
BATCHES = (1, 16, 64)
PROMPT_LEN, OUTPUT_LEN = 512, 96
PARTS = ("prepare_s", "forward_s", "sample_s", "sync_s", "draft_s", "schedule_s", "update_s")


def cases(draft_model: str) -> list[tuple[str, int]]:
    """Who drafts, and k, in the order of importance, should time run out."""
    drafters = ("ngram", draft_model)
    of_k = {k: [(drafter, k) for drafter in drafters] for k in (3, 5, 1)}
    return [("none", 0), *of_k[3], (ITSELF, 3), *of_k[5], *of_k[1]]


def speculative(model: str, drafter: str, k: int) -> dict[str, Any] | None:
    """Ends of one token are looked up too, so that there are drafts at all."""
    if not k:
        return None
    if drafter == "ngram":
        how: dict[str, Any] = {"method": drafter, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        how = {"method": "draft_model", "draft_model": model if drafter == ITSELF else drafter}
    return {**how, "num_speculative_tokens": k}


def config(
    model: str, drafter: str, k: int, batch: int, device: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One run."""
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
            "speculative": speculative(model, drafter, k),
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


def row(drafter: str, k: int, batch: int, data: RunData) -> dict[str, Any]:
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
        "drafts": drafter,
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
    parser.add_argument("--draft-model", default="llama-3.2-1b")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()
    require_gpu("benchmarks/speculative.py")
    end_s = time.monotonic() + arguments.seconds
    command = ["python", "benchmarks/speculative.py", "--model", arguments.model]
    command += ["--draft-model", arguments.draft_model, "--seconds", f"{arguments.seconds:g}"]
    rows: list[dict[str, Any]] = []
    took_s: dict[str, float] = {}
    for drafter, k in cases(arguments.draft_model):
        began_s = time.monotonic()
        if began_s + took_s.get(drafter, max(took_s.values(), default=0.0)) > end_s:
            continue
        machine = open_machine(load_config(config(arguments.model, drafter, k, 1)))
        for batch in BATCHES:
            document = config(arguments.model, drafter, k, batch)
            run(document, machine)  # once for what is compiled or grown when it is first met
            rows.append(row(drafter, k, batch, run(document, machine)))
            one = rows[-1]
            times = f"{one['step_ms']:.2f} ms, of which drafts {one.get('draft_ms', 0):.2f}"
            length = one.get("spec_decode_mean_acceptance_length", 1)
            print(f"{drafter}, k {k}, batch {batch}: {times}; {length:.2f} tokens", flush=True)
        machine.close()
        took_s[drafter] = time.monotonic() - began_s
        done = {"weights": "random", "model": arguments.model, "rows": rows}
        write_measurement(arguments.out, command, done)


if __name__ == "__main__":
    main()
