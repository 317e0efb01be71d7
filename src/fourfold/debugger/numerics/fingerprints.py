"""What is kept of a tensor instead of the tensor: enough to say whether another is the same, and how far from it.

A tensor is a matrix of rows (tokens, or rows of a weight) and features, of which a rank may hold a part. Of every row:

- the checksum, sum of bits(x_j) odd(j) modulo 2^64, where odd(j) is a fixed odd number of feature j. Rows with equal
  checksums are bitwise equal, but for one in 2^64.
- the square, sum of x_j^2.
- the sketch, K numbers sum of x_j s_k(j) with fixed signs s_k(j). For two rows x and y the mean over k of
  (sketch(x) - sketch(y))^2 is an unbiased estimate of |x - y|^2 (Alon, Matias and Szegedy 1996), whatever x and y are.

All three are sums over features, and what belongs to a feature depends on its number in the whole alone. So the
fingerprints of ranks that hold a part each add up to that of the whole, and two layouts can be compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUM_SIGNS = 8  # K
_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Elements widened to 64 bits at a time, by device. What leaves a processor's cache takes several times as long."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """Of r rows. checksum: int64 [r]; square: fp32 [r]; sketch: fp32 [r, K]. Where the tensor is."""

    checksum: Tensor
    square: Tensor
    sketch: Tensor


class Fingerprinter:
    """Makes fingerprints; keeps what depends on the features alone."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def of(self, tensor: Tensor, *, first: int = 0) -> Fingerprint:
        """Of a matrix [r, c], whose first column is feature ``first`` of the whole; a vector has one feature."""
        matrix = tensor.detach()
        matrix = matrix.reshape(matrix.shape[0], -1)
        odd, signs = self._of_features(first, matrix.shape[1], matrix.device)
        rows = max(1, _AT_ONCE[matrix.device.type] // max(matrix.shape[1], 1))
        if len(matrix) <= rows:
            return _fingerprint(matrix, odd, signs)
        parts = [_fingerprint(part, odd, signs) for part in matrix.split(rows)]
        return Fingerprint(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _of_features(self, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(odd int64 [count], signs fp32 [K, count]) of features from ``first`` on."""
        key = (first, count, device)
        if key not in self._kept:
            mixed = _mixed(torch.arange(first, first + count, device=device))
            signs = (mixed >> torch.arange(8, 8 + NUM_SIGNS, device=device).unsqueeze(1)) & 1
            self._kept[key] = (mixed | 1, (2 * signs - 1).float())
        return self._kept[key]


def _fingerprint(matrix: Tensor, odd: Tensor, signs: Tensor) -> Fingerprint:
    matrix = matrix + 0.0  # -0.0 becomes 0.0: they are equal
    bits = matrix.view(_INTEGERS[matrix.element_size()]).to(torch.int64)
    wide = matrix.float()
    sketch = (signs @ wide.t()).t().contiguous()  # as wide @ signs.t(), for which there is a slower kernel
    return Fingerprint((bits * odd).sum(1), wide.square().sum(1), sketch)


def _mixed(numbers: Tensor) -> Tensor:
    """int64 -> int64 whose bits look random: the finaliser of SplitMix64 (Steele et al. 2014), with signed shifts."""
    x = (numbers + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31)
