"""Recorded public traces, where SIMSERVE_TRACES names a folder of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from simserve.errors import TraceError
from simserve.types import TraceRequest
from simserve.workload.trace import Trace, open_trace

Open = Callable[..., Trace]


@pytest.fixture
def recorded(traces_dir: Path) -> Open:
    def read(name: str, **options: object) -> Trace:
        path = traces_dir / name
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        return open_trace(path, **options)  # type: ignore[arg-type]

    return read


@pytest.mark.parametrize(
    ("name", "format", "num_requests", "span_s"),
    [
        ("azure2023_code.csv", "azure", 8819, 3435.948),
        ("azure2023_conv.csv", "azure", 19366, 3501.722),
        ("azure2025_multimodal_head5_tail5.csv", "azure", 10, 604799.695),
        ("mooncake_conversation.jsonl", "mooncake", 12031, 3536.999),
        ("mooncake_synthetic.jsonl", "mooncake", 3993, 1022.025),
        ("mooncake_toolagent_first1000_dynamo.jsonl", "mooncake", 1000, 177.098),
        ("llmservingsim_mixed.jsonl", "llmservingsim", 608, 60.898),
        ("llmservingsim_vllm_measured_rtx4090.jsonl", "llmservingsim", 300, 29.101),
        ("dynamo_pi_request_trace.jsonl", "dynamo", 17, 162.147),
    ],
)
def test_size_and_span(
    recorded: Open, name: str, format: str, num_requests: int, span_s: float
) -> None:
    trace = recorded(name)
    assert trace.format == format
    assert trace.report.num_requests == num_requests
    assert trace.report.span_s == pytest.approx(span_s, abs=1e-3)
    assert not trace.report.dropped


def test_burstgpt_drops_its_failed_calls_and_warns_of_the_low_rate(recorded: Open) -> None:
    report = recorded("burstgpt1_first400.csv", on_bad_row="drop").report
    assert report.dropped == {"zero_prompt": 17}
    assert report.num_requests == 383
    assert any("mean rate is 0.01" in warning for warning in report.warnings)


def test_an_unsorted_file_is_sorted_and_says_so(recorded: Open) -> None:
    trace = recorded("FAKE_azure2024_lookalike_unsorted.csv")
    assert trace.report.num_backward_steps == 2137
    assert np.diff([r.arrival_s for r in trace.requests()]).min() >= 0
    with pytest.raises(TraceError, match="is earlier than that of the row above"):
        recorded("FAKE_azure2024_lookalike_unsorted.csv", sort=False).requests()


def shared_part(trace: Trace) -> float:
    """Share of prompt tokens found in an endless cache of blocks, walking each from its front."""
    seen: set[object] = set()
    num_tokens = num_found = 0

    def found(request: TraceRequest) -> int:
        hit = 0
        for segment, length in request.prompt:
            if segment not in seen:
                break
            hit += length
        return hit

    for request in trace.requests():
        num_tokens += request.prompt_len
        num_found += found(request)
        seen.update(segment for segment, _ in request.prompt)
    return num_found / num_tokens


@pytest.mark.parametrize(
    ("name", "share"),
    [("mooncake_conversation.jsonl", 0.374), ("mooncake_synthetic.jsonl", 0.651)],
)
def test_prefixes_are_shared_as_recorded(recorded: Open, name: str, share: float) -> None:
    assert shared_part(recorded(name)) == pytest.approx(share, abs=2e-3)


def test_prompts_beyond_a_limit_are_those_known(recorded: Open) -> None:
    sizes = [
        r.prompt_len + r.output_len for r in recorded("mooncake_conversation.jsonl").requests()
    ]
    assert sum(size > 8192 for size in sizes) == 5570
    sizes = [r.prompt_len for r in recorded("mooncake_synthetic.jsonl").requests()]
    assert sum(size > 131_072 for size in sizes) == 10


def test_servegen_windows_give_as_many_requests_as_recorded(recorded: Open) -> None:
    trace = recorded("servegen_reason_deepseek-r1_chunk-0-trace.csv")
    assert trace.format == "servegen"
    assert trace.num_requests == pytest.approx(4926, rel=0.05)
