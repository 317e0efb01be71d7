"""Forward and backward of one micro-batch through the whole model, as the ranks of one DP group make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fourfold.debugger.numerics.ordered.operations import (
    Block,
    Parts,
    Weights,
    added,
    combine,
    norm,
    project,
    swiglu,
)
from fourfold.debugger.numerics.records import Kind
from fourfold.layout import Stage
from fourfold.recipe import ModelConfig, first_key_head

See = Callable[[Kind, str, int, Parts], None]
"""(kind, name of the operation, virtual stage, tensors [cp][tp])"""


@dataclass
class Passes:
    """One micro-batch on its way through the stages.

    Args:
        config: of the model.
        block: the micro-batch.
        weights: of every stage by name: what each TP rank computes with.
        see: is told of every operation's output, and of the gradient that reaches it.

    Attributes:
        gradients: of the weights of every stage whose backward is over, by name, [cp][tp], in the dtype of computation.
    """

    config: ModelConfig
    block: Block
    weights: Sequence[Mapping[str, Weights]]
    see: See
    gradients: list[dict[str, Parts]] = field(default_factory=list)
    _backs: list[Callable[[Parts], Parts]] = field(default_factory=list)
    _stage: int = 0

    def forward(self, stages: Sequence[Stage], *, z_loss: float) -> list[Tensor]:
        """Losses of the CP ranks, fp32, summed over their labels."""
        x: Parts = []
        self.gradients = [{} for _ in stages]
        for self._stage, stage in enumerate(stages):
            if stage.embedding:
                x = self._embed()
            for layer in stage.layers:
                x = self._layer(x, f"layers.{layer}")
        return self._head(x, z_loss=z_loss)

    def backward(self, grad_loss: Tensor) -> None:
        """Fills ``gradients``. grad_loss: of the total loss with respect to this micro-batch's sums, fp32."""
        grad: Parts = [[grad_loss]]
        while self._backs:
            grad = self._backs.pop()(grad)

    def _weight(self, name: str) -> Weights:
        return self.weights[self._stage][f"{name}.weight"]

    def _keep(self, name: str, stage: int, grads: Parts) -> None:
        self.gradients[stage][f"{name}.weight"] = grads

    def _embed(self) -> Parts:
        name, stage = "tok_embeddings", self._stage
        x, back = self.block.embed(self._weight(name))
        self.see(Kind.OUTPUT, name, stage, x)

        def backward(grad: Parts) -> Parts:
            self.see(Kind.ARRIVING, name, stage, grad)
            self._keep(name, stage, back(grad))
            return []

        self._backs.append(backward)
        return x

    def _layer(self, x: Parts, path: str) -> Parts:
        attended, attention_back = self._attention(x, path)
        x = added(x, attended)
        fed, feed_forward_back = self._feed_forward(x, path)
        out, stage = added(x, fed), self._stage
        self.see(Kind.OUTPUT, path, stage, out)

        def backward(grad: Parts) -> Parts:
            grad = added(grad, feed_forward_back(grad))
            return added(grad, attention_back(grad))

        self._backs.append(backward)
        return out

    def _attention(self, x: Parts, path: str) -> tuple[Parts, Callable[[Parts], Parts]]:
        stage, names = self._stage, [f"{path}.attention.{name}" for name in ("wq", "wk", "wv")]
        attend, out = f"{path}.attention.attend", f"{path}.attention.wo"
        normed, norm_back = self._norm(x, f"{path}.attention_norm")
        heads = [self._heads(name) for name in names]
        projected, project_back = project(normed, heads)
        attended, attend_back = self.block.attend(projected)
        combined, combine_back = combine(attended, self._weight(out))
        for name, parts in zip([*names, attend, out], [*projected, attended, combined], strict=True):
            self.see(Kind.OUTPUT, name, stage, parts)

        def backward(grad: Parts) -> Parts:
            self.see(Kind.ARRIVING, out, stage, grad)
            grad, of_out = combine_back(grad)
            self._keep(out, stage, of_out)
            self.see(Kind.ARRIVING, attend, stage, grad)
            grads = attend_back(grad)
            for name, parts in zip(names, grads, strict=True):
                self.see(Kind.ARRIVING, name, stage, parts)
            grad, of_weights = project_back(grads)
            for name, parts in zip(names, of_weights, strict=True):
                self._keep(name, stage, self._whole_heads(name, stage, parts))
            return norm_back(grad)

        return combined, backward

    def _heads(self, name: str) -> Weights:
        """Rows of wq, wk or wv that each TP rank computes with."""
        weights = self._weight(name)
        return [weight[rows] for weight, rows in zip(weights, self._rows(name, len(weights)), strict=True)]

    def _whole_heads(self, name: str, stage: int, grads: Parts) -> Parts:
        """Gradients of these rows as those of what each rank holds."""
        weights = self.weights[stage][f"{name}.weight"]
        whole: Parts = []
        for row in grads:
            whole.append([])
            for grad, weight, rows in zip(row, weights, self._rows(name, len(weights)), strict=True):
                of_weight = grad.new_zeros(weight.shape)
                of_weight[rows] = grad
                whole[-1].append(of_weight)
        return whole

    def _rows(self, name: str, tp: int) -> list[slice]:
        """Which rows of what a TP rank holds: all, or those of its head where each holds the weight whole."""
        if name.endswith("wq") or self.config.num_kv_heads % tp == 0:
            return [slice(None)] * tp
        size = self.config.head_dim
        heads = [first_key_head(self.config, tp=tp, rank=t) for t in range(tp)]
        return [slice(head * size, (head + 1) * size) for head in heads]

    def _feed_forward(self, x: Parts, path: str) -> tuple[Parts, Callable[[Parts], Parts]]:
        stage, prefix = self._stage, f"{path}.feed_forward"
        gate, up, product, down = (f"{prefix}.{name}" for name in ("w1", "w3", "swiglu", "w2"))
        normed, norm_back = self._norm(x, f"{path}.ffn_norm")
        (a, b), project_back = project(normed, [self._weight(gate), self._weight(up)])
        made, swiglu_back = swiglu(a, b)
        combined, combine_back = combine(made, self._weight(down))
        for name, parts in ((gate, a), (up, b), (product, made), (down, combined)):
            self.see(Kind.OUTPUT, name, stage, parts)

        def backward(grad: Parts) -> Parts:
            self.see(Kind.ARRIVING, down, stage, grad)
            grad, of_down = combine_back(grad)
            self._keep(down, stage, of_down)
            self.see(Kind.ARRIVING, product, stage, grad)
            of_a, of_b = swiglu_back(grad)
            self.see(Kind.ARRIVING, gate, stage, of_a)
            self.see(Kind.ARRIVING, up, stage, of_b)
            grad, (of_gate, of_up) = project_back([of_a, of_b])
            self._keep(gate, stage, of_gate)
            self._keep(up, stage, of_up)
            return norm_back(grad)

        return combined, backward

    def _norm(self, x: Parts, name: str) -> tuple[Parts, Callable[[Parts], Parts]]:
        stage = self._stage
        normed, back = norm(x, self._weight(name), self.config.norm_eps)
        self.see(Kind.OUTPUT, name, stage, normed)

        def backward(grad: Parts) -> Parts:
            self.see(Kind.ARRIVING, name, stage, grad)
            grad, of_weight = back(grad)
            self._keep(name, stage, of_weight)
            return grad

        return normed, backward

    def _head(self, x: Parts, *, z_loss: float) -> list[Tensor]:
        stage = self._stage
        normed, norm_back = self._norm(x, "norm")
        (logits,), project_back = project(normed, [self._weight("output")])
        self.see(Kind.OUTPUT, "output", stage, logits)
        losses, loss_back = self.block.cross_entropy(logits, vocab_size=self.config.vocab_size, z_loss=z_loss)
        tp = self.block.tp
        self.see(Kind.OUTPUT, "cross_entropy", stage, [[loss.reshape(1)] * tp for loss in losses])

        def backward(grad_loss: Parts) -> Parts:
            of_logits = loss_back(grad_loss[0][0])
            self.see(Kind.ARRIVING, "output", stage, of_logits)
            grad, (of_output,) = project_back([of_logits])
            self._keep("output", stage, of_output)
            return norm_back(grad)

        self._backs.append(backward)
        return losses
