"""Any change of a recorded case is noticed, in every key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from simserve.fidelity.conform import check
from simserve.fidelity.conform.cases import Case
from tests.golden.cases import CASES, load

# Together these hold every key: speculation with pressure, asynchronous with pressure and aborts,
# resets, a deadlock, and ghosts.
ALTERED = ("g51", "g39", "g44", "g27", "g53")


def test_all_cases_are_there() -> None:
    assert len(CASES) == 60


@cache
def recorded(name: str) -> Case:
    """Shared: whoever changes it changes it back."""
    return load(name)


@cache
def simulated(name: str) -> Case:
    return check.simulate_case(recorded(name))


def altered(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, list):
        return [altered(value[0]), *value[1:]] if value else [0]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}x"


def alterations() -> Iterator[tuple[str, str, int, str]]:
    """(case, part, row, key): the last row that holds a key, for every key of every part."""
    seen = set()
    for name in ALTERED:
        case = recorded(name)
        for part in ("steps", "requests", "summary"):
            rows = [case["summary"]] if part == "summary" else case[part]
            last = {key: i for i, row in enumerate(rows) for key in row}
            for key, row in last.items():
                if (part, key) not in seen:
                    seen.add((part, key))
                    yield name, part, row, key


ALTERATIONS = list(alterations())


def test_all_recorded_keys_are_altered() -> None:
    keys: dict[str, set[str]] = {"steps": set(), "requests": set(), "summary": set()}
    for path in CASES:
        case = load(path.name)
        for part in ("steps", "requests"):
            keys[part].update(*case[part])
        keys["summary"].update(case["summary"])
    for part, found in keys.items():
        assert {key for _, p, _, key in ALTERATIONS if p == part} == found


@pytest.mark.parametrize(("name", "part", "row", "key"), ALTERATIONS)
def test_an_altered_value_is_found(
    name: str, part: str, row: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, got = recorded(name), simulated(name)
    target = case["summary"] if part == "summary" else case[part][row]
    original = target[key]
    monkeypatch.setitem(target, key, altered(original))

    difference = check._first_difference(case, got)

    where = {"steps": f"step {row}", "requests": f"request {target.get('id')}"}
    assert difference is not None
    assert (difference.where, difference.key) == (where.get(part, "summary"), key)
    assert (difference.expected, difference.got) == (target[key], original)


@pytest.mark.parametrize("key", ["wq", "pre", "cp", "nc"])
def test_a_key_that_is_missing_or_too_many_is_found(key: str) -> None:
    case = load("g51")
    got = simulated("g51")
    row = next(i for i, step in enumerate(case["steps"]) if key in step)
    value = case["steps"][row].pop(key)
    difference = check._first_difference(case, got)
    assert difference is not None
    assert (difference.where, difference.key, difference.got) == (f"step {row}", key, value)

    case = load("g51")
    case["steps"][0]["ts"] = 0.0
    difference = check._first_difference(case, got)
    assert difference is not None
    assert (difference.where, difference.key) == ("step 0", "ts")


@pytest.mark.parametrize("part", ["steps", "requests"])
def test_a_missing_last_row_is_found(part: str) -> None:
    case = load("g44")
    del case[part][-1]
    assert check._first_difference(case, simulated("g44")) is not None


def test_only_config_and_workload_are_read() -> None:
    case = load("g44")
    bare = {"format": 1, "config": case["config"], "workload": case["workload"]}
    assert check._first_difference(case, check.simulate_case(bare)) is None
