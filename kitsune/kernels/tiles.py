"""A matrix in tiles, for what goes over its elements: how high and wide they are, and how programs share them."""

from typing import Final

import triton

#: Elements of a tile: with `warps_of` so many threads, one 16-byte load of bf16 each.
TILE: Final = 1024


def tile_of(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile, powers of two with at most TILE elements between them.

    256 columns are enough for whole memory lines, and the fewer there are, the fewer partial sums a backward pass
    leaves; few rows make it wider.
    """
    high = triton.next_power_of_2(rows)
    wide = fitting(columns, most=max(256, TILE // high), least=64)
    return min(high, TILE // wide), wide


def fitting(size: int, most: int, least: int = 1) -> int:
    """The power of two between `least` and `most` whose multiples overshoot `size` the least.

    An overshoot of a quarter is as good as none, and of equally good ones the largest is taken.
    """
    largest = min(most, triton.next_power_of_2(size))
    powers = [largest >> halvings for halvings in range(max(1, largest // least).bit_length())]
    return min(powers, key=lambda power: max(-size % power, size // 4))


def shares_of(tiles: int, across: int, programs: int) -> tuple[int, int]:
    """(programs for a column of `tiles` tiles, tiles for each of them), so that `across` columns make `programs`."""
    share = triton.cdiv(tiles, max(1, programs // across))
    return triton.cdiv(tiles, share), share
