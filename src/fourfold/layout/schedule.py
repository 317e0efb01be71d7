"""Pipeline schedules: for each pipeline rank the list of actions of one step.

A schedule is data. The validator, the player, the executor and the report all read the same object, so that what is
drawn is what is predicted is what runs.

Sources: the flexible schedule and its warm-up are section 3.1 of "Scaling Llama 3 Training with Efficient Parallelism
Strategies" (ISCA 2025), with the printed warm-up formula corrected: the term is ``2 (pp - pp_rank - 1)``, as the
paper's own Figure 2 draws it; the printed form deadlocks (a test shows it). Rounds for micro-batch counts that nc does
not divide are our own: see :func:`rounds_of`. ZB-H1 is the schedule of that name in "Zero Bubble Pipeline Parallelism"
(Qi et al. 2023).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fourfold.layout.actions import BACKS, COMPUTE, ENDS, SENDS, Action, Kind

KINDS = ("afab", "1f1b", "interleaved", "flexible", "zb-h1")

# By default a receive is posted this many computations before the one that needs it: early enough that the sender never
# waits for the posting, late enough that few buffers are held.
RECEIVE_LOOKAHEAD = 2


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline of ``pp`` ranks with ``v`` virtual stages each.

    ``kind`` and ``nc`` are what runs; where they differ from what was asked, ``fallback`` says why. ``rounds`` are the
    numbers of consecutive micro-batches per virtual stage, ``warmup`` the forwards of each pipeline rank before its
    first backward, ``actions`` its list. The first ``num_frozen_stages`` stages are not trained: they have no backward.
    """

    pp: int
    v: int
    num_micro_batches: int
    kind: str
    nc: int
    rounds: tuple[int, ...]
    warmup: tuple[int, ...]
    zero: int
    actions: tuple[tuple[Action, ...], ...]
    fallback: str | None = None
    num_frozen_stages: int = 0

    @property
    def num_stages(self) -> int:
        """Virtual stages over all ranks."""
        return self.pp * self.v

    @property
    def splits_backward(self) -> bool:
        """Whether a backward is two actions, I and W, instead of one."""
        return self.kind == "zb-h1"

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a virtual stage."""
        return stage % self.pp

    @cached_property
    def in_flight_peak(self) -> tuple[int, ...]:
        """Per pipeline rank, the most (micro-batch, chunk) pairs whose activations are held at once.

        Where backward is split, until W: of what a forward keeps, I frees about as much as the gradients are that it
        leaves for W.
        """
        return tuple(max(live, default=0) for live in map(self._live, range(self.pp)))

    @cached_property
    def reduce_scatters(self) -> tuple[int, ...]:
        """Per pipeline rank, the gradient reduce-scatters of one step, counted per virtual stage."""
        return tuple(sum(action.kind is Kind.REDUCE for action in actions) for actions in self.actions)

    def _live(self, pp_rank: int) -> list[int]:
        live, history = 0, []
        for kind, stage, _ in self.actions[pp_rank]:
            if stage >= self.num_frozen_stages and (kind is Kind.FORWARD or kind in ENDS):
                live += 1 if kind is Kind.FORWARD else -1
                history.append(live)
        return history


def generate(
    *,
    pp: int,
    v: int = 1,
    num_micro_batches: int,
    kind: str = "flexible",
    nc: int | None = None,
    zero: int = 1,
    num_frozen_stages: int = 0,
    messages: bool = True,
) -> Schedule:
    """Makes the schedule of one step, for any ``num_micro_batches >= 1``.

    Args:
        pp: pipeline ranks.
        v: virtual stages per pipeline rank.
        num_micro_batches: micro-batches per step and data-parallel group.
        kind: ``afab`` (all forwards, then all backwards), ``1f1b`` (v = 1), ``interleaved`` (v > 1, nc = pp),
            ``flexible`` (any v, any nc) or ``zb-h1`` (v = 1, backward in two halves).
        nc: consecutive micro-batches per virtual stage; default pp. A round smaller than the pipeline would deadlock,
            so nc < pp and num_micro_batches < pp run as afab (but zb-h1 as itself), and ``fallback`` says so.
        zero: ZeRO mode 1, 2 or 3; places the FSDP events.
        num_frozen_stages: leading stages without a trained weight, which need no backward. All of them: forwards only,
            as validation needs it.
        messages: with the sends and receives that an executor needs. To play a schedule it does without, and they are
            most of the work of making it.

    Raises:
        ValueError: an illegal combination; the message names the argument, its value, the rule and what is legal.
    """
    _check(pp, v, num_micro_batches, kind, nc, zero, num_frozen_stages)
    wanted_nc = nc if nc is not None else (num_micro_batches if kind == "afab" else pp)
    fallback = None
    if kind != "afab" and wanted_nc < pp:
        fallback = (
            f"nc = {wanted_nc} is smaller than pp = {pp}: such rounds would deadlock, so all forwards run first (afab)"
        )
    elif kind not in ("afab", "zb-h1") and num_micro_batches < pp:
        fallback = (
            f"{num_micro_batches} micro-batches are fewer than pp = {pp}: the pipeline never fills, "
            "so all forwards run first (afab)"
        )
    if kind == "afab" or fallback:
        kind, rounds = "afab", (num_micro_batches,)
        warmup = (num_micro_batches * v,) * pp
    else:
        rounds = rounds_of(num_micro_batches, nc=wanted_nc, pp=pp)
        warmup = tuple(warmup_of(r, pp=pp, v=v, nc=rounds[0], num_micro_batches=num_micro_batches) for r in range(pp))
    if kind == "zb-h1":
        orders = [order_of_zb_h1(r, pp=pp, num_micro_batches=num_micro_batches) for r in range(pp)]
    else:
        orders = [order_of(r, pp=pp, v=v, rounds=rounds, warmup=warmup[r]) for r in range(pp)]
    return Schedule(
        pp=pp,
        v=v,
        num_micro_batches=num_micro_batches,
        kind=kind,
        nc=rounds[0],
        rounds=rounds,
        warmup=warmup,
        zero=zero,
        actions=lower(
            orders,
            pp=pp,
            v=v,
            rounds=rounds,
            zero=zero,
            num_frozen_stages=num_frozen_stages,
            messages=messages,
        ),
        fallback=fallback,
        num_frozen_stages=num_frozen_stages,
    )


def _check(
    pp: int, v: int, num_micro_batches: int, kind: str, nc: int | None, zero: int, num_frozen_stages: int
) -> None:
    for name, value in (
        ("pp", pp),
        ("v", v),
        ("num_micro_batches", num_micro_batches),
        ("nc", 1 if nc is None else nc),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: must be one of {', '.join(KINDS)}")
    if zero not in (1, 2, 3):
        raise ValueError(f"zero = {zero}: must be 1, 2 or 3")
    if kind in ("1f1b", "zb-h1") and v != 1:
        raise ValueError(
            f"kind = {kind!r} with v = {v}: {kind} has one virtual stage per rank; "
            "legal: v = 1, or kind = 'interleaved'"
        )
    if kind == "interleaved" and v == 1:
        raise ValueError("kind = 'interleaved' with v = 1: interleaving needs v > 1; legal: v = 2, or kind = '1f1b'")
    fixed_nc = {"afab": num_micro_batches, "1f1b": pp, "interleaved": pp, "zb-h1": pp}.get(kind)
    if nc is not None and fixed_nc is not None and nc != fixed_nc:
        raise ValueError(
            f"nc = {nc} with kind = {kind!r}: {kind} fixes nc = {fixed_nc}; legal: leave nc out, or kind = 'flexible'"
        )
    if nc is not None and nc > num_micro_batches >= pp:
        raise ValueError(
            f"nc = {nc}: must be at most num_micro_batches = {num_micro_batches}; nearest legal: {num_micro_batches}"
        )
    if not 0 <= num_frozen_stages <= pp * v:
        raise ValueError(f"num_frozen_stages = {num_frozen_stages}: must be 0 to {pp * v}")


def rounds_of(num_micro_batches: int, *, nc: int, pp: int) -> tuple[int, ...]:
    """Splits the micro-batches into rounds of about ``nc``: near-equal, larger first, none smaller than the pipeline.

    A short last round would double the bubble, and one smaller than ``pp`` would deadlock. With this split the bubble
    is (pp - 1) / (num_micro_batches * v) for every count. Where no split into rounds of pp to nc micro-batches exists,
    the rounds are larger than nc.
    """
    num_rounds = -(-num_micro_batches // nc)
    while num_rounds > 1 and num_micro_batches // num_rounds < pp:
        num_rounds -= 1
    size, extra = divmod(num_micro_batches, num_rounds)
    return (size + 1,) * extra + (size,) * (num_rounds - extra)


def warmup_of(pp_rank: int, *, pp: int, v: int, nc: int, num_micro_batches: int) -> int:
    """Forwards before the first forward-backward pair: min((v-1) nc + 2 (pp - pp_rank - 1), num_micro_batches v).

    Without interleaving pp - pp_rank - 1 are enough (the classic 1F1B): more would only hold more activations.
    """
    if v == 1:
        return min(pp - pp_rank - 1, num_micro_batches)
    return min((v - 1) * nc + 2 * (pp - pp_rank - 1), num_micro_batches * v)


def order_of(pp_rank: int, *, pp: int, v: int, rounds: Sequence[int], warmup: int) -> list[Action]:
    """The computations of one pipeline rank: warm-up forwards, pairs of a forward and a backward, the rest.

    In a round every chunk takes all micro-batches of the round before the next chunk begins; backwards do the same with
    the chunks reversed.
    """
    forwards, backwards, first = [], [], 0
    for size in rounds:
        for micro_batches, chunks, kind, out in (
            (range(first, first + size), range(v), Kind.FORWARD, forwards),
            (range(first, first + size), reversed(range(v)), Kind.BACKWARD, backwards),
        ):
            out += [Action(kind, chunk * pp + pp_rank, m) for chunk in chunks for m in micro_batches]
        first += size
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def order_of_zb_h1(pp_rank: int, *, pp: int, num_micro_batches: int) -> list[Action]:
    """The computations of one pipeline rank in ZB-H1: 1F1B's, but that W comes ``pp_rank`` backwards late.

    So every rank holds up to min(pp, num_micro_batches) micro-batches, as many as the first does in 1F1B, and the later
    ranks, whose gradients the others wait for, put their Ws off to the end. With W <= F and W <= I the ranks idle for
    (pp - 1) (F + I - W) in every step of at least pp micro-batches, instead of (pp - 1) (F + I + W) in 1F1B; of fewer
    for (pp - 1) (F + I) - (num_micro_batches - 1) W. No order that holds as little idles less where F = W <= I. (If no
    rank may hold more than the same rank does in 1F1B, the last must run F, I, W in turn: (pp - 1) (F + I).)
    """
    warmup = warmup_of(pp_rank, pp=pp, v=1, nc=pp, num_micro_batches=num_micro_batches)
    out = [Action(Kind.FORWARD, pp_rank, m) for m in range(warmup)]
    for m in range(num_micro_batches + pp_rank):
        if warmup + m < num_micro_batches:
            out.append(Action(Kind.FORWARD, pp_rank, warmup + m))
        if m < num_micro_batches:
            out.append(Action(Kind.INPUT, pp_rank, m))
        if m >= pp_rank:
            out.append(Action(Kind.WEIGHT, pp_rank, m - pp_rank))
    return out


def lower(
    orders: Sequence[Sequence[Action]],
    *,
    pp: int,
    v: int,
    rounds: Sequence[int],
    zero: int,
    num_frozen_stages: int = 0,
    messages: bool = True,
) -> tuple[tuple[Action, ...], ...]:
    """Adds to the computations of each rank its sends and receives and the FSDP events of the ZeRO mode."""
    last = pp * v - 1
    sending = [_with_events(order, rounds, zero, num_frozen_stages) for order in orders]
    if not messages:
        return tuple(map(tuple, sending))
    if pp > 1:
        sending = [_with_sends(actions, last, num_frozen_stages) for actions in sending]
    channels: dict[tuple[int, int], list[Action]] = defaultdict(
        list
    )  # (source, destination) -> receives in sending order
    for source, actions in enumerate(sending):
        for action in actions:
            if action.kind in SENDS:
                receive = _receive_of(action)
                channels[source, receive.stage % pp].append(receive)
    out = []
    for pp_rank, actions in enumerate(sending):
        incoming = [channel for (_, destination), channel in channels.items() if destination == pp_rank]
        out.append(tuple(_with_receives(actions, incoming)))
    return tuple(out)


def _with_events(order: Sequence[Action], rounds: Sequence[int], zero: int, num_frozen_stages: int) -> list[Action]:
    """Drops the backwards of frozen stages and adds GATHER before, REDUCE and FREE after the computations.

    ZeRO-1 and 2 gather a stage's weights once per step. ZeRO-1 reduces after the stage's last backward, ZeRO-2 after
    its last of each round, ZeRO-3 after each, and ZeRO-3 holds weights only during a computation (ISCA'25 Figure 4).
    Of a split backward, the end is W; it does not read the weights, so ZeRO-3 gathers none for it.
    """
    if num_frozen_stages:
        order = [a for a in order if a.kind is Kind.FORWARD or a.stage >= num_frozen_stages]
    stages = [stage for _, stage, _ in order]
    last_use = {stage: position for position, stage in enumerate(stages)}
    first_use = {stages[position]: position for position in range(len(stages) - 1, -1, -1)}
    ends = {sum(rounds[: i + 1]) - 1 for i in range(len(rounds))}
    reduce_after = {1: {max(ends)}, 2: ends, 3: set(range(max(ends) + 1))}[zero]
    if zero == 3:
        before = after = [position for position, action in enumerate(order) if action.kind is not Kind.WEIGHT]
    else:
        before, after = first_use.values(), last_use.values()
    gathers, frees = set(before), set(after)
    reduces = {i for i, (kind, _, m) in enumerate(order) if m in reduce_after and kind in ENDS}
    out: list[Action] = []
    done = 0
    for position in sorted(gathers | frees | reduces):
        out += order[done:position]
        stage, done = stages[position], position + 1
        if position in gathers:
            out.append(Action(Kind.GATHER, stage))
        out.append(order[position])
        if position in reduces:
            out.append(Action(Kind.REDUCE, stage))
        if position in frees:
            out.append(Action(Kind.FREE, stage))
    return out + list(order[done:])


def _with_sends(actions: Sequence[Action], last: int, num_frozen_stages: int) -> list[Action]:
    """Posts each send right after the computation that made the data, before any FSDP event."""
    out: list[Action] = []
    for action in actions:
        out.append(action)
        kind, stage, micro_batch = action
        if kind is Kind.FORWARD and stage < last:
            out.append(Action(Kind.SEND_FORWARD, stage, micro_batch))
        elif kind in BACKS and stage > num_frozen_stages:
            out.append(Action(Kind.SEND_BACKWARD, stage, micro_batch))
    return out


def _receive_of(send: Action) -> Action:
    if send.kind is Kind.SEND_FORWARD:
        return Action(Kind.RECV_FORWARD, send.stage + 1, send.micro_batch)
    return Action(Kind.RECV_BACKWARD, send.stage - 1, send.micro_batch)


def _with_receives(actions: Sequence[Action], channels: Sequence[Sequence[Action]]) -> list[Action]:
    """Posts the receives of each channel in the order of its sends, each ahead of the computation that needs it.

    A channel delivers in posted order (NCCL matches messages by order alone), so a message that is needed late but was
    sent early is posted early too: posting times never decrease along a channel.
    """
    computations = [position for position, action in enumerate(actions) if action.kind in COMPUTE]
    needed_at = {
        actions[position].result: i
        for i, position in enumerate(computations)
        if actions[position].kind is not Kind.WEIGHT
    }
    post_before: dict[int, list[Action]] = defaultdict(list)
    for channel in channels:
        latest = len(computations)
        posts = []
        for receive in reversed(channel):
            kind = Kind.FORWARD if receive.kind is Kind.RECV_FORWARD else Kind.BACKWARD
            consumer = needed_at[kind, receive.stage, receive.micro_batch]
            latest = min(latest, max(0, consumer - RECEIVE_LOOKAHEAD))
            posts.append((latest, receive))
        for i, receive in reversed(posts):
            post_before[computations[i]].append(receive)
    out: list[Action] = []
    for position, action in enumerate(actions):
        out += post_before.get(position, ())
        out.append(action)
    return out
