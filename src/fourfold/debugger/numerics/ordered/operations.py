"""Operations of the model as the ranks of one (TP, CP) block make them together, in one process and without autograd.

What rank (c, t) holds stands at [c][t], in the shape that it has there: matrix products of another shape are sums in
another order. Every operation returns its result and a function from the gradient of that to the gradients of what went
in. Sums over ranks are written out: from rank 0 on, in fp32, then rounded.

Nothing here knows process groups, and nothing is shared with `parallel/`, with which it is compared to the bit; so the
formulas of gradients are here a second time. They are compared with plain autograd through whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.layout import Shard
from fourfold.model import Batch, Rope, attention
from fourfold.recipe import ModelConfig

Parts = list[list[Tensor]]  # [cp][tp]
Weights = Sequence[Tensor]  # of one weight what each TP rank computes with, [tp]


def summed(terms: Iterable[Tensor]) -> Tensor:
    """The sum from the first to the last, in fp32, rounded to the dtype of the terms."""
    first, *others = terms
    total = first.float()
    for term in others:
        total = total + term
    return total.to(first.dtype)


def split_rows(per_context: Sequence[Tensor], tp: int) -> Parts:
    """Of all tokens of every CP rank [m, ...] the part of each TP rank, [m / tp, ...]."""
    return [list(x.chunk(tp)) for x in per_context]


def gathered(parts: Parts) -> list[Tensor]:
    """All tokens of every CP rank, [m, ...]."""
    return [torch.cat(row) for row in parts]


def added(a: Parts, b: Parts) -> Parts:
    """a + b everywhere: the residual, and gradients that meet at it."""
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def norm(x: Parts, weight: Weights, eps: float) -> tuple[Parts, Callable[[Parts], tuple[Parts, Parts]]]:
    """RMSNorm of own tokens. The gradient of the weight is that of own tokens, at [c][t]."""
    rstd = [[torch.rsqrt(part.float().square().mean(-1, keepdim=True) + eps) for part in row] for row in x]
    wide = [[part.float() * r for part, r in zip(*rows, strict=True)] for rows in zip(x, rstd, strict=True)]
    out = [[w * part.to(w.dtype) for part, w in zip(row, weight, strict=True)] for row in wide]

    def backward(grad: Parts) -> tuple[Parts, Parts]:
        grad_x: Parts = []
        grad_weight: Parts = []
        for grads, normed_row, rstd_row in zip(grad, wide, rstd, strict=True):
            grad_x.append([])
            grad_weight.append([])
            for g, normed, r, w in zip(grads, normed_row, rstd_row, weight, strict=True):
                scaled = (g * w).float()
                grad_x[-1].append((r * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(g.dtype))
                grad_weight[-1].append((g.float() * normed).sum(0).to(w.dtype))
        return grad_x, grad_weight

    return out, backward


def project(
    x: Parts, weights: Sequence[Weights]
) -> tuple[list[Parts], Callable[[Sequence[Parts]], tuple[Parts, list[Parts]]]]:
    """All tokens of the CP rank times this TP rank's columns of each weight [out, D]."""
    whole = gathered(x)
    tp = len(weights[0])
    out = [[[full @ w.t() for w in weight] for full in whole] for weight in weights]

    def backward(grads: Sequence[Parts]) -> tuple[Parts, list[Parts]]:
        of_tokens = []
        for c in range(len(whole)):
            terms = []
            for t in range(tp):
                term = grads[0][c][t] @ weights[0][t]
                for grad, weight in zip(grads[1:], weights[1:], strict=True):
                    term = torch.addmm(term, grad[c][t], weight[t])
                terms.append(term)
            of_tokens.append(summed(terms))
        of_weights = [[[g.t() @ full for g in row] for row, full in zip(grad, whole, strict=True)] for grad in grads]
        return split_rows(of_tokens, tp), of_weights

    return out, backward


def combine(x: Parts, weight: Weights) -> tuple[Parts, Callable[[Parts], tuple[Parts, Parts]]]:
    """This TP rank's columns times its rows of a weight [D, in], summed over TP: to every rank its tokens."""
    tp = len(weight)
    out = [summed(part @ w.t() for part, w in zip(row, weight, strict=True)) for row in x]

    def backward(grad: Parts) -> tuple[Parts, Parts]:
        whole = gathered(grad)
        of_x = [[full @ w for w in weight] for full in whole]
        of_weight = [[full.t() @ part for part in row] for full, row in zip(whole, x, strict=True)]
        return of_x, of_weight

    return split_rows(out, tp), backward


