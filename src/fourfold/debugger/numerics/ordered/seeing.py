"""Records of the ordered reference: of every rank of the layout what that rank would have seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.order import place_in_model
from fourfold.debugger.numerics.ordered.operations import Parts
from fourfold.debugger.numerics.ordered.weights import ShardedWeight, of_rank
from fourfold.debugger.numerics.records import PADDING, Kind, RankStep, token_numbers
from fourfold.layout import Shard
from fourfold.recipe import Phase, RunPlan, first_key_head, is_frozen, stage_shapes

OF_OWN_TOKENS = ("tok_embeddings", "attention_norm", "ffn_norm", "norm", "wo", "w2")
"""Operations whose result lies split over TP by tokens; last parts of names. So do the sums at the end of layers."""
OF_WHOLE_WIDTH = (*OF_OWN_TOKENS, "cross_entropy")


class Seeing:
    """What is recorded of one step."""

    def __init__(self, plan: RunPlan, step: int, phase: Phase, maker: Fingerprinter, *, everything: bool) -> None:
        self.records = [RankStep(step, rank, plan.grid) for rank in range(plan.grid.size)]
        self._plan = plan
        self._phase = phase
        self._maker = maker
        self._everything = everything
        self._reached = _reached(plan, phase.schedule.num_frozen_stages)

    def micro_batch(
        self, group: int, number: int, rows: Sequence[Sequence[int]], cut: Sequence[Shard]
    ) -> Callable[[Kind, str, int, Parts], None]:
        """To be told of the operations of one micro-batch of a data-parallel group."""
        grid, per_group = self._plan.grid, self._phase.sequences_per_dp_group
        first = group * per_group + number * self._plan.recipe.pipeline.micro_batch
        numbers = token_numbers(rows, first_sequence=first)
        held = [torch.from_numpy(np.where(s.index >= 0, s.index, 0)) for s in cut]
        tokens = [
            numbers[index].where(torch.from_numpy(shard.index) >= 0, PADDING)
            for index, shard in zip(held, cut, strict=True)
        ]
        own = [[share.clone() for share in part.chunk(grid.tp)] for part in tokens]
        first_token = numbers[:1].clone()

        def see(kind: Kind, name: str, stage: int, parts: Parts) -> None:
            if not self._everything or (kind is Kind.ARRIVING and (stage, _place(name)) < self._reached):
                return
            pp = stage % grid.pp
            for c, row in enumerate(parts):
                for t, part in enumerate(row):
                    rank = grid.rank(tp=t, cp=c, pp=pp, dp=group)
                    rows_of_part = self._rows(name, first_token, tokens[c], own[c][t])
                    firsts, width = self._columns(name, part, t)
                    self.records[rank].see(
                        self._maker, kind, name, part, rows=rows_of_part, first=firsts, width=width, micro_batch=number
                    )

        return see

    def _rows(self, name: str, first_token: Tensor, tokens: Tensor, own: Tensor) -> Tensor:
        last = name.rpartition(".")[2]
        if last == "cross_entropy":
            return first_token
        return own if last in OF_OWN_TOKENS or last.isdecimal() else tokens

    def _columns(self, name: str, part: Tensor, t: int) -> tuple[int, int]:
        """(first, width) of what TP rank t has."""
        config, tp, last = self._plan.config, self._plan.grid.tp, name.rpartition(".")[2]
        features = part[0].numel()
        if last in OF_WHOLE_WIDTH or last.isdecimal():
            return 0, features
        if last in ("wk", "wv"):
            head = first_key_head(config, tp=tp, rank=t)
            return head * config.head_dim, config.num_kv_heads * config.head_dim
        return t * features, tp * features

    def gradients(self, weights: list[list[ShardedWeight]]) -> None:
        """The finished ones."""
        self._weights(Kind.GRADIENT, weights)

    def weights(self, weights: list[list[ShardedWeight]]) -> None:
        """As they are after the step."""
        self._weights(Kind.WEIGHT, weights)

    def _weights(self, kind: Kind, weights: list[list[ShardedWeight]]) -> None:
        plan = self._plan
        for rank, record in enumerate(self.records):
            place = plan.grid.coordinates(rank)
            for weight, f in of_rank(weights, place, plan):
                if kind is Kind.GRADIENT and not weight.trained:
                    continue
                tensor = weight.pieces(place.tp)[f] if kind is Kind.GRADIENT else weight.shards[place.tp][f]
                if not len(tensor):
                    continue
                first = weight.first_row(place.tp, f)
                record.see(
                    self._maker,
                    kind,
                    weight.name,
                    tensor,
                    rows=torch.arange(first, first + len(tensor)),
                    first=weight.first_column(place.tp),
                    width=weight.shape[1] if len(weight.shape) > 1 else 1,
                )


def _reached(plan: RunPlan, num_frozen_stages: int) -> tuple[int, tuple[int, int]]:
    """The first operation that a gradient reaches, by stage and place: that of the first weight that is trained."""
    names, freeze = stage_shapes(plan.config, plan.stages)[num_frozen_stages], plan.recipe.train.freeze
    trained = [name for name in names if not is_frozen(name, freeze, tied=plan.config.tied)]
    return num_frozen_stages, min(map(_place, trained))


def _place(name: str) -> tuple[int, int]:
    """In the model, of an operation or a weight. A gradient that reaches one result of a product reaches them all."""
    layer, operation, _ = place_in_model(name)
    return layer, operation
