"""Codes of +1 and -1 that are as orthogonal as their length allows.

In: how many, how long. Out: a matrix of them. Rows of a Hadamard matrix are orthogonal; there are such matrices only of lengths
1, 2 and multiples of four, and not all of those are easy to make. Other lengths are two matrices side by side, or one with
a few columns too many or too few.
"""

import itertools
import math
from functools import cache

import torch
from torch import Tensor


def make_codes(count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length] of +1 and -1, columns with random signs; `count` is at most `length`."""
    signs = torch.randint(2, (length,), generator=generator) * 2 - 1
    blocks, filled = find_blocks(count, length)
    rows = torch.cat([_make(order, count) for order in blocks], 1)[:, :length]
    if filled:
        rows = torch.cat([rows, torch.randint(2, (count, filled), generator=generator) * 2 - 1], 1)
    return rows * signs


def find_blocks(count: int, length: int) -> tuple[tuple[int, ...], int]:
    """Orders of one or two matrices whose columns, side by side, make the length, and how many columns are left to fill.

    Each has `count` rows at least. A single one may have columns too many, if that is nearer.
    """
    below = [order for order in range(length, count - 1, -1) if _is_known(order)]
    for first in below:
        rest = length - first
        if rest == 0 or (rest >= count and _is_known(rest)):
            return (first, rest) if rest else (first,), 0
    above = next(order for order in itertools.count(length) if _is_known(order))
    if below and length - below[0] <= above - length:
        return (below[0],), length - below[0]
    return (above,), 0


def shortfall(count: int, length: int) -> int:
    """The largest product of two codes that is possible; 0: they are orthogonal."""
    blocks, filled = find_blocks(count, length)
    return filled + max(sum(blocks) - length, 0)


@cache
def _is_known(order: int) -> bool:
    """By doubling (Sylvester), or from the squares modulo a prime (Paley)."""
    if order in (1, 2):
        return True
    if order % 4:
        return False
    return _is_prime(order - 1) or (_is_prime(order // 2 - 1) and order // 2 % 4 == 2) or _is_known(order // 2)


def _make(order: int, count: int) -> Tensor:
    """The first `count` rows of a matrix."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.int64)
    if order % 2 == 0 and _is_known(order // 2):
        half = _make(order // 2, min(count, order // 2))
        return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])[:count]
    if _is_prime(order - 1):
        return torch.eye(count, order, dtype=torch.int64) + _conference(order, count, corner=-1)
    upper = min(count, order // 2)
    c, eye = _conference(order // 2, upper, corner=1), torch.eye(upper, order // 2, dtype=torch.int64)
    return torch.cat([torch.cat([c + eye, c - eye], 1), torch.cat([c - eye, -c - eye], 1)])[:count]


def _conference(order: int, count: int, *, corner: int) -> Tensor:
    """Paley's: whether differences are squares modulo a prime, bordered by ones, the column by `corner`."""
    prime = order - 1
    kinds = torch.full((prime,), -1)
    kinds[torch.arange(1, prime) ** 2 % prime] = 1
    kinds[0] = 0
    matrix = torch.ones(count, order, dtype=torch.int64)
    matrix[1:, 0] = corner
    matrix[0, 0] = 0
    matrix[1:, 1:] = kinds[(torch.arange(count - 1)[:, None] - torch.arange(prime)[None, :]) % prime]
    return matrix


@cache
def _is_prime(number: int) -> bool:
    return number > 1 and all(number % i for i in range(2, math.isqrt(number) + 1))
