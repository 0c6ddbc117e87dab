"""Gradients as whole numbers on one grid: their sum does not depend on its order, nor on who added what.

A pack's gradient is rounded to multiples of 2^(exponent - 45), where 2^exponent bounds the largest value of the step
before. A value 2^-22 times as large as that bound still keeps all 24 bits of its significand, and smaller ones are off
by less than a sum in fp32 would be. int64 leaves 16 bits above the bound: where a gradient exceeds them, the step is
repeated on a wider grid. Prior art: reproducible summation (Demmel and Nguyen, ARITH 2013); the same
training result on any number of workers: EasyScale (SC '23).

Shapes: N adapter weights.
"""

import math

import torch
from torch import Tensor

# A gradient may be this many times (as a power of two) as large as the largest of the step before.
HEADROOM_BITS = 16
# |sum| < 2^61, and rounding may add a half to each term.
SUM_BITS = 61
# The factor 2^(45 - exponent) must be a finite fp32 number.
MIN_EXPONENT, MAX_EXPONENT = -80, 128
# Of the first step: gradients of a mean loss are far below 2^16, and 1e-4 of them still keep 24 bits.
FIRST_EXPONENT = 0


def exponent_of(peak: float, before: int) -> int:
    """Return the grid after a step whose largest value was `peak`; `before` where there was no gradient."""
    if peak == 0:
        return before
    return min(max(math.frexp(peak)[1], MIN_EXPONENT), MAX_EXPONENT)


def fits(peak: float, exponent: int, packs: int) -> bool:
    """Return whether gradients up to `peak` are small enough to add `packs` of them on this grid."""
    return peak <= 2.0 ** (exponent + HEADROOM_BITS) / packs


def to_integers(grad_N: Tensor, exponent: int) -> Tensor:
    """Return `grad_N`, which fits, on the grid as int64 on the CPU."""
    return torch.round(grad_N * 2.0 ** _shift(exponent)).to(torch.int64).cpu()


def to_gradient(sum_N: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return a sum of such integers as floating-point numbers, rounded once."""
    return sum_N.to(dtype) * 2.0 ** -_shift(exponent)


def _shift(exponent: int) -> int:
    return SUM_BITS - HEADROOM_BITS - exponent
