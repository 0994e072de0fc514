"""The traces of configs/studies, written so that what differs between two of them is one thing.

python benchmarks/study_traces.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from simserve.types import TraceRequest
from simserve.workload.readers.native import encode
from simserve.workload.scenarios import long_vs_short

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "studies"
PROMPT_LENS = (256, 1024, 4096, 16384)
TEMPLATE_LENS = (0, 15, 16, 17, 256, 4096)
SLICE_S = 20.0


def long_prefill(position: str) -> Iterator[TraceRequest]:
    """20 short requests over the 1.2 s that a prefill of 32,000 tokens takes, and that one."""
    return long_vs_short(
        num_short=20,
        long_prompt_len=32_000,
        short_prompt_len=128,
        long_output_len=32,
        short_output_len=32,
        position=position,
        gap_s=0.06,
    )


def repeats() -> Iterator[TraceRequest]:
    """Two unrelated requests, then each prompt twice, 3 s apart, so that no two meet."""
    prompts = [("warm-up", f"other{i}", 2048) for i in range(2)]
    for prompt_len in PROMPT_LENS:
        for name in ("cold", "repeat"):
            prompts.append((f"{name} {prompt_len}", f"text{prompt_len}", prompt_len))
    for i, (name, segment, prompt_len) in enumerate(prompts):
        yield request(i, 3.0 * i, ((segment, prompt_len),), name)


def one_template(kind: str, order: str = "interleaved") -> Iterator[TraceRequest]:
    """Templates of six lengths, 40 requests each, which begin every `SLICE_S`.

    They are of four tenants with equal or different salts, one tenant after the other or in turns.
    What is unique has a template in name only.
    """
    for place, length in enumerate(TEMPLATE_LENS):
        for i in range(40):
            tenant = i // 10 if order == "grouped" else i % 4
            text = f"own template {length}/{i}" if kind == "unique" else f"template {length}"
            parts = ((text, length), (f"own {length}/{i}", 100))
            yield request(
                40 * place + i,
                SLICE_S * place + 0.3 * i,
                parts if length else parts[1:],
                f"tenant {tenant}",
                {"equal": "salt", "different": f"salt {tenant}"}.get(kind),
            )


def four_templates(order: str) -> Iterator[TraceRequest]:
    """The same 40 requests on four templates: one template after the other, or in turns."""
    for i in range(40):
        template = i // 10 if order == "grouped" else i % 4
        yield request(i, 0.3 * i, ((f"template{template}", 4096), (f"own{i}", 100)), "all")


def request(
    i: int,
    arrival_s: float,
    prompt: tuple[tuple[str, int], ...],
    name: str,
    salt: str | None = None,
) -> TraceRequest:
    """A request of one output token, its arrival rounded to milliseconds."""
    return TraceRequest(
        request_id=f"r{i}",
        arrival_s=round(arrival_s, 3),
        prompt=prompt,
        output_len=1,
        class_=name,
        cache_salt=salt,
    )


TRACES = {
    **{f"long_{place}": (long_prefill, place) for place in ("first", "middle", "last")},
    "repeats": (repeats,),
    **{
        f"template_{kind}_{order}": (one_template, kind, order)
        for kind in ("equal", "different")
        for order in ("grouped", "interleaved")
    },
    "template_unique": (one_template, "unique"),
    **{f"templates_{order}": (four_templates, order) for order in ("grouped", "interleaved")},
}


def main(folder: Path) -> None:
    """Write each trace to a file of its name."""
    for name, (make, *arguments) in TRACES.items():
        lines = (encode(one) + "\n" for one in make(*arguments))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
