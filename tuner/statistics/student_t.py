"""Student's t-distribution with a whole number of degrees of freedom. Pure Python."""

import math
from functools import cache
from typing import Final

_WIDEST: Final = 1e6  # 636 is the 99.9 % quantile of one degree of freedom


def within(t: float, degrees: int) -> float:
    """P(|T| <= t), exact. Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        return 2 / math.pi * (angle + sine * _terms(cosine, 2, degrees, cosine))
    return sine * _terms(cosine, 1, degrees, 1.0)


def two_sided_p(t: float, degrees: int) -> float:
    """P(|T| > |t|); 0 for an infinite t."""
    return min(1.0, max(0.0, 1.0 - within(abs(t), degrees)))


@cache
def quantile(degrees: int, share: float = 0.95) -> float:
    """The t with P(|T| <= t) = `share`, such as 2.776 for 4 degrees of freedom."""
    low, high = 0.0, _WIDEST
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < share else (low, middle)
    return (low + high) / 2


def _terms(cosine: float, first: int, degrees: int, term: float) -> float:
    """term + term first/(first + 1) cos² + ..., up to the power `degrees` - 2 of the cosine."""
    total = 0.0
    for factor in range(first, degrees, 2):
        total += term
        term *= factor / (factor + 1) * cosine**2
    return total
