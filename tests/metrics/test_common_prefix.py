"""`common_prefix_tokens`: what prompts share, whatever the cache makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import simserve
from simserve.config.build_workload import build_workload
from simserve.config.loader import load_config
from simserve.workload.prefix_tree import PrefixTree

CONSTANT = {"kind": "constant"}


def run(synthetic: dict[str, Any], **kv_cache: Any) -> Any:
    arrival = {"kind": "constant", "rate": 10}
    lengths = {"prompt_len": {**CONSTANT, "value": 50}, "output_len": {**CONSTANT, "value": 40}}
    workload = {"synthetic": {"arrival": arrival, **lengths, **synthetic}}
    config = {"model": "llama-3.1-8b", "workload": workload, "kv_cache": kv_cache}
    return simserve.run(config).requests


SHARED = {"shared_prefix": {"prefix_len": {**CONSTANT, "value": 70}}, "num_requests": 5}
TALK = {"sessions": {"num_sessions": 3, "turns": {**CONSTANT, "value": 4}}}


@pytest.mark.parametrize("cache", [True, False])
def test_a_shared_prefix_is_common_to_all_but_the_first(cache: bool) -> None:
    requests = run(SHARED, enable_prefix_caching=cache)
    assert requests["common_prefix_tokens"].tolist() == [0, 70, 70, 70, 70]


def test_a_turn_shares_what_was_said_but_the_last_token() -> None:
    """The last token of an answer is never computed, so no cache can have it."""
    requests = run(TALK).sort_values(["session", "turn"])
    assert requests["common_prefix_tokens"].tolist() == [0, 89, 179, 269] * 3


def test_a_cache_never_finds_more() -> None:
    requests = run({**SHARED, **TALK, "num_requests": None})
    assert (requests["cached_tokens"] > 0).any()
    assert (requests["cached_tokens"] <= requests["common_prefix_tokens"]).all()


def test_a_request_that_never_came_in_has_none(story: Callable[..., Any]) -> None:
    told = story()
    told.arrive("a", prompt=(("p", 40), ("a", 3)))
    told.reject("no", at=0.0)
    told.arrive("b", prompt=(("p", 30), ("b", 3)))
    column = told.result().requests["common_prefix_tokens"]
    assert column.isna().tolist() == [False, True, False]
    assert column.dropna().tolist() == [0, 30]


def test_where_nothing_can_be_shared_no_tree_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> int:
        raise AssertionError("looked for what cannot be there")

    assert run({"num_requests": 3})["common_prefix_tokens"].tolist() == [0, 0, 0]
    monkeypatch.setattr(PrefixTree, "common_len", never)
    run({"num_requests": 3})
    with pytest.raises(AssertionError, match="cannot be there"):
        run(SHARED)


@pytest.mark.parametrize(
    ("name", "rows", "shares"),
    [
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,48,10\n",
            False,
        ),
        ("vidur.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,48,10\n", False),
        ("own.jsonl", '{"arrival_s": 0, "prompt_len": 48, "output_len": 10}\n', True),
    ],
)
def test_formats_say_whether_they_can_share(
    name: str, rows: str, shares: bool, tmp_path: Any
) -> None:
    (tmp_path / name).write_text(rows)
    workload = {"trace": {"path": str(tmp_path / name)}}
    built = build_workload(load_config({"model": "llama-3.1-8b", "workload": workload}), seed=0)
    assert built.shares_prefixes is shares
