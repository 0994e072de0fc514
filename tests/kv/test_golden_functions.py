"""Batch geometry equals what was recorded from vLLM v0.11.0, row by row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simserve.kv.batch import (
    PersistentBatch,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from simserve.kv.block_table import BlockTable
from simserve.kv.cascade import use_cascade_attention
from simserve.kv.prefix_stats import PrefixCachingMetrics
from simserve.types import Lookups


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    file = Path(__file__).parents[1] / "data" / "golden_functions.json.gz"
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        tables: dict[str, Any] = json.load(stream)
    return tables


def test_slot_mapping(golden: dict[str, Any]) -> None:
    cases = golden["slot_mapping"]
    assert len(cases) == 40
    for case in cases:
        num_rows = max(op[1] for op in case["ops"]) + 1
        table = BlockTable(num_rows, case["max_blocks"], case["block_size"])
        calls: dict[str, Callable[..., None]] = {
            "add": table.add_row,
            "append": table.append_row,
            "move": table.move_row,
            "swap": table.swap_rows,
        }
        for name, *arguments in case["ops"]:
            calls[name](*arguments)

        assert [table.row(i).tolist() for i in range(len(case["rows"]))] == case["rows"]
        slots = table.compute_slot_mapping(case["req_indices"], case["positions"])
        assert slots.tolist() == case["slots"]


def test_split_decodes_and_prefills(golden: dict[str, Any]) -> None:
    rows = golden["split_decodes_and_prefills"]["rows"]
    assert len(rows) == 400
    for query_start_loc, threshold, uniform, expected in rows:
        split = split_decodes_and_prefills(query_start_loc, threshold, bool(uniform))
        assert list(split) == expected, (query_start_loc, threshold, uniform)


def test_reorder_batch(golden: dict[str, Any]) -> None:
    rows = golden["reorder_batch"]["rows"]
    assert len(rows) == 300
    for num_scheduled_tokens, threshold, order, swaps, modified in rows:
        result = reorder_batch_to_split_decodes_and_prefills(num_scheduled_tokens, threshold)
        assert result.order == order
        assert [list(swap) for swap in result.swaps] == swaps
        assert result.modified == bool(modified)


def test_persistent_batch(golden: dict[str, Any]) -> None:
    runs = golden["persistent_batch"]["runs"]
    assert len(runs) == 12
    for run in runs:
        batch = PersistentBatch()
        for removed, added, rows in run:
            before = list(batch.rows)
            moves = batch.update(map(str, removed), map(str, added))
            assert batch.rows == [str(row) for row in rows]
            for source, target in moves:
                assert batch.rows[target] in (*before[source : source + 1], *map(str, added))


def test_use_cascade_attention(golden: dict[str, Any]) -> None:
    rows = golden["use_cascade_attention"]["rows"]
    assert len(rows) == 200
    for prefix, lens, q_heads, kv_heads, alibi, sliding, local, sms, expected in rows:
        query_lens = [lens[0]] * lens[2] if lens[1:2] == ["x"] else lens
        used = use_cascade_attention(
            prefix,
            query_lens,
            q_heads,
            kv_heads,
            use_alibi=bool(alibi),
            use_sliding_window=bool(sliding),
            use_local_attention=bool(local),
            num_sms=sms,
        )
        assert used == bool(expected), (prefix, lens, q_heads, kv_heads, sms)


def test_prefix_caching_metrics(golden: dict[str, Any]) -> None:
    table = golden["prefix_caching_metrics"]
    assert len(table["rows"]) == 120
    metrics = PrefixCachingMetrics(table["max_recent_requests"])
    for reset, requests, queries, hits, *recent, rate in table["rows"]:
        metrics.observe(Lookups(requests, queries, hits), bool(reset))
        assert list(metrics.recent) == recent
        assert round(metrics.hit_rate, 9) == rate
