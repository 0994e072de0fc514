"""What sampling adds to steps, as the package has it: from what `sampling_cost.py` has measured.

    python benchmarks/sampling_fit.py           # write simserve/presets/sampling/h200.json
    python benchmarks/sampling_fit.py --check   # exit with 1 if it is not what comes out

Medians by batch and vocabulary are taken over as they are, and how far off it is to go in straight
lines between them: each inner batch and vocabulary is left out once and predicted from its
neighbours. Penalties are what they take beyond a temperature, and log-probabilities what they take
beyond the tokens alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simserve.cost.sampling import Times
from simserve.cost.sampling_file import METHODS, Errors, SamplingFile, Table

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "sampling_cost_h200.json"
PRESET = ROOT / "simserve" / "presets" / "sampling" / "h200.json"
GREEDY_OF_TEN = 3
"""Of each ten rows that `mixed` has measured; the others are top-p."""


def tables(report: Mapping[str, Any], sizes: Sequence[int], vocab_sizes: Sequence[int]) -> Any:
    """Medians (s) by call and method."""
    seconds = {
        (row["call"], row["method"], row["vocab_size"], row["batch"]): 1e-6 * row["median_us"]
        for row in report["rows"]
    }
    return {
        name: tuple(
            tuple(float(f"{seconds[*name, vocab, size]:.5g}") for size in sizes)
            for vocab in vocab_sizes
        )
        for name in dict.fromkeys(key[:2] for key in seconds)
    }


def beyond(one: Table, other: Table) -> Table:
    """What one takes more than another."""
    return tuple(
        tuple(max(0.0, float(f"{a - b:.5g}")) for a, b in zip(*rows, strict=True))
        for rows in zip(one, other, strict=True)
    )


def left_out(places: Sequence[int], table: Table) -> Iterator[float]:
    """Errors of each inner column, from the two beside it."""
    for values in table:
        for at in range(1, len(places) - 1):
            share = (places[at] - places[at - 1]) / (places[at + 1] - places[at - 1])
            between = values[at - 1] * (1 - share) + values[at + 1] * share
            yield abs(between / values[at] - 1)


def mixed_errors(file: SamplingFile, measured: Table) -> Iterator[float]:
    """Of batches of both kinds of row, priced by the times of each."""
    for vocab, seconds in zip(file.vocab_sizes, measured, strict=True):
        greedy, top_p = (Times(file, file.methods[name], vocab) for name in ("greedy", "top_p"))
        for rows, took_s in zip(file.num_rows, seconds, strict=True):
            num_greedy = sum(row % 10 < GREEDY_OF_TEN for row in range(rows))
            yield abs((greedy.of(num_greedy) + top_p.of(rows - num_greedy)) / took_s - 1)


def errors_of(errors: Iterator[float]) -> Errors:
    found = list(errors)
    return Errors(mean=round(sum(found) / len(found), 3), largest=round(max(found), 3))


def preset(path: Path) -> SamplingFile:
    """What the package ships of a file of measurements."""
    data = path.read_bytes()
    report = json.loads(data)
    sizes, vocab_sizes = (
        tuple(sorted({row[key] for row in report["rows"]})) for key in ("batch", "vocab_size")
    )
    found = tables(report, sizes, vocab_sizes)
    drawn = {name: found["draw", name] for name in METHODS if name != "argmax"}
    drawn["penalties"] = beyond(drawn["penalties"], drawn["temperature"])
    packages, environment = report["environment"]["packages"], report["environment"]
    gpu = environment["gpu"].split(", NVIDIA")[0]
    logprobs = {
        int(number): beyond(table, found["store", "None"])
        for (call, number), table in found.items()
        if call == "store" and number != "None"
    }
    alone = [table for name, table in found.items() if name != ("store", "None")]
    file = SamplingFile(
        schema_version=1,
        gpu="h200",
        measured_on=(
            f"{gpu}, torch {packages['torch']}, Triton {packages['triton']}, simserve at "
            f"{environment['commit'][:12]} with changes, {report['date'][:10]}"
        ),
        logits=f"{report['logits_dtype']}, normal, standard deviation 2.5",
        source=path.name,
        sha256=hashlib.sha256(data).hexdigest(),
        num_rows=sizes,
        vocab_sizes=vocab_sizes,
        methods={"argmax": found["argmax", ""], **drawn},
        logprobs=logprobs,
        errors={
            "between_rows": errors_of(e for one in alone for e in left_out(sizes, one)),
            "between_vocabularies": errors_of(
                e for one in alone for e in left_out(vocab_sizes, tuple(zip(*one, strict=True)))
            ),
        },
    )
    mixed = errors_of(mixed_errors(file, found["draw", "mixed"]))
    return file.model_copy(update={"errors": {**file.errors, "mixed": mixed}})


def main() -> None:
    """Write the preset; with --check, exit with 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args()
    text = json.dumps(preset(MEASURED).model_dump(), indent=1) + "\n"
    if arguments.check:
        sys.exit(text != PRESET.read_text(encoding="utf-8"))
    PRESET.parent.mkdir(exist_ok=True)
    PRESET.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
