"""Proof that a schedule is complete and free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from fourfold.layout.actions import BACKS, COMPUTE, ENDS, RECEIVES, SENDS, Action, Kind
from fourfold.layout.schedule import Schedule

_EVENTS = frozenset({Kind.GATHER, Kind.REDUCE, Kind.FREE})
_NEED_WEIGHTS = frozenset({Kind.FORWARD, *BACKS, Kind.REDUCE, Kind.FREE})  # gathered; W has no use for them


def validate(schedule: Schedule) -> None:
    """Raises ValueError with the first fault found, and returns nothing otherwise.

    What is proven: every (stage, micro-batch) runs forward once and, if trained, backward once (or the two halves of
    one, in order), on the rank that holds the stage, and what it makes is sent and received once where a neighbour
    needs it; weights are gathered whenever they are used, every gradient is reduced, nothing stays gathered; and the
    step ends, under the weakest messages any back end offers: operations on one channel (ordered pair of ranks) run in
    posted order, and a send completes only once its receive is posted.
    """
    _check_complete(schedule)
    for pp_rank in range(schedule.pp):
        _check_events(schedule, pp_rank)
        _check_postings(schedule, pp_rank)
    _check_channels(schedule)
    _check_progress(schedule)


def producer_of(schedule: Schedule, computation: Action) -> Action | None:
    """The computation on a neighbouring stage whose result this one needs, None if it needs none."""
    kind, stage, micro_batch = computation
    if kind is Kind.FORWARD:
        return Action(kind, stage - 1, micro_batch) if stage > 0 else None
    return Action(kind, stage + 1, micro_batch) if kind in BACKS and stage < schedule.num_stages - 1 else None


def _expected(schedule: Schedule, stage: int) -> Iterator[Kind]:
    """The actions that a stage has of every micro-batch."""
    first, last, frozen = 0, schedule.num_stages - 1, schedule.num_frozen_stages
    across = schedule.pp > 1  # the stages of a single rank exchange no messages
    yield Kind.FORWARD
    if across and stage > first:
        yield Kind.RECV_FORWARD
    if across and stage < last:
        yield Kind.SEND_FORWARD
    if stage >= frozen:
        yield from (Kind.INPUT, Kind.WEIGHT) if schedule.splits_backward else (Kind.BACKWARD,)
        if across and stage > frozen:
            yield Kind.SEND_BACKWARD
        if across and stage < last:
            yield Kind.RECV_BACKWARD


def _check_complete(schedule: Schedule) -> None:
    found: Counter[tuple[Kind, int, int]] = Counter()  # plain tuples, equal to actions, are made much faster
    for pp_rank, actions in enumerate(schedule.actions):
        for action in actions:
            if schedule.rank_of(action.stage) != pp_rank:
                raise ValueError(f"pipeline rank {pp_rank} runs {action}, but stage {action.stage} is not its own")
        found.update(action for action in actions if action.kind not in _EVENTS)
    for stage in range(schedule.num_stages):
        for kind in _expected(schedule, stage):
            for micro_batch in range(schedule.num_micro_batches):
                count = found.pop((kind, stage, micro_batch), 0)
                if count != 1:
                    raise ValueError(f"{Action(kind, stage, micro_batch)} runs {count} times instead of once")
    if found:
        raise ValueError(f"actions without a place in this schedule: {', '.join(str(Action(*key)) for key in found)}")


def _check_events(schedule: Schedule, pp_rank: int) -> None:
    needy = _NEED_WEIGHTS - {Kind.REDUCE} if schedule.splits_backward else _NEED_WEIGHTS
    gathered: set[int] = set()
    unreduced: set[int] = set()
    reduces: Counter[int] = Counter()
    for action in schedule.actions[pp_rank]:
        kind, stage, _ = action
        if kind is Kind.GATHER:
            if stage in gathered:
                raise ValueError(f"pipeline rank {pp_rank}: {action} while its weights are gathered already")
            gathered.add(stage)
        elif kind in needy and stage not in gathered:
            raise ValueError(f"pipeline rank {pp_rank}: {action} without gathered weights")
        if kind in ENDS:
            unreduced.add(stage)
        elif kind is Kind.REDUCE:
            if stage not in unreduced:
                raise ValueError(f"pipeline rank {pp_rank}: {action} without a gradient")
            unreduced.remove(stage)
            reduces[stage] += 1
        elif kind is Kind.FREE:
            gathered.remove(stage)
    for stages, what in ((unreduced, "not REDUCEd"), (gathered, "not FREEd")):
        if stages:
            raise ValueError(f"pipeline rank {pp_rank} ends with stages {sorted(stages)} {what}")
    wanted = {1: 1, 2: len(schedule.rounds), 3: schedule.num_micro_batches}[schedule.zero]
    for stage in range(pp_rank, schedule.num_stages, schedule.pp):
        if stage >= schedule.num_frozen_stages and reduces[stage] != wanted:
            raise ValueError(
                f"stage {stage} has {reduces[stage]} REDUCEs; ZeRO-{schedule.zero} reduces it {wanted} times a step"
            )


def _check_postings(schedule: Schedule, pp_rank: int) -> None:
    """Nothing is sent before it is made, and every receive is posted before the computation that needs it."""
    done: set[tuple[str, int, int]] = set()
    for action in schedule.actions[pp_rank]:
        kind, stage, micro_batch = action
        if kind is Kind.FORWARD or kind in BACKS:
            done.add(action.result)
        elif kind in SENDS and action.message not in done:
            raise ValueError(f"pipeline rank {pp_rank} posts {action} before the computation that makes its data")
        elif kind in RECEIVES:
            back = Kind.INPUT if schedule.splits_backward else Kind.BACKWARD
            consumer = Action(Kind.FORWARD if kind is Kind.RECV_FORWARD else back, stage, micro_batch)
            if consumer.result in done:
                raise ValueError(f"pipeline rank {pp_rank} posts {action} after {consumer}, which needs it")


def _check_channels(schedule: Schedule) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for pp_rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                peer = action.stage + (1 if action.kind is Kind.SEND_FORWARD else -1)
                sent[pp_rank, schedule.rank_of(peer)].append(action.message)
            elif action.kind in RECEIVES:
                received[schedule.rank_of(action.message[1]), pp_rank].append(action.message)
    for channel, messages in sent.items():
        for ours, theirs in zip(messages, received[channel], strict=True):
            if ours != theirs:
                raise ValueError(
                    f"channel of pipeline ranks {channel[0]} -> {channel[1]}: sends the result of {_name(ours)} where "
                    f"that of {_name(theirs)} is received; both ends must post in one order"
                )


def _name(message: tuple[str, int, int]) -> str:
    return str(Action(Kind(message[0]), *message[1:]))


def _check_progress(schedule: Schedule) -> None:
    """Runs all ranks as far as they get, until all are done or none can move.

    A message has arrived once it is sent: receives are posted ahead of their computations, and channels are in order.
    """
    done: set[Action] = set()
    sent: set[tuple[str, int, int]] = set()
    positions = [0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for pp_rank, actions in enumerate(schedule.actions):
            position = positions[pp_rank]
            while position < len(actions):
                action = actions[position]
                if action.kind in COMPUTE:
                    if _awaited(schedule, action, done, sent):
                        break
                    done.add(action)
                elif action.kind in SENDS:
                    sent.add(action.message)
                position += 1
            moved |= position > positions[pp_rank]
            positions[pp_rank] = position
    waits = []
    for pp_rank, position in enumerate(positions):
        if position < len(schedule.actions[pp_rank]):
            action = schedule.actions[pp_rank][position]
            awaited = _awaited(schedule, action, done, sent)
            assert awaited is not None
            waits.append(
                f"pipeline rank {pp_rank} waits in {action} for rank {schedule.rank_of(awaited.stage)} to run {awaited}"
            )
    if waits:
        raise ValueError("deadlock: " + "; ".join(waits))


def _awaited(
    schedule: Schedule, computation: Action, done: set[Action], sent: set[tuple[str, int, int]]
) -> Action | None:
    """The computation that must run, or have its result sent, before this one can; None if this one can run."""
    kind, stage, micro_batch = computation
    if kind is not Kind.FORWARD:
        before = Action(Kind.INPUT if kind is Kind.WEIGHT else Kind.FORWARD, stage, micro_batch)
        if before not in done:
            return before
    producer = producer_of(schedule, computation)
    if producer is None or (producer in done if schedule.pp == 1 else producer.result in sent):
        return None
    return producer
