"""What a layer computes between its matrix products and collectives, forward and backward, on local tensors.

Each function reads its tensors once and writes its results: eager PyTorch runs it as several passes over memory, and
``torch.compile`` as one kernel. Nothing here communicates or knows of autograd, so that it can be compiled as it is;
what surrounds it, the matrix products and the collectives, stays as it was written.

n tokens of this rank, D features, f = ffn / tp; everything in the dtype of computation unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.model.llama import turn


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [n, D], and what it divides by: (out [n, D], one over the root mean square, fp32 [n, 1])."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return scale(x, weight, rstd), rstd


def scale(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The second half of :func:`norm`; bitwise the same. Rounded before the weight is multiplied, as Meta does it."""
    return weight * (x.float() * rstd).to(x.dtype)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`norm` for x, and if wanted for the weight: a sum over tokens in fp32, rounded once."""
    normed = x.float() * rstd
    grad_normed = (grad * weight).float()
    grad_x = rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_weight = (grad.float() * normed).sum(0).to(weight.dtype) if of_weight else None
    return grad_x.to(x.dtype), grad_weight


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, each [n, f]."""
    return F.silu(a) * b


def swiglu_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`swiglu` for a and b."""
    return torch.ops.aten.silu_backward(grad * b, a), grad * F.silu(a)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q [n, H, d] and k [n, KV, d] by angles fp32 [n, d / 2], in fp32."""
    return turn(q, cos, sin), turn(k, cos, sin)


def rotate_backward(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rotate`: turned back."""
    return turn(grad_q, cos, -sin), turn(grad_k, cos, -sin)


class Arithmetic(NamedTuple):
    """The functions above, eager or compiled."""

    norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = norm
    scale: Callable[[Tensor, Tensor, Tensor], Tensor] = scale
    norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]] = norm_backward
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = swiglu_backward
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    rotate_backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate_backward


def arithmetic(*, compiled: bool) -> Arithmetic:
    """Eager, or a kernel each, made at the first call.

    A kernel is for the shapes that it was made for. When a micro-batch of another length comes it is made once more,
    then for any length; so a run of equal rows has the best kernels, and no run compiles for every length.
    """
    return Arithmetic(*map(_kernel, Arithmetic())) if compiled else Arithmetic()


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    made = torch.compile(function, options={"compile_threads": 1})  # else each rank starts a pool of processes

    def call(*arguments: Any) -> Any:
        # Whether a tensor is in a graph is nothing to a kernel, but PyTorch would make one for each case.
        return made(*(a.detach() if isinstance(a, Tensor) else a for a in arguments))

    return call
