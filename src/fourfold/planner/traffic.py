"""What a rank of a run sends in one step: how many collectives and messages of which size, in closed form.

The time model charges the same collectives layer by layer (:mod:`fourfold.planner.timing.exposure`). Here they are
counted as the trainer runs them, its padding and its small sums with them, so that a dry run can be held against it.

n tokens of a micro-batch lie on a context-parallel rank. Bytes are those of the whole tensor: of an all-gather the
gathered one, of a reduce-scatter the one that is scattered. A group of one rank moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fourfold.layout import Action, Doing, Kind, Stage, shards
from fourfold.layout.actions import RECEIVES, SENDS
from fourfold.planner.arithmetic import DTYPE_BYTES, FP32, on_tensor_rank
from fourfold.planner.timing.exposure import REGATHERS, TP_COLLECTIVES
from fourfold.recipe import RunPlan, split_dimension, stage_shapes

FP64 = 8
OF_TOKENS = 3  # numbers per token and TP rank that the loss gathers: maximum, mass, target


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one group, or messages, that are alike, in one step of one rank.

    Attributes:
        group: "tp", "cp", "dp", "fsdp" or "world"; "pp" for messages.
        kind: "all_gather", "reduce_scatter", "all_reduce"; "send" or "receive".
        dtype: of what travels.
        during: the kind of action, or what else the rank does: "F", "B", "GATHER", "SUM" ...
        count: per step.
        bytes: of all of them.
    """

    group: str
    kind: str
    dtype: str
    during: str
    count: int
    bytes: int

    @property
    def alike(self) -> tuple[str, str, str, str]:
        """What makes them so."""
        return self.group, self.kind, self.dtype, self.during


def traffic(plan: RunPlan, pp_rank: int) -> tuple[Traffic, ...]:
    """One step of a pipeline rank in the plan's first phase; its tp, cp and dp peers send as much.

    Raises:
        ValueError: parameters are frozen, so that some of it is not needed; nobody has counted that.
    """
    if plan.recipe.train.freeze:
        raise ValueError("what a run with frozen parameters sends is not known in closed form")
    total: dict[tuple[str, str, str, str], list[int]] = {}
    for group, kind, dtype, during, count, num_bytes in _Rank(plan, pp_rank).step():
        entry = total.setdefault((group, kind, dtype, during), [0, 0])
        entry[0] += count
        entry[1] += count * num_bytes
    return tuple(Traffic(*alike, *entry) for alike, entry in total.items() if entry[0])


Sent = tuple[str, str, str, str, int, int]
"""Group, kind, dtype, during, count, and bytes of each."""


