"""Whole steps of the real executor on this GPU: `python benchmarks/real_steps.py [--out FILE]`.

Runs `simserve bench step` with the shape of Llama 3.1 8B in bfloat16: decodes, prompts, chunks and
mixed batches. All samples go to a JSON file, the table to the standard output.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real_steps_h200.json"
SIMSERVE = (sys.executable, "-c", "from simserve.cli.main import main; main()")
CASES = (
    "1@128",
    "1@512",
    "8*1@2048",
    "32*1@2048",
    "64*1@512",
    "64*1@2048",
    "128*1@1024",
    "256*1@512",
    "256*1@2048",
    "2048",
    "8192",
    "32768",
    "16*512",
    "2048@8192",
    "2048@30720",
    "64*1@2048,448",
    "64*1@2048,1984",
    "64*1@2048,1984@8192",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    arguments = parser.parse_args()
    cases = [word for case in CASES for word in ("--case", case)]
    command = [*SIMSERVE, "bench", "step", "--model", "llama-3.1-8b", "--num-iters", "10", *cases]
    sys.exit(subprocess.run([*command, "--json", str(arguments.out)], check=False).returncode)


if __name__ == "__main__":
    main()
