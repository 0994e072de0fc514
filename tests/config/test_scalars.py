from __future__ import annotations

import pytest

from simserve.config.scalars import AmbiguousScalarError, read_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("64", 64),
        ("-3", -3),
        ("0", 0),
        ("0x10", 16),
        ("0.5", 0.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000),
        ("1E+3", 1000),
        ("1e-3", 0.001),
        ("1.5e3", 1500.0),
        ("0.11.0", "0.11.0"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("my_sched:MyScheduler", "my_sched:MyScheduler"),
        ("2024-05-10", "2024-05-10"),
        ("y", "y"),
        ("1e", "1e"),
    ],
)
def test_reads_as_yaml_1_2(text: str, value: object) -> None:
    found = read_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("on", "write true"),
        ("Yes", "write true"),
        ("off", "write false"),
        ("NO", "write false"),
        ("017", "write 17"),
        ("-010", "write -10"),
        ("08", "write 8"),
        ("12:30", "plain number"),
        ("22:30", "plain number"),
        ("1:30:00.5", "plain number"),
        ("1_000", "write 1000"),
        ("0o17", "decimal"),
        ("0b11", "decimal"),
        (".inf", "not a finite number"),
        (".NaN", "not a finite number"),
        ("1e999", "too large"),
        ("1e999999999", "too large"),
        ("1" * 5000, "too long"),
    ],
)
def test_refuses_what_readers_disagree_about(text: str, advice: str) -> None:
    with pytest.raises(AmbiguousScalarError, match=advice):
        read_scalar(text)
