"""Tiling of a matrix for elementwise kernels: the size of tiles, and their distribution over programs."""

from typing import Final

import triton

#: Elements of a tile: with the threads of `warps_of`, one 16-byte load of bf16 each.
TILE: Final = 1024


def tile_of(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile: powers of two with a product of at most TILE.

    256 columns are enough for whole cache lines, and fewer columns leave fewer partial sums in a backward pass. With
    few rows it is wider.
    """
    high = triton.next_power_of_2(rows)
    wide = fitting(columns, most=max(256, TILE // high), least=64)
    return min(high, TILE // wide), wide


def fitting(size: int, most: int, least: int = 1) -> int:
    """The power of two between `least` and `most` whose multiples exceed `size` the least.

    An excess of up to a quarter counts as none, and the largest of equally good ones is taken.
    """
    largest = min(most, triton.next_power_of_2(size))
    powers = [largest >> halvings for halvings in range(max(1, largest // least).bit_length())]
    return min(powers, key=lambda power: max(-size % power, size // 4))


def shares_of(tiles: int, across: int, programs: int) -> tuple[int, int]:
    """(programs for a column of `tiles` tiles, tiles for each), with about `programs` for all `across` columns."""
    share = triton.cdiv(tiles, max(1, programs // across))
    return triton.cdiv(tiles, share), share
