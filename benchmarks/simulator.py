"""How fast the simulator is: named workloads as whole processes, beside SimPy's own speed.

    python benchmarks/simulator.py                    # all but the long ones, three times each
    python benchmarks/simulator.py W1 'W3 100K' --repeats 5
    python benchmarks/simulator.py --mooncake mooncake_conversation.jsonl
    python benchmarks/simulator.py --show benchmarks/results/simulator.json

A run is `simserve run ... --quiet` from start to exit, imports (as byte code) and result files
included, the picture left out. CPU seconds are user and system time, memory is the largest resident
set. Repeats are interleaved, so that a busy minute of the machine meets all workloads; medians are
reported. SimPy's timeouts per CPU second, taken before and after each run, say how fast the machine
was then. The results go into a JSON file, in which workloads that were not measured this time stay
as they are; its table goes to the standard output as Markdown.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "simulator.json"
SIMSERVE = (sys.executable, "-c", "from simserve.cli.main import main; main()")
YARDSTICK = """
import time, simpy
env = simpy.Environment()
def ticks():
    for _ in range(500_000):
        yield env.timeout(1.0)
env.process(ticks())
start = time.process_time()
env.run()
print(500_000 / (time.process_time() - start))
"""


NO_LEAPS = (
    "from functools import partial; from simserve import api; "
    "api.build = partial(api.build, leap=False); from simserve.cli.main import main; main()"
)
"""The command line with every step taken by itself."""


class Workload(NamedTuple):
    """What to run: a configuration of `configs/bench`, with overrides."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    program: tuple[str, ...] = SIMSERVE
    is_long: bool = False
    """Takes minutes: runs only if it is named."""


def of_length(name: str, num_requests: int, *, is_long: bool) -> Workload:
    """W2 with another number of requests."""
    override = f"workload.synthetic.num_requests={num_requests}"
    return Workload(f"W3 {name}", "w2.yaml", (override,), is_long=is_long)


WORKLOADS = (
    Workload("W1", "w1.yaml"),
    Workload("W2", "w2.yaml"),
    Workload("W2 on H200", "w2.yaml", ("gpu=h200",)),
    Workload("W2, no leaps", "w2.yaml", program=(sys.executable, "-c", NO_LEAPS)),
    Workload("W2, async", "w2.yaml", ("scheduler.async_scheduling=true",)),
    of_length("1K", 1_000, is_long=False),
    of_length("100K", 100_000, is_long=True),
    of_length("1M", 1_000_000, is_long=True),
    Workload("KV pressure", "pressure.yaml"),
    Workload("long and short", "long_short.yaml"),
    Workload("multi-turn", "multi_turn.yaml"),
    Workload("priority", "priority.yaml"),
    Workload("speculative", "spec_decode.yaml"),
)


class Aim(NamedTuple):
    """What a workload should take at most, at 1.0 M timeouts per CPU second."""

    cpu_s: float
    peak_mb: float | None = None


AIMS = {
    "W1": Aim(0.8),
    "W2": Aim(1.6, 150),
    "W2, no leaps": Aim(4.0),
    "W3 100K": Aim(12.0, 300),
    "W3 1M": Aim(120.0, 1500),
    "Mooncake": Aim(10.0),
}


class Run(NamedTuple):
    """One process, measured."""

    cpu_s: float
    timeouts_per_cpu_s: float
    """Of SimPy alone: the mean of just before and just after."""
    peak_mb: float
    num_steps: int
    num_requests: int
    num_output_tokens: int
    simulated_s: float


