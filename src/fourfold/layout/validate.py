"""Proof that a schedule is complete and free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict

from fourfold.layout.actions import COMPUTE, MESSAGES, RECEIVES, SENDS, Action, Kind
from fourfold.layout.schedule import Schedule


def validate(schedule: Schedule) -> None:
    """Raises ValueError with the first fault found, and returns nothing otherwise.

    What is proven: every (stage, micro-batch) runs forward once and, if trained, backward once, on the rank that holds
    the stage; weights are gathered whenever they are used, every gradient is reduced, nothing stays gathered; and the
    step ends, under the weakest messages any back end offers: operations on one channel (ordered pair of ranks) run in
    posted order, and a send completes only once its receive is posted.
    """
    _check_computations(schedule)
    for pp_rank in range(schedule.pp):
        _check_events(schedule, pp_rank)
    _check_channels(schedule)
    _check_progress(schedule)


def _check_computations(schedule: Schedule) -> None:
    found = Counter()
    for pp_rank, actions in enumerate(schedule.actions):
        forwarded = set()
        for action in actions:
            if schedule.rank_of(action.stage) != pp_rank:
                raise ValueError(f"pipeline rank {pp_rank} runs {action}, but stage {action.stage} is not its own")
            if action.kind in COMPUTE:
                found[action] += 1
            if action.kind is Kind.FORWARD:
                forwarded.add((action.stage, action.micro_batch))
            elif action.kind is Kind.BACKWARD and (action.stage, action.micro_batch) not in forwarded:
                raise ValueError(f"pipeline rank {pp_rank} runs {action} before its forward")
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            for kind, times in ((Kind.FORWARD, 1), (Kind.BACKWARD, int(stage >= schedule.num_frozen_stages))):
                count = found.pop(Action(kind, stage, micro_batch), 0)
                if count != times:
                    raise ValueError(f"{Action(kind, stage, micro_batch)} runs {count} times instead of {times}")
    if found:
        raise ValueError(f"actions of unknown stages or micro-batches: {', '.join(map(str, found))}")


def _check_events(schedule: Schedule, pp_rank: int) -> None:
    gathered: set[int] = set()
    unreduced: set[int] = set()
    for action in schedule.actions[pp_rank]:
        stage = action.stage
        if action.kind is Kind.GATHER:
            if stage in gathered:
                raise ValueError(f"pipeline rank {pp_rank}: {action} while its weights are gathered already")
            gathered.add(stage)
        elif action.kind not in MESSAGES and stage not in gathered:
            raise ValueError(f"pipeline rank {pp_rank}: {action} without gathered weights")
        if action.kind is Kind.BACKWARD:
            unreduced.add(stage)
        elif action.kind is Kind.REDUCE:
            if stage not in unreduced:
                raise ValueError(f"pipeline rank {pp_rank}: {action} without a gradient")
            unreduced.remove(stage)
        elif action.kind is Kind.FREE:
            gathered.remove(stage)
    if gathered or unreduced:
        raise ValueError(f"pipeline rank {pp_rank} ends with stages {gathered} gathered and {unreduced} not reduced")


def _peer(schedule: Schedule, action: Action) -> int:
    """The pipeline rank at the other end of a send or a receive."""
    towards_next = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
    return schedule.rank_of(action.stage + (1 if towards_next else -1))


def _check_channels(schedule: Schedule) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for pp_rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent[pp_rank, _peer(schedule, action)].append(action.message)
            elif action.kind in RECEIVES:
                received[_peer(schedule, action), pp_rank].append(action.message)
    for channel in sent.keys() | received.keys():
        if sent[channel] != received[channel]:
            raise ValueError(
                f"channel {channel[0]} -> {channel[1]}: messages are received in another order than they are sent"
            )


def _check_progress(schedule: Schedule) -> None:
    """Runs all ranks as far as they get, until all are done or none can move."""
    sent: set[tuple[str, int, int]] = set()
    posted: set[tuple[str, int, int]] = set()
    done: set[Action] = set()
    positions = [0] * schedule.pp

    def missing(action: Action) -> tuple[str, int, int] | None:
        """The message that a computation waits for, or None if it can run."""
        message = needed_message(schedule, action)
        if message is None:
            return None
        producer = Action(Kind(message[0]), message[1], message[2])
        local = schedule.rank_of(message[1]) == schedule.rank_of(action.stage)
        arrived = producer in done if local else message in sent and message in posted
        return None if arrived else message

    moved = True
    while moved:
        moved = False
        for pp_rank, actions in enumerate(schedule.actions):
            position = positions[pp_rank]
            while position < len(actions):
                action = actions[position]
                if action.kind in COMPUTE:
                    if missing(action):
                        break
                    done.add(action)
                elif action.kind in SENDS:
                    sent.add(action.message)
                elif action.kind in RECEIVES:
                    posted.add(action.message)
                position += 1
            moved |= position > positions[pp_rank]
            positions[pp_rank] = position
    waiting = {r: schedule.actions[r][p] for r, p in enumerate(positions) if p < len(schedule.actions[r])}
    if waiting:
        lines = []
        for pp_rank, action in waiting.items():
            message = missing(action)
            assert message is not None
            lines.append(
                f"pipeline rank {pp_rank} waits in {action} for rank {schedule.rank_of(message[1])} to run "
                f"{Action(Kind(message[0]), message[1], message[2])}"
            )
        raise ValueError("deadlock: " + "; ".join(lines))


def needed_message(schedule: Schedule, action: Action) -> tuple[str, int, int] | None:
    """What a computation needs from a neighbouring stage, as (direction, producing stage, micro-batch)."""
    if action.kind is Kind.FORWARD:
        return ("F", action.stage - 1, action.micro_batch) if action.stage > 0 else None
    return ("B", action.stage + 1, action.micro_batch) if action.stage < schedule.num_stages - 1 else None
