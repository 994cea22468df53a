"""kitsune/base/byte_sizes.py: what is a size of memory, and what is none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.base.byte_sizes import parse_bytes, parse_memory_limit, size_words
from kitsune.errors import SettingsError


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (512, 512),
        ("512", 512),
        ("7B", 7),
        ("1KB", 1024),
        ("512MB", 512 << 20),
        ("2GB", 2 << 30),
        ("2GiB", 2 << 30),
        ("1 tib", 1 << 40),
        ("0GB", 0),
        ("0.0", 0),
        ("0.1KB", 102),
        (".5GB", 1 << 29),
        ("1.B", 1),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


def test_sizes_are_read_kindly() -> None:
    assert parse_bytes(" 1.5 gb ") == 3 << 29


@pytest.mark.parametrize(
    "size",
    [
        *["", "GB", "2 PB", "2Gi", "-1", "-1MB", "1e9", "2IB", "1..5GB", "1.2.3", ".", "KMGB", "1KMB"],
        *["²KB", "٣GB", "9" * 320, "9" * 320 + "GB", "9" * 100_000],
        *["0.1B", "0.9", "0.0009KB", f"0.{'0' * 400}1GB"],
        *[-1, True, 1.9, float("nan"), None, b"512"],
    ],
    ids=lambda size: repr(size)[:20],
)
def test_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(SettingsError, match="memory_pool_size"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [0, "0GB", 2**63, "9000000TB", "much", -1])
def test_limits_that_make_no_sense(size: Any) -> None:
    with pytest.raises(SettingsError, match="memory_limit"):
        parse_memory_limit(size)


def test_limits() -> None:
    assert parse_memory_limit("40GiB") == 40 << 30
    assert parse_memory_limit(None) is None


@pytest.mark.parametrize(
    ("count", "words"), [(40 << 30, "40 GiB"), (5594294518, "5.21 GiB"), (512 << 20, "512 MiB"), (0, "0 MiB")]
)
def test_sizes_in_words(count: int, words: str) -> None:
    assert size_words(count) == words


@given(st.integers(0, 2**40), st.sampled_from(["", "B", "KB", "MB", "GB", "kb", " mb"]))
def test_any_size_in_any_unit(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}[unit.strip().upper()]
    assert parse_bytes(f"{number}{unit}") == number * factor
