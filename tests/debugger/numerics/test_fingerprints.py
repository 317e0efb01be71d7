"""Checksums against integers of any size in Python, squares and sketches against what they estimate."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import NUM_SIGNS, Fingerprint, Fingerprinter

WORD = 1 << 64
PACKED = {torch.float32: ("<f", "<I", 0), torch.bfloat16: ("<f", "<I", 16), torch.float64: ("<d", "<Q", 0)}


def number_of(feature: int) -> int:
    """SplitMix64 of a feature, but with shifts that keep the sign, as they are on 64-bit integers in PyTorch."""

    def shifted(x: int, by: int) -> int:
        return ((x - WORD if x >> 63 else x) >> by) % WORD

    x = (feature + 1) * 0x9E3779B97F4A7C15 % WORD
    x = (x ^ shifted(x, 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ shifted(x, 27)) * 0x94D049BB133111EB % WORD
    return x ^ shifted(x, 31)


def checksum(values: list[float], dtype: torch.dtype, *, first: int = 0) -> int:
    """Of a row, as a signed number."""
    of_value, of_bits, shift = PACKED[dtype]
    total = 0
    for i, value in enumerate(values):
        bits = struct.unpack(of_bits, struct.pack(of_value, value + 0.0))[0]
        size = 8 * struct.calcsize(of_bits) - shift
        bits >>= shift
        signed = bits - (1 << size) if bits >> (size - 1) else bits
        total += signed * (number_of(first + i) | 1)
    total %= WORD
    return total - WORD if total >> 63 else total


def of(matrix: Tensor, *, first: int = 0) -> Fingerprint:
    return Fingerprinter().of(matrix, first=first)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksums_are_those_of_long_arithmetic(dtype: torch.dtype) -> None:
    matrix = random(4, 37).to(dtype)
    wanted = [checksum(row, dtype, first=11) for row in matrix.tolist()]
    assert of(matrix, first=11).checksum.tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bit_changes_the_checksum_and_the_sign_of_zero_does_not(dtype: torch.dtype) -> None:
    matrix = random(3, 50).to(dtype)
    other = matrix.clone()
    other[1, 7] = torch.nextafter(other[1, 7].float(), torch.tensor(9.0)) if dtype is torch.float32 else other[1, 7] * 2
    other[2] = -0.0
    matrix[2] = 0.0
    assert (of(matrix).checksum == of(other).checksum).tolist() == [True, False, True]
    swapped = matrix[:, [1, 0, *range(2, 50)]]
    assert (of(matrix).checksum == of(swapped).checksum).tolist() == [False, False, True]


@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (3, 2, 4), (7,), (2, 70_000), (3000, 64)])
def test_parts_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    """By columns to any parts; by rows nothing depends on how many there are, nor on how many are taken at a time."""
    whole = random(*shape).reshape(shape[0], -1)
    one = of(random(*shape))
    cut = (whole.shape[1] + 2) // 3
    parts = [of(part, first=cut * i) for i, part in enumerate(whole.split(cut, dim=1))]
    summed = Fingerprint(*(torch.stack(column).sum(0) for column in zip(*parts, strict=True)))
    assert torch.equal(summed.checksum, one.checksum)
    torch.testing.assert_close(summed.square, one.square)
    torch.testing.assert_close(summed.sketch, one.sketch, rtol=1e-4, atol=1e-3 * whole.shape[1] ** 0.5)
    rows = [of(row.unsqueeze(0)) for row in whole[:4]]
    assert [row.checksum.item() for row in rows] == one.checksum[:4].tolist()
    torch.testing.assert_close(
        one.square.double(), whole.double().square().sum(1), rtol=1e-5, atol=0.0, check_dtype=False
    )


@pytest.mark.parametrize(("features", "scale"), [(64, 1e-6), (4096, 1e-3), (256, 3.0)])
def test_the_estimate_of_a_distance(features: int, scale: float) -> None:
    """Unbiased, with a variance of at most 2 |x - y|^4 / K: so the mean over rows is near, and no row is far off."""
    rows = 2000
    x = random(rows, features)
    y = x + scale * random(rows, features, seed=2) * torch.linspace(0.0, 2.0, features)
    estimate = (of(x).sketch.double() - of(y).sketch.double()).square().mean(1)
    truth = (x.double() - y.double()).square().sum(1)
    ratio = estimate / truth
    spread = (2 / NUM_SIGNS) ** 0.5
    assert abs(ratio.mean() - 1) < 5 * spread / rows**0.5
    assert ratio.std() < 1.1 * spread
    assert ratio.min() > 0.01
    assert ratio.max() < 6


def test_signs_and_factors_are_those_of_the_features_number() -> None:
    """Half of the signs are +, no two sketches agree more than by chance; every factor is odd, and another one."""
    signs = of(torch.eye(4096)).sketch
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert signs.mean(0).abs().max() < 5 / 64
    assert (signs.t() @ signs / 4096 - torch.eye(NUM_SIGNS)).abs().max() < 5 / 64
    smallest = torch.tensor(1, dtype=torch.int32).view(torch.float32)  # its bits are the number 1
    factors = of(torch.eye(4096) * smallest).checksum
    assert bool((factors % 2 == 1).all())
    assert len(factors.unique()) == 4096


def test_numbers_that_are_not_finite() -> None:
    matrix = random(4, 6)
    matrix[1, 2], matrix[2, 3] = torch.nan, torch.inf
    found = of(matrix)
    assert found.square.isfinite().tolist() == [True, False, False, True]
    assert found.sketch.isfinite().all(1).tolist() == [True, False, False, True]
    assert torch.equal(found.checksum, of(matrix.clone()).checksum)


def test_what_is_looked_at_is_not_changed_and_needs_no_graph() -> None:
    x = random(2, 5).requires_grad_()
    y = x * -0.0
    found = of(y)
    assert not found.square.requires_grad
    assert torch.signbit(y).any()  # the zeros of y are still negative