def main() -> None:
    """Measure, or show what was measured."""
    arguments = parse()
    if arguments.show:
        print("\n".join(table(json.loads(arguments.show.read_text()))))
        return
    wanted, known = arguments.workloads, list(WORKLOADS)
    if arguments.mooncake:
        path = f"workload.trace.path={arguments.mooncake.resolve()}"
        known.append(Workload("Mooncake", "mooncake.yaml", (path,)))
    chosen = [w for w in known if (w.name in wanted if wanted else not w.is_long)]
    if unknown := set(wanted) - {w.name for w in known}:
        sys.exit(f"no such workload: {', '.join(sorted(unknown))}")
    report = measure(chosen, arguments.repeats)
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())["workloads"]
        report["workloads"] = before | report["workloads"]
    order = [w.name for w in (*WORKLOADS, Workload("Mooncake", "mooncake.yaml"))]
    report["workloads"] = {n: report["workloads"][n] for n in order if n in report["workloads"]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


def parse() -> argparse.Namespace:
    """What to measure, how often, and where the result goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(w.name for w in WORKLOADS)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {names}; all")
    parser.add_argument("--mooncake", type=Path, metavar="FILE.jsonl", help="its conversations")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--show", type=Path, metavar="FILE.json", help="print its table only")
    return parser.parse_args()


def measure(workloads: Sequence[Workload], repeats: int) -> dict[str, Any]:
    """Run everything `repeats` times, round by round."""
    compileall.compile_dir(ROOT / "simserve", quiet=2)
    runs: dict[str, list[Run]] = {w.name: [] for w in workloads}
    for number in range(1, repeats + 1):
        for workload in workloads:
            print(f"round {number} of {repeats}: {workload.name}", file=sys.stderr)
            runs[workload.name].append(run_once(workload))
    environment = json.loads(output_of(*SIMSERVE, "env", "--json"))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "environment": environment,
        "processor": processor(),
        "num_cpus": os.cpu_count(),
        "workloads": {
            w.name: {
                "config": f"configs/bench/{w.config}",
                "overrides": [shown(override) for override in w.overrides],
                "date": date,
                "commit": environment["commit"],
                "runs": [run._asdict() for run in runs[w.name]],
            }
            for w in workloads
        },
    }


def timeouts_per_cpu_s() -> float:
    return float(output_of(sys.executable, "-c", YARDSTICK))


def run_once(workload: Workload) -> Run:
    """One process. This one stays small: a child's peak memory is at least its parent's."""
    overrides = [word for o in (*workload.overrides, "metrics.plot=false") for word in ("-o", o)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        config = ROOT / "configs" / "bench" / workload.config
        command = [*workload.program, "run", str(config), *overrides, "--out", str(out), "--quiet"]
        before = timeouts_per_cpu_s()
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        after = timeouts_per_cpu_s()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{workload.name} failed with exit status {process.returncode}")
        summary = json.loads((out / "summary.json").read_text())[0]
    return Run(
        cpu_s=usage.ru_utime + usage.ru_stime,
        timeouts_per_cpu_s=(before + after) / 2,
        peak_mb=usage.ru_maxrss * 1024 / 1e6,
        num_steps=summary["num_steps"],
        num_requests=summary["num_prompts"],
        num_output_tokens=summary["total_output_tokens"],
        simulated_s=summary["duration"],
    )


class Medians(NamedTuple):
    """Of the runs of one workload."""

    num_requests: int
    cpu_s: float
    standard_cpu_s: float
    """At 1.0 M timeouts per CPU second."""
    peak_mb: float

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Medians:
        """Those of a workload's entry in the report."""
        runs = [Run(**run) for run in measured["runs"]]
        return cls(
            runs[0].num_requests,
            statistics.median(run.cpu_s for run in runs),
            statistics.median(run.cpu_s * run.timeouts_per_cpu_s / 1e6 for run in runs),
            statistics.median(run.peak_mb for run in runs),
        )


SIZES = ("W3 1K", "W2", "W3 100K", "W3 1M")
"""The same workload with more and more requests."""


def table(report: dict[str, Any]) -> Iterator[str]:
    """Medians as a Markdown table, under a line about the machine."""
    environment, workloads = report["environment"], report["workloads"]
    commits = sorted({w["commit"][:12] for w in workloads.values() if w["commit"]})
    dates = sorted({w["date"][:10] for w in workloads.values()})
    speeds = [run["timeouts_per_cpu_s"] for w in workloads.values() for run in w["runs"]]
    yield (
        f"{report['processor']}, {report['num_cpus']} CPUs, Python {environment['python']}, "
        f"simserve {environment['simserve']} at {', '.join(commits) or 'no commit'}, "
        f"{', '.join(dates)}; SimPy: {min(speeds) / 1e6:.2f} to {max(speeds) / 1e6:.2f} M timeouts "
        "per CPU second."
    )
    yield ""
    yield (
        "| workload | requests | steps | runs | CPU s | at 1.0 M timeouts/s | peak MB "
        "| steps per CPU s | requests per CPU s | output tokens per CPU s |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, measured in workloads.items():
        first, found = Run(**measured["runs"][0]), Medians.of(measured)
        cpu_s = found.cpu_s
        yield (
            f"| {name} | {first.num_requests:,} | {first.num_steps:,} | {len(measured['runs'])} "
            f"| {cpu_s:.2f} | {found.standard_cpu_s:.2f} | {found.peak_mb:.0f} "
            f"| {first.num_steps / cpu_s:,.0f} | {first.num_requests / cpu_s:,.0f} "
            f"| {first.num_output_tokens / cpu_s:,.0f} |"
        )
    yield from growth(workloads)
    yield from aims(workloads)


def growth(workloads: dict[str, Any]) -> Iterator[str]:
    """Exponents of the growth with requests, from size to size of the same workload."""
    found = [Medians.of(workloads[name]) for name in SIZES if name in workloads]
    if len(found) > 1:
        steps = ", ".join(
            f"{a.num_requests:,} to {b.num_requests:,}: "
            f"{exponent(a, b, 'standard_cpu_s'):.2f} and {exponent(a, b, 'peak_mb'):.2f}"
            for a, b in pairwise(found)
        )
        yield ""
        yield f"Exponents of growth with requests, of CPU time and of memory: {steps}."


def aims(workloads: dict[str, Any]) -> Iterator[str]:
    """What was aimed at, beside what is."""
    yield ""
    yield "| aims | CPU s at 1.0 M timeouts/s | at most | peak MB | at most |"
    yield "| --- | --- | --- | --- | --- |"
    for name, aim in AIMS.items():
        if name in workloads:
            found = Medians.of(workloads[name])
            yield (
                f"| {name} | {_beside(found.standard_cpu_s, aim.cpu_s, '.2f')} "
                f"| {_beside(found.peak_mb, aim.peak_mb, '.0f')} |"
            )


def _beside(found: float, limit: float | None, form: str) -> str:
    """Two cells; what is above its limit stands out."""
    if limit is None:
        return f"{found:{form}} | "
    return f"**{found:{form}}** | {limit:g}" if found > limit else f"{found:{form}} | {limit:g}"


def exponent(small: Medians, large: Medians, what: str) -> float:
    ratio = getattr(large, what) / getattr(small, what)
    return math.log(ratio) / math.log(large.num_requests / small.num_requests)


def shown(override: str) -> str:
    """An override with the name of a file alone: its folder is a matter of the machine."""
    key, _, value = override.partition("=")
    return f"{key}={Path(value).name}" if "/" in value else override


def processor() -> str:
    """The processor's name, as Linux has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def output_of(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
