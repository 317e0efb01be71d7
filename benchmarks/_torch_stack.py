"""The same Llama, parallelised with PyTorch's own parts only, as its documentation and TorchTitan recommend.

Pipeline: ``ScheduleInterleaved1F1B``. Tensor and sequence parallelism: ``parallelize_module`` with a
vocabulary-parallel embedding and ``loss_parallel``. Data parallelism: ``fully_shard``. Nothing here is Fourfold's but
the configuration and the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fourfold.recipe import ModelConfig


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class StageModule(nn.Module):
    """Some layers of the model, with the embedding in the first stage and the head in the last."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, layers: range, *, embedding: bool, head: bool, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.padded_vocab, config.dim) if embedding else None
        self.layers = nn.ModuleDict({str(layer): Layer(config) for layer in layers})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if head else None
        self.output = nn.Linear(config.dim, config.padded_vocab, bias=False) if head else None
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


LAYER_PLAN: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": ColwiseParallel(),
}


def parallelise(stage: StageModule, tp_mesh: DeviceMesh, dp_mesh: DeviceMesh, *, per_layer: bool) -> None:
    """Tensor and sequence parallelism, then sharding over the data-parallel group, weights kept whole in a step."""
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    }
    plan |= {
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(stage, tp_mesh, {name: how for name, how in plan.items() if getattr(stage, name) is not None})
    for layer in stage.layers.values():
        parallelize_module(layer, tp_mesh, LAYER_PLAN)
        if per_layer:
            fully_shard(layer, mesh=dp_mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=dp_mesh, reshard_after_forward=False)
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            # A sum, because the loss is divided by the global token count. On gloo it takes both calls.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


class TorchStack:
    """One rank of PyTorch's pipeline of ``tp`` x ``pp`` x ``dp`` ranks, two stages per pipeline rank.

    Args:
        initial: whole initial values of a parameter, from its name and shape.
        num_tokens: labels in the global batch, by which the loss is divided.
        per_layer: an FSDP group per layer, as TorchTitan does it, or one per stage.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: int,
        pp: int,
        dp: int,
        num_micro_batches: int,
        seq_len: int,
        num_tokens: int,
        per_layer: bool,
        initial: Callable[[str, tuple[int, ...]], Tensor],
    ) -> None:
        self._tp = tp
        mesh = init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
        self.pp_group = mesh["pp"].get_group()
        self.pp_rank, num_stages = dist.get_rank(self.pp_group), 2 * pp
        per_stage = config.num_layers // num_stages
        stages = []
        for index in (self.pp_rank, self.pp_rank + pp):
            layers = range(index * per_stage, (index + 1) * per_stage)
            module = StageModule(config, layers, embedding=index == 0, head=index == num_stages - 1, seq_len=seq_len)
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(initial(name, tuple(parameter.shape)))
            parallelise(module, mesh["tp"], mesh["dp"], per_layer=per_layer)
            stages.append(PipelineStage(module, index, num_stages, torch.device("cpu"), group=self.pp_group))
        self.parameters = {name: parameter for stage in stages for name, parameter in stage.submod.named_parameters()}
        self._is_first, self._is_last = self.pp_rank == 0, self.pp_rank == pp - 1

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens

        # scale_grads would divide the gradients by the number of micro-batches in a pass of its own.
        self._schedule = ScheduleInterleaved1F1B([*stages], num_micro_batches, loss_fn=loss, scale_grads=False)

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """tokens, labels: int64 [micro-batches, seq_len]. Returns the losses by micro-batch, on the last rank only."""
        losses: list[Tensor] = []
        inputs = (tokens,) if self._is_first else ()
        with loss_parallel():
            if self._is_last:
                self._schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
            else:
                self._schedule.step(*inputs, return_outputs=False)
        return losses

    def global_loss(self, losses: list[Tensor]) -> float:
        """The loss of the global batch, from what each rank's ``forward_backward`` returned."""
        total = sum((whole(loss) for loss in losses), torch.zeros(()))
        dist.all_reduce(total)
        return total.item() / self._tp  # every TP rank has the same

    def gradient_norm(self) -> float:
        """The global norm, as TorchTitan makes it: over the pipeline rank's DTensors, then over the pipeline."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        square = whole(norm).square()
        dist.all_reduce(square, group=self.pp_group)
        return square.sqrt().item()


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from its shards: a collective, if it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
