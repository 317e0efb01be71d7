"""The chain of waiting in words: who waits for whom in a step, down to the rank that is late by its own doing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fourfold.debugger.reading.trace import MESSAGES, Call
from fourfold.debugger.slow.chain import BRIEF, COMPUTING, MOVING, UNSEEN, Chains, Wait, Way
from fourfold.layout import Grid
from fourfold.report import drawing
from fourfold.report.text import percent
from fourfold.simulator.causes import duration

_SHOWN = 12  # ranks in the table of chains
_ENDS = 6  # in the table of what waiting ends in
_LITTLE = 0.01  # of the longest wait of all ranks: who waits for less, is not shown

_DIMENSIONS = {
    "tp": "TP's ",
    "cp": "CP's ",
    "pp": "pipeline ",
    "dp": "DP's ",
    "fsdp": "FSDP's ",
    "world": "all ranks' ",
    "other": "a group's ",
}
_CALLS = {
    Call.ALL_REDUCE: "all-reduce",
    Call.ALL_GATHER: "all-gather",
    Call.REDUCE_SCATTER: "reduce-scatter",
    Call.ALL_TO_ALL: "all-to-all",
    Call.BROADCAST: "broadcast",
    Call.BARRIER: "barrier",
    Call.OTHER: "collective",
}
_WHY = {
    COMPUTING: "computes longer",
    MOVING: "is held up by its transfers",
    UNSEEN: "has no trace",
    BRIEF: "is late for short whiles",
    "garbage": "collects garbage",
    "loader": "is at its data loader",
    "optimizer": "is kept by its host around the optimizer",
    "launch": "launches late",
}
_ON_CPU = {
    COMPUTING: "takes longer",  # a trace does not show when others have the processor
    "launch": "neither computes nor waits: it is stopped, or others have its processor",
}


def rank_words(rank: int) -> str:
    """A rank that is awaited."""
    return f"rank {rank}" if rank >= 0 else "a rank without a trace"


def call_words(dimension: str, kinds: Sequence[Call]) -> str:
    """In what a rank waits: messages; TP's all-gather and reduce-scatter."""
    if kinds and kinds[0] in MESSAGES:
        return "messages"
    names = list(dict.fromkeys(_CALLS.get(kind, "collective") for kind in kinds[:2])) or ["collective"]
    return _DIMENSIONS[dimension] + " and ".join(names)


def why_words(doing: str, device: str) -> str:
    """Why a rank is late by its own doing. `device`: what computes, "gpu" or "cpu"."""
    return (_WHY | _ON_CPU if device == "cpu" else _WHY)[doing]


def way_sentence(way: Way, kind: Call, device: str) -> str:
    """A single wait: Waits for a message from rank 4; that waited for rank 5 (tp); rank 5 computes longer."""
    first, *rest = way.hops
    if kind in MESSAGES:
        parts = [f"Waits for a message from {rank_words(first.awaited)}"]
    else:
        parts = [f"Waits in {call_words(first.dimension, (kind,))} for {rank_words(first.awaited)}"]
    parts += [f"that waited for {rank_words(hop.awaited)} ({hop.dimension})" for hop in rest]
    if way.hops[-1].awaited >= 0:
        parts.append(f"{rank_words(way.hops[-1].awaited)} {why_words(way.doing, device)}")
    return f"{'; '.join(parts)}."


def _for_whom(wait: Wait) -> str:
    what, whom = call_words(wait.hop.dimension, wait.kinds), rank_words(wait.hop.awaited)
    return f"for {what} from {whom}" if wait.kinds[0] in MESSAGES else f"in {what} for {whom}"


def path_sentence(path: Sequence[Wait], blamed: Collection[tuple[int, str]], device: str) -> str:
    """A way with its seconds: 12 ms for messages from rank 4; 9 ms of it because rank 4 waited in ... for rank 5."""
    first, *rest = path
    text = f"{duration(first.seconds)} {_for_whom(first)}"
    for wait in rest:
        text += f"; {duration(wait.seconds)} of it because rank {wait.hop.waiting} waited {_for_whom(wait)}"
    last = path[-1]
    ending = [doing for doing in last.doing if (last.hop.awaited, doing) in blamed] or list(last.doing)
    # Of whom nothing is known, it has been said.
    return f"{text}, which {why_words(ending[0], device)}" if ending and last.hop.awaited >= 0 else text


