"""Made-up acceptance: as often as it should be, and the same whatever else runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simserve.errors import ConfigError
from simserve.executor.acceptance import (
    accepted_as_counted,
    accepted_by_position,
    read_acceptance,
)


def counts(accepted: Any, number: int = 4000) -> list[int]:
    return [accepted(f"r{i % 40}", i // 40 + 1) for i in range(number)]


def shares(found: list[int], k: int) -> list[float]:
    """Of each position, how often it was accepted where all before it were."""
    reached = [sum(count >= i for count in found) for i in range(k + 1)]
    return [after / before for before, after in pairwise(reached)]


def test_each_position_has_its_probability() -> None:
    found = counts(accepted_by_position((0.9, 0.5, 0.2), seed=1))
    assert shares(found, 3) == pytest.approx([0.9, 0.5, 0.2], abs=0.03)
    assert found != counts(accepted_by_position((0.9, 0.5, 0.2), seed=2))
    assert set(counts(accepted_by_position((1.0, 0.0, 1.0), seed=1))) == {1}


def test_a_draw_depends_on_its_request_alone() -> None:
    first, second = (accepted_by_position((0.5, 0.5), seed=1) for _ in range(2))
    alone = [first("a", i) for i in range(50)]
    assert [(second("b", i), second("a", i))[1] for i in reversed(range(50))] == alone[::-1]


def test_counts_come_as_often_as_they_were_counted() -> None:
    found = counts(accepted_as_counted([0, 0, 0, 2], {}, seed=3))
    assert found.count(2) / len(found) == pytest.approx(0.25, abs=0.03)
    assert found.count(1) == 0


def test_the_steps_of_a_request_come_in_order() -> None:
    accepted = accepted_as_counted([], {"a": [2, 0, 1]}, seed=3)
    so_far, got = 1, []
    for _ in range(3):
        got.append(accepted("a", so_far))
        so_far += 1 + got[-1]
    assert got == [2, 0, 1]
    assert accepted("a", so_far) in (0, 1, 2)
    assert accepted("b", 1) == 0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"spec_decode_conditional_acceptance_pos_0": 0.8, "completed": 3}, [0.8, 0.0]),
        ([{"spec_decode_conditional_acceptance_pos_0": 0.8}], [0.8, 0.0]),
        ({"num_drafts": 100, "num_accepted_tokens_per_pos": [80, 20]}, [0.8, 0.25]),
        ({"accepted": [2, 2, 2, 0]}, [0.75, 1.0]),
    ],
    ids=["summary", "summary.json", "counters", "counts"],
)
def test_what_a_file_says(tmp_path: Path, said: Any, expected: list[float]) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(said))
    found = shares(counts(read_acceptance(file, 2, seed=5)), 2)
    assert found == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[1]", "holds no mapping"),
        ("{}", "holds neither accepted"),
        ('{"accepted": [0, 3]}', r"from 0 to num_speculative_tokens \(2\)"),
        ('{"accepted": {"a": 1}}', "something else than numbers"),
        ('{"accepted": []}', r"from 0 to num_speculative_tokens \(2\)"),
        ('{"accepted": [true]}', r"from 0 to num_speculative_tokens \(2\)"),
        ("[" * 100_000, "cannot be read"),
        ('{"num_drafts": -5, "num_accepted_tokens_per_pos": [-2]}', "not a number from 0 on"),
        ('{"num_drafts": 1, "num_accepted_tokens_per_pos": [2]}', "not from 0 to 1"),
    ],
)
def test_a_file_that_says_nothing(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "measured.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"acceptance_file: .*{words}"):
        read_acceptance(file, 2, seed=5)
    with pytest.raises(ConfigError, match="no such file"):
        read_acceptance(tmp_path / "nowhere.json", 2, seed=5)
