from __future__ import annotations

import gzip
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from simserve.executor.ngram import NgramProposer, ngram_propose


def test_drafts_equal_those_recorded_from_vllm() -> None:
    file = Path(__file__).parents[1] / "data" / "golden_functions.json.gz"
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        rows = json.load(stream)["ngram_propose"]["rows"]
    assert len(rows) == 300
    for tokens, min_n, max_n, max_model_len, k, drafts in rows:
        assert ngram_propose(tokens, min_n, max_n, max_model_len, k) == drafts


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_drafts_are_what_a_plain_search_finds(
    tokens: list[int], min_n: int, more: int, k: int
) -> None:
    max_n = min_n + more
    expected: list[int] = []
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]]
        if places:
            expected = tokens[places[0] + n : places[0] + n + k]
            break
    assert ngram_propose(tokens, min_n, max_n, 1000, k) == expected


def test_the_engines_batch_gives_drafts_to_the_wrong_row() -> None:
    """Row 1 is the first eligible one: its drafts are kept at 0, where nobody eligible reads."""
    repeats = [[5, 6, 7, 5, 6], [8, 9, 3, 8, 9]]
    rows = [None, repeats[0], repeats[1]]
    fixed = NgramProposer(2, 2, 1, max_model_len=100, quirks="fixed")
    assert fixed.propose(rows) == [[], [7], [3]]
    engine = NgramProposer(2, 2, 1, max_model_len=100)
    assert engine.propose(rows) == [[], [3], []]
    assert engine.propose(repeats) == [[7], [3]]
    assert engine.propose([None, [1, 2, 3]]) == [[], [3]], "left over from the step before"