class _Rank:
    """Sizes of one pipeline rank, and what each of its actions sends."""

    def __init__(self, plan: RunPlan, pp_rank: int) -> None:
        self.plan, self.pp_rank = plan, pp_rank
        self.tp, self.cp = plan.grid.tp, plan.grid.cp
        self.num_shards = plan.grid.dp * plan.grid.cp
        self.dtype = plan.recipe.train.dtype
        self.number = DTYPE_BYTES[self.dtype]
        self.shapes = stage_shapes(plan.config, plan.stages)
        rows = [(plan.phases[0].seq_len,)] * plan.recipe.pipeline.micro_batch
        cut = shards(rows, cp=self.cp, strategy=plan.recipe.layout.cp_split, multiple_of=self.tp)
        self.tokens = len(cut[0].index)  # n, with padding

    @cached_property
    def hidden(self) -> int:
        """Bytes of the hidden state of all n tokens."""
        return self.tokens * self.plan.config.dim * self.number

    def step(self) -> Iterator[Sent]:
        """All of it."""
        handlers = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.INPUT: self.of_input}
        handlers |= {Kind.WEIGHT: self.of_weights, Kind.GATHER: self.gather, Kind.REDUCE: self.reduce}
        for action in self.plan.schedule.actions[self.pp_rank]:
            if action.kind in handlers:
                yield from handlers[action.kind](self.plan.stages[action.stage])
            elif action.kind in SENDS | RECEIVES:
                yield self.message(action)
        yield from self.sums()

    def _tp(self, kind: str, during: Kind, count: int) -> Iterator[Sent]:
        if self.tp > 1:
            yield "tp", kind, self.dtype, during, count, self.hidden

    def _layers_forward(self, stage: Stage, during: Kind, *, again: bool = False) -> Iterator[Sent]:
        """Around attention and around the feed-forward network a gather and a scatter each; made again, a layer ends
        before its last product."""
        layers, half = len(stage.layers), TP_COLLECTIVES // 2
        yield from self._tp("all_gather", during, half * layers)
        yield from self._tp("reduce_scatter", during, (half - again) * layers)
        yield from self._keys_values("all_gather", during, layers)

    def _keys_values(self, kind: str, during: Kind, layers: int) -> Iterator[Sent]:
        config = self.plan.config
        if self.cp > 1:
            heads = max(config.num_kv_heads // self.tp, 1)
            yield (
                "cp",
                kind,
                self.dtype,
                during,
                layers,
                2 * self.cp * self.tokens * heads * config.head_dim * self.number,
            )

    def forward(self, stage: Stage) -> Iterator[Sent]:
        """F."""
        yield from self._layers_forward(stage, Kind.FORWARD)
        yield from self._tp("reduce_scatter", Kind.FORWARD, stage.embedding)
        yield from self._tp("all_gather", Kind.FORWARD, stage.head)
        if stage.head and self.tp > 1:
            yield "tp", "all_gather", "float32", Kind.FORWARD, 1, OF_TOKENS * self.tp * self.tokens * FP32
        yield from self._shards("all_gather", Kind.FORWARD, stage)

    def backward(self, stage: Stage) -> Iterator[Sent]:
        """B: inputs are gathered again for the gradients of weights."""
        yield from self._gradients_of_inputs(stage, Kind.BACKWARD)
        yield from self._tp("all_gather", Kind.BACKWARD, REGATHERS * len(stage.layers) + stage.head + stage.embedding)
        yield from self._shards("reduce_scatter", Kind.BACKWARD, stage)

    def of_input(self, stage: Stage) -> Iterator[Sent]:
        """I."""
        yield from self._gradients_of_inputs(stage, Kind.INPUT)

    def of_weights(self, stage: Stage) -> Iterator[Sent]:
        """W: inputs, and the gradients that I has not kept whole."""
        layers, half = len(stage.layers), TP_COLLECTIVES // 2
        yield from self._tp("all_gather", Kind.WEIGHT, (REGATHERS + half) * layers + stage.head + stage.embedding)
        yield from self._shards("reduce_scatter", Kind.WEIGHT, stage)

    def _gradients_of_inputs(self, stage: Stage, during: Kind) -> Iterator[Sent]:
        if self.plan.recompute[stage.index] == "full":
            yield from self._layers_forward(stage, during, again=True)
        layers, half = len(stage.layers), TP_COLLECTIVES // 2
        yield from self._tp("all_gather", during, half * layers)
        yield from self._tp("reduce_scatter", during, half * layers + stage.head)
        yield from self._keys_values("reduce_scatter", during, layers)
        yield from self._shards("all_gather", during, stage)

    def message(self, action: Action) -> Sent:
        """What goes to or comes from the next pipeline rank."""
        kind = "send" if action.kind in SENDS else "receive"
        return "pp", kind, self.dtype, action.kind, 1, self.hidden // self.tp

    # --- FSDP ---

    def _shard(self, names: Sequence[str], stage: Stage) -> int:
        """Elements of these parameters on the rank with most; FSDP pads all to that."""
        local = (
            on_tensor_rank(name, self.shapes[stage.index][name], config=self.plan.config, tp=self.tp) for name in names
        )
        return sum(-(-rows // self.num_shards) * (columns[0] if columns else 1) for rows, *columns in local)

    def _fsdp(self, kind: str, during: Kind, names: Sequence[str], stage: Stage) -> Iterator[Sent]:
        if names and self.num_shards > 1:
            dtype = self.dtype if kind == "all_gather" else "float32"
            yield "fsdp", kind, dtype, during, 1, DTYPE_BYTES[dtype] * self.num_shards * self._shard(names, stage)

    def gather(self, stage: Stage) -> Iterator[Sent]:
        """GATHER: one for the stage."""
        if self.plan.zero < 3:
            yield from self._fsdp("all_gather", Kind.GATHER, [*self.shapes[stage.index]], stage)

    def reduce(self, stage: Stage) -> Iterator[Sent]:
        """REDUCE."""
        if self.plan.zero < 3:
            yield from self._fsdp("reduce_scatter", Kind.REDUCE, [*self.shapes[stage.index]], stage)

    def _shards(self, kind: str, during: Kind, stage: Stage) -> Iterator[Sent]:
        """ZeRO-3 within a computation: one for each layer, and one for what else the stage has."""
        if self.plan.zero < 3:
            return
        names = [*self.shapes[stage.index]]
        for layer in stage.layers:
            yield from self._fsdp(kind, during, [n for n in names if n.startswith(f"layers.{layer}.")], stage)
        yield from self._fsdp(kind, during, [n for n in names if not n.startswith("layers.")], stage)

    # --- Beside the schedule ---

    def sums(self) -> Iterator[Sent]:
        """Counts of labels, gradients that FSDP does not sum, the loss and the norm."""
        plan, mine = self.plan, range(self.pp_rank, len(self.plan.stages), self.plan.grid.pp)
        yield self._total("dp", plan.grid.dp, Doing.COUNT, 1)
        if self.tp > 1:
            whole = (
                self._shard(
                    [n for n in self.shapes[s] if split_dimension(n, plan.config, self.tp) is None], plan.stages[s]
                )
                for s in mine
            )
            yield "tp", "all_gather", "float32", Doing.SUM, 1, self.tp * FP32 * sum(whole)
        first, last = 0 in mine, len(plan.stages) - 1 in mine
        if plan.config.tied and first != last:
            end = plan.stages[mine[0]] if first else plan.stages[mine[-1]]
            name = "tok_embeddings.weight" if first else "output.weight"
            for kind in ("send", "receive"):
                yield "pp", kind, "float32", Doing.SUM, 1, FP32 * self._shard([name], end)
        yield self._total("world", plan.grid.size, Doing.SUM, 1)
        infinite = plan.recipe.optimizer.clip_norm_type == float("inf")
        yield self._total("world", plan.grid.size, Doing.NORM, 1 + infinite, sums=not infinite)

    def _total(self, group: str, size: int, during: Doing, numbers: int, *, sums: bool = True) -> Sent:
        """A few numbers of all ranks; in a stated order they are gathered, and added by each rank."""
        if self.plan.recipe.train.ordered and sums:
            return group, "all_gather", "float64", during, int(size > 1), size * numbers * FP64
        return group, "all_reduce", "float64", during, 1, numbers * FP64