class Waiting:
    """The waits of a step, and what of them is because of the culprits."""

    def __init__(
        self, chains: Chains, step: int, device: str, culprits: Sequence[int], blamed: Collection[tuple[int, str]]
    ) -> None:
        self.step, self.device, self.culprits, self._blamed = step, device, tuple(culprits), blamed
        self.waits = {rank: chains.of_rank(rank) for rank in chains.ranks}
        self.seconds = {rank: sum(wait.seconds for wait in waits) for rank, waits in self.waits.items()}
        self.whole = sum(self.seconds.values())
        self.ends: dict[tuple[int, str], float] = {}
        for waits in self.waits.values():
            for end, seconds in (item for wait in waits for item in wait.ends().items()):
                self.ends[end] = self.ends.get(end, 0.0) + seconds

    def because(self, rank: int) -> float:
        """Seconds that a rank waits because of culprits; in all if there are none."""
        if not self.culprits:
            return self.seconds[rank]
        return sum(wait.because_of(self._blamed) for wait in self.waits[rank])

    def path(self, rank: int) -> tuple[Wait, ...]:
        """The way that most of that goes."""
        most = max(self.waits[rank], key=lambda wait: (wait.because_of(self._blamed), wait.seconds))
        return most.path(self._blamed)

    def sentence(self, rank: int) -> str:
        """The same in words."""
        return path_sentence(self.path(rank), self._blamed, self.device)

    def ranked(self) -> list[int]:
        """Ranks that wait, those first that wait most because of the culprits."""
        least = _LITTLE * max(self.seconds.values(), default=0.0)
        ranks = [rank for rank in self.waits if self.waits[rank] and self.because(rank) > least]
        return sorted(ranks, key=lambda rank: (-self.because(rank), rank))


def whole_sentence(waiting: Waiting) -> str:
    """How much is waited in all, and for whom in the end; empty if nobody waits."""
    if not waiting.whole > 0:
        return ""
    by_rank: dict[int, float] = {}
    for (rank, _), seconds in waiting.ends.items():
        by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    named = sorted(by_rank.items(), key=lambda item: -item[1])[:2]
    parts = [
        f"{percent(seconds / waiting.whole)} of it is, in the end, for {rank_words(rank)}"
        for rank, seconds in named[:1]
    ]
    parts += [f"the next is {rank_words(rank)} with {percent(seconds / waiting.whole)}" for rank, seconds in named[1:]]
    return f"In step {waiting.step} all ranks together wait {duration(waiting.whole)}; {', '.join(parts)}."


def chain_sentence(waiting: Waiting) -> str:
    """The longest chain among the ranks that wait most because of the culprits; empty if none waits for another."""
    ranked = [rank for rank in waiting.ranked() if rank not in waiting.culprits]
    if not ranked:
        return ""
    most = waiting.because(ranked[0])
    much = [rank for rank in ranked if waiting.because(rank) > most / 2]
    # Short chains say little, and of what is far away little is left.
    rank = max(much, key=lambda one: len(waiting.path(one)) * waiting.path(one)[-1].seconds)
    return f"The chain from rank {rank}: it waits {waiting.sentence(rank)}."


def chain_table(waiting: Waiting, grid: Grid) -> drawing.Table:
    """Who waits for whom, in one step."""
    ranked = waiting.ranked()
    head = "because of " + " and ".join(f"rank {rank}" for rank in waiting.culprits[:2])
    head += f" and {len(waiting.culprits) - 2} more" if len(waiting.culprits) > 2 else ""
    shown = ranked[:_SHOWN] + [rank for rank in waiting.culprits if rank in ranked[_SHOWN:]]
    rows = []
    for rank in shown:
        because = (duration(waiting.because(rank)),) if waiting.culprits else ()
        label = drawing.rank_label(grid, rank).replace(" ", "\N{NO-BREAK SPACE}")
        rows.append((label, duration(waiting.seconds[rank]), *because, waiting.sentence(rank)))
    more = f" {len(ranked) - len(shown)} more ranks wait." if len(ranked) > len(shown) else ""
    return drawing.Table(
        title=f"Who waits for whom in step {waiting.step}",
        columns=("rank", "waits in all", *((head,) if waiting.culprits else ()), "most of it"),
        rows=tuple(rows),
        note="A rank is late because it did more than the one that waits for it since the two last met, or because it "
        f"waited itself: that is followed to its end.{more}",
    )


def ends_table(waiting: Waiting, grid: Grid) -> drawing.Table:
    """What all waiting of a step ends in."""
    rows = tuple(
        (
            drawing.rank_label(grid, rank) if 0 <= rank < grid.size else rank_words(rank),
            why_words(doing, waiting.device),
            duration(seconds),
            percent(seconds / waiting.whole),
        )
        for (rank, doing), seconds in sorted(waiting.ends.items(), key=lambda item: -item[1])[:_ENDS]
        if seconds > 0
    )
    return drawing.Table(
        title=f"Whom all ranks wait for in the end, step {waiting.step}",
        columns=("rank", "it", "seconds of all ranks", "of all waiting"),
        rows=rows,
        note="Some of it is the pipeline's bubble: a stage has to wait for the one before it in a healthy step, too.",
    )