def swiglu(a: Parts, b: Parts) -> tuple[Parts, Callable[[Parts], tuple[Parts, Parts]]]:
    """silu(a) * b"""
    out = [[F.silu(p) * q for p, q in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]

    def backward(grad: Parts) -> tuple[Parts, Parts]:
        rows = list(zip(grad, a, b, strict=True))
        of_a = [[torch.ops.aten.silu_backward(g * q, p) for g, p, q in zip(*row, strict=True)] for row in rows]
        of_b = [[g * F.silu(p) for g, p in zip(row[0], row[1], strict=True)] for row in rows]
        return of_a, of_b

    return out, backward


class Block:
    """A micro-batch as the CP ranks of one data-parallel group hold it.

    Args:
        batch: the whole micro-batch.
        shards: of the CP ranks, padded to a multiple of ``tp``.
        config: of the model.
        tp: TP ranks.
    """

    def __init__(self, batch: Batch, shards: Sequence[Shard], config: ModelConfig, *, tp: int) -> None:
        self.tp = tp
        self.batches = [batch.take(shard) for shard in shards]
        self._head_dim = config.head_dim
        self._ropes = [Rope(part.positions, config) for part in self.batches]
        # Where token i of the micro-batch lies in the tokens of all CP ranks, end to end.
        lies = torch.cat([torch.from_numpy(shard.index) for shard in shards])
        self._key_order = torch.empty_like(batch.tokens).scatter_(0, lies[lies >= 0], (lies >= 0).nonzero()[:, 0])

    def attend(self, projected: Sequence[Parts]) -> tuple[Parts, Callable[[Parts], tuple[Parts, Parts, Parts]]]:
        """Rotary embedding and attention: each rank its queries and heads, over the keys of all CP ranks.

        Inside of a rank it is autograd that makes gradients, as there.
        """
        projected = [[[y.detach().requires_grad_() for y in row] for row in parts] for parts in projected]
        with torch.enable_grad():
            heads = [[[y.unflatten(-1, (-1, self._head_dim)) for y in row] for row in parts] for parts in projected]
            q, k = (
                [[rope.rotate(y) for y in row] for rope, row in zip(self._ropes, parts, strict=True)]
                for parts in heads[:2]
            )
            v = heads[2]
        q_cut, keys, values = _cut(q), *self._all_keys(k, v)
        with torch.enable_grad():
            out = [
                [attention(own, seen, value, batch).flatten(-2) for own, seen, value in zip(*rows, strict=True)]
                for batch, *rows in zip(self.batches, q_cut, keys, values, strict=True)
            ]

        def backward(grad: Parts) -> tuple[Parts, Parts, Parts]:
            made = [
                [torch.autograd.grad(o, tensors, g) for o, g, *tensors in zip(*rows, strict=True)]
                for rows in zip(out, grad, q_cut, keys, values, strict=True)
            ]
            of_q = [[grads[0] for grads in row] for row in made]
            of_k, of_v = self._own_keys([[grads[1:] for grads in row] for row in made])
            through = [
                [
                    [torch.autograd.grad(rotated, leaf, g)[0] for rotated, leaf, g in zip(*row, strict=True)]
                    for row in rows
                ]
                for rows in (
                    zip(q, projected[0], of_q, strict=True),
                    zip(k, projected[1], of_k, strict=True),
                    zip(v, projected[2], of_v, strict=True),
                )
            ]
            return through[0], through[1], through[2]

        return [[x.detach() for x in row] for row in out], backward

    def _all_keys(self, k: Parts, v: Parts) -> tuple[Parts, Parts]:
        """Keys and values that each rank sees; each has tensors of its own, whose gradients are its own."""
        if len(k) == 1:
            return _cut(k), _cut(v)
        keys: Parts = []
        values: Parts = []
        for _ in k:
            keys.append([])
            values.append([])
            for t in range(self.tp):
                own = [torch.stack((k[c][t].detach(), v[c][t].detach()), dim=1) for c in range(len(k))]
                both = torch.cat(own).index_select(0, self._key_order)
                keys[-1].append(both[:, 0].requires_grad_())
                values[-1].append(both[:, 1].requires_grad_())
        return keys, values

    def _own_keys(self, grads: list[list[tuple[Tensor, ...]]]) -> tuple[Parts, Parts]:
        """What all CP ranks say of the gradients of each rank's keys and values, summed over them."""
        cp = len(grads)
        if cp == 1:
            return [[pair[0] for pair in grads[0]]], [[pair[1] for pair in grads[0]]]
        of_k: Parts = [[] for _ in range(cp)]
        of_v: Parts = [[] for _ in range(cp)]
        for t in range(self.tp):
            terms = []
            for c in range(cp):
                both = torch.stack(grads[c][t], dim=1)
                lying = both.new_zeros((cp * len(self.batches[0].tokens), *both.shape[1:]))
                terms.append(lying.index_copy_(0, self._key_order, both))
            for c, own in enumerate(summed(terms).chunk(cp)):
                of_k[c].append(own[:, 0])
                of_v[c].append(own[:, 1])
        return of_k, of_v

    def embed(self, table: Weights) -> tuple[Parts, Callable[[Parts], Parts]]:
        """Rows of a table whose entries lie split over TP, [V / tp, D] each. Returns the gradient of the table."""
        found = [[self._own_entries(part.tokens, len(own), t) for t, own in enumerate(table)] for part in self.batches]
        out = [
            summed(
                F.embedding(index, own) * inside.unsqueeze(1) for (index, inside), own in zip(row, table, strict=True)
            )
            for row in found
        ]

        def backward(grad: Parts) -> Parts:
            of_table: Parts = []
            for full, row in zip(gathered(grad), found, strict=True):
                of_table.append([])
                for (index, inside), own in zip(row, table, strict=True):
                    wide = full.float() * inside.unsqueeze(1)
                    made = torch.ops.aten.embedding_dense_backward(wide, index, len(own), -1, False)
                    of_table[-1].append(made.to(own.dtype))
            return of_table

        return split_rows(out, self.tp), backward

    @staticmethod
    def _own_entries(numbers: Tensor, size: int, t: int) -> tuple[Tensor, Tensor]:
        """Of entries of the vocabulary: (place in the share of TP rank t, whether they are in it)."""
        own = numbers - t * size
        inside = (own >= 0) & (own < size)
        return torch.where(inside, own, 0), inside

    def cross_entropy(
        self, logits: Parts, *, vocab_size: int, z_loss: float
    ) -> tuple[list[Tensor], Callable[[Tensor], Parts]]:
        """The sum over labels of every CP rank, fp32, from logits [m, V / tp] whose vocabulary lies split over TP.

        Its backward takes the gradient of each of these sums, one number.
        """
        losses, states = [], []
        for batch, row in zip(self.batches, logits, strict=True):
            assert batch.labels is not None
            shares = [self._share(own, batch.labels, vocab_size, t) for t, own in enumerate(row)]
            peaks, masses, targets = (torch.stack(column) for column in zip(*shares, strict=True))
            top = peaks.amax(0)
            log_total = top + torch.log((masses * torch.exp(peaks - top)).sum(0))
            valid = batch.labels >= 0
            losses.append(torch.where(valid, log_total - targets.sum(0), 0.0).sum())
            states.append((batch.labels, valid, log_total))

        def backward(grad_loss: Tensor) -> Parts:
            return [
                [
                    self._of_logits(own, labels, valid, log_total, grad_loss, vocab_size=vocab_size, z_loss=z_loss, t=t)
                    for t, own in enumerate(row)
                ]
                for row, (labels, valid, log_total) in zip(logits, states, strict=True)
            ]

        return losses, backward

    def _share(self, logits: Tensor, labels: Tensor, vocab_size: int, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one TP rank, per token: (largest logit, sum of exp of those less it, the label's logit or 0), fp32."""
        values = logits.to(torch.float32, copy=True)
        values[:, _num_real(logits, vocab_size, t) :] = float("-inf")
        peak = values.amax(1).clamp_min(torch.finfo(torch.float32).min)
        mass = torch.exp(values - peak.unsqueeze(1)).sum(1)
        index, inside = self._own_entries(labels, logits.shape[1], t)
        return peak, mass, torch.where(inside, values.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)

    def _of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        valid: Tensor,
        log_total: Tensor,
        grad_loss: Tensor,
        *,
        vocab_size: int,
        z_loss: float,
        t: int,
    ) -> Tensor:
        grad = torch.exp(logits.float() - log_total.unsqueeze(1))
        grad[:, _num_real(logits, vocab_size, t) :] = 0.0
        if z_loss:
            grad *= (1 + 2 * z_loss * log_total).unsqueeze(1)
        index, inside = self._own_entries(labels, logits.shape[1], t)
        grad.scatter_add_(1, index.unsqueeze(1), -inside.to(grad.dtype).unsqueeze(1))
        grad *= (valid * grad_loss).unsqueeze(1)
        return grad.to(logits.dtype)


def _num_real(logits: Tensor, vocab_size: int, t: int) -> int:
    """How many of a TP rank's columns are entries of the vocabulary, not padding."""
    return max(0, min(logits.shape[1], vocab_size - t * logits.shape[1]))


def _cut(parts: Parts) -> Parts:
    """The same numbers as leaves of a graph of their own."""
    return [[x.detach().requires_grad_() for x in row] for row in parts]
