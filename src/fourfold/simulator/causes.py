"""Why ranks wait: how long a rank did nothing before each computation, what it waited for, and what is behind that.

A rank waits for the result of a neighbour, which may itself have waited for another. So the cause is followed back from
computation to computation, until there is one whose rank was busy: that is where the time went.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fourfold.layout import Kind
from fourfold.layout.actions import COMPUTE, SENDS
from fourfold.simulator.costs import Modelled
from fourfold.simulator.critical import CriticalPath, Replica, critical_path, inside, value
from fourfold.simulator.graph import NONE, Graph, Node
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario

PHASES = ("warm-up", "steady state", "cool-down")
"""Of a pipeline rank: before its first backward, until its last forward, after both."""
_STEADY = PHASES.index("steady state")

_LONGER = 1.1  # times the usual: from here on it is said that something is slower than others
_MUCH = 0.3  # of a wait: in warm-up, in cool-down and at the end, what is slow is named if it makes up so much
_HOPS = 3  # from a late rank of a group to what it computed before
_NOTHING = 1e-9  # of the step: shorter waits are rounding


class Cause(NamedTuple):
    """A wait of one rank."""

    wait: float
    """Seconds."""
    sentence: str
    """What for, as in "waits for ..."; empty if it does not wait."""
    behind: str = ""
    """Who or what is slow, where the sentence says so."""


@dataclass(frozen=True)
class Causes:
    """Every wait of one replica of the pipeline."""

    replica: Replica
    """(dp, cp, tp) of what was simulated."""
    before: dict[int, Cause]
    """By the place of a computation in the graph: the wait before it."""
    at_end: tuple[Cause, ...]
    """Per pipeline rank: from its last computation to the optimizer's step."""


def causes(
    scenario: Scenario, played: Played, *, replica: Replica = (0, 0, 0), path: CriticalPath | None = None
) -> Causes:
    """The waits of one replica (dp, cp, tp) of what was simulated with `keep`. `path`: of the step, if it is known."""
    if not played.end:
        raise ValueError("causes need the start and end of every node; simulate with keep=True")
    return _Search(scenario, played, replica, path).run()


def idle_by_phase(played: Played, replica: Replica | None = None) -> np.ndarray:
    """float64 [phases, pp]: seconds for which each pipeline rank waits for others, by phase. They sum to `Played.idle`.

    `replica`: of which, as (dp, cp, tp) of what was simulated; default: the mean of all.
    """
    graph = played.graph
    out = np.zeros((len(PHASES), graph.schedule.pp))
    for pp_rank, own in enumerate(graph.on_rank):
        for waits, phase in zip(gaps(played, pp_rank), phases(graph, own), strict=True):
            out[phase, pp_rank] += float(waits.mean() if replica is None else waits[replica])
        ends = played.spent["end_wait"][:, pp_rank]
        out[-1, pp_rank] += float(ends.mean() if replica is None else ends[replica])
    return out


def gaps(played: Played, pp_rank: int) -> Iterator[np.ndarray]:
    """Before each computation of a pipeline rank: float64 [dp, cp, tp] seconds of waiting for another pipeline rank."""
    if not played.end:
        raise ValueError("phases need the start and end of every node; simulate with keep=True")
    nodes = played.graph.nodes
    for i in played.graph.on_rank[pp_rank]:
        needs, before = nodes[i].needs, nodes[i].before
        free = played.end[before] if before != NONE else np.zeros_like(played.end[i])
        yield np.maximum(played.end[needs] - free, 0.0) if needs != NONE else np.zeros_like(free)


def phases(graph: Graph, own: tuple[int, ...]) -> list[int]:
    """Of each computation of a rank: the index into `PHASES` of a wait before it."""
    forward = [graph.nodes[i].kind is Kind.FORWARD for i in own]
    first_backward = forward.index(False) if False in forward else 0
    last_forward = max((n for n, is_forward in enumerate(forward) if is_forward), default=-1)
    return [0 if n <= first_backward else 1 if n <= last_forward else 2 for n in range(len(own))]


def duration(seconds: float) -> str:
    """Three digits: 1,234 s, 1.23 s, 45.6 ms, 7.89 us."""
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _slow_rank(rank: int, factor: float) -> str:
    return f"rank {rank} computes {factor:g} times as long as normal"


class _Root(NamedTuple):
    """What is behind a wait."""

    busy: int  # the computation that was running; NONE if it is no computation
    sentence: str  # why that took long; empty if it took no longer than others


class _Search:
    """One pass over the graph: what a computation waited for comes before it."""

    def __init__(self, scenario: Scenario, played: Played, replica: Replica, path: CriticalPath | None) -> None:
        self.scenario, self.played, self.at, self.path = scenario, played, replica, path
        self.costs, self.nodes = Modelled(scenario), played.graph.nodes
        self.start = [float(lanes[replica]) for lanes in played.start]
        self.end = [float(lanes[replica]) for lanes in played.end]
        self.least = _NOTHING * played.step_seconds
        self.decimals = max(0, 4 - int(np.floor(np.log10(max(played.step_seconds, 1e-12)))))
        self.root: dict[int, _Root] = {}  # of computations that waited
        self.waits: dict[int, float] = {}
        self.known: dict[int, str] = {}  # why a computation takes long
        self.usual = self._usual()

    def run(self) -> Causes:
        phase = {
            i: number
            for own in self.played.graph.on_rank
            for i, number in zip(own, phases(self.played.graph, own), strict=True)
        }
        before = {i: self._before(i, node, phase[i]) for i, node in enumerate(self.nodes) if node.kind in COMPUTE}
        return Causes(self.at, before, tuple(self._at_end(pp_rank) for pp_rank in range(self.scenario.grid.pp)))

    def _usual(self) -> dict[Kind, float]:
        """Seconds of the median stage's computation of each kind, on this replica."""
        taken: dict[Kind, list[float]] = {}
        for i, node in enumerate(self.nodes):
            if node.kind in COMPUTE:
                taken.setdefault(node.kind, []).append(self.end[i] - self.start[i])
        return {kind: float(np.median(seconds)) for kind, seconds in taken.items()}

    def _time(self, seconds: float) -> str:
        return f"{seconds:.{self.decimals}f} s"

    def _rank(self, pp_rank: int, at: Replica) -> int:
        dp, cp, tp = at
        return self.scenario.grid.rank(dp=dp, pp=pp_rank, cp=cp, tp=tp)

    def _before(self, i: int, node: Node, phase: int) -> Cause:
        free = self.end[node.before] if node.before != NONE else 0.0
        self.waits[i] = wait = self.start[i] - free
        if wait <= self.least:
            return Cause(0.0, "")
        ready = max(free, self.end[node.needs]) if node.needs != NONE else free
        late = value(self.costs.host(node), self.at)
        parts: list[tuple[float, str, _Root]] = []
        if ready - free > self.least:
            parts.append((ready - free, *self._for_neighbour(node, free, phase)))
        gathered = self.start[i] - late - ready
        if gathered > self.least:
            root = _Root(NONE, "weights are being gathered")
            parts.append((gathered, f"for the weights of stage {node.stage}, which are being gathered", root))
        if late > self.least:
            root = _Root(NONE, f"the host of rank {self._rank(node.pp_rank, self.at)} is late")
            parts.append((late, f"for its host, which launches it {duration(late)} late", root))
        self.root[i] = root = max(parts, key=lambda part: part[0])[2]
        sentence = f"waits {', then '.join(sentence for _, sentence, _ in parts)}"
        said = root.busy == NONE or root.sentence in sentence
        return Cause(wait, sentence, root.sentence if said else "")

    def _for_neighbour(self, node: Node, free: float, phase: int) -> tuple[str, _Root]:
        """A wait for what another pipeline rank sends: in words, and what is behind it."""
        message = self.nodes[node.needs]
        producer = self.nodes[message.needs]
        made, begun, come = self.end[message.needs], self.start[node.needs], self.end[node.needs]
        late, queued, travels = max(made - free, 0.0), max(begun, free) - max(made, free), come - max(begun, free)
        what = f"{producer.action} of pipeline rank {producer.pp_rank}"
        if late >= max(queued, travels):
            root = self._behind(message.needs, late)
            text = f"for {what}, which ends at {self._time(made)}"
            if queued + travels > 0.1 * late:
                text += f", and {duration(queued + travels)} for its message"
            return text + self._because(root, message.needs, late, phase), root
        link = self._slow_link(message)
        if queued > travels:
            text, why = "which queues behind others", link or f"messages of pipeline rank {producer.pp_rank} queue up"
        else:
            text, why = "which is on its way", link or "messages are on their way"
        return f"for the message of {what}, {text}{f'; {link}' if link else ''}", _Root(NONE, why)

    def _behind(self, producer: int, late: float) -> _Root:
        """What is behind a computation that ends late: what it waited for itself, or that its rank was busy."""
        if producer in self.root and self.waits[producer] >= 0.5 * late:
            return self.root[producer]
        return _Root(producer, self._why_long(producer))

    def _because(self, root: _Root, producer: int, late: float, phase: int) -> str:
        """What is behind a wait, as far as the sentence has not said it."""
        busy = self.nodes[root.busy] if root.busy != NONE else None
        excess = late if busy is None else self.end[root.busy] - self.start[root.busy] - self.usual[busy.kind]
        steady = phase == _STEADY
        if root.sentence and (steady or excess >= _MUCH * late):
            return f"; behind it: {root.sentence}"
        if not steady:
            return f" ({PHASES[phase]})"
        if busy is not None and root.busy != producer:
            return f"; behind it: pipeline rank {busy.pp_rank} is busy with {busy.action}"
        return ""

    def _slow_link(self, message: Node) -> str:
        """Names the link of a message if it is slow."""
        return self._link(message, self.at)[1]

    def _link(self, message: Node, at: Replica) -> tuple[float, str]:
        """How many times as slow the link of a message is, and its name if that is more than once."""
        ranks = sorted(self._rank(pp_rank, at) for pp_rank in (message.pp_rank, message.receiver))
        factor = self.scenario.faults.links.get((ranks[0], ranks[1]), 1.0)
        name = f"the link of ranks {ranks[0]} and {ranks[1]} is {factor:g} times as slow"
        return factor, name if factor > 1 else ""

    def _why_long(self, i: int) -> str:
        """Who makes a computation longer than others of its kind; empty if nobody does."""
        if i not in self.known:
            self.known[i] = self._longer(i, self.at, _HOPS)
        return self.known[i]

    def _longer(self, i: int, at: Replica, hops: int) -> str:
        node, scenario = self.nodes[i], self.scenario
        pieces = self.costs.pieces(node)
        stretches, begun = inside(pieces, self.played.start[i], at)
        by_replica: dict[Replica, float] = {}
        for replica, seconds in stretches:
            by_replica[replica] = by_replica.get(replica, 0.0) + sum(seconds.values())
        dp, cp, _ = slowest = max(by_replica, key=lambda replica: by_replica[replica], default=at)
        rank = self._rank(node.pp_rank, slowest)
        factor = scenario.faults.ranks.get(rank, 1.0)
        if factor > 1:
            return _slow_rank(rank, factor)
        usual = self.usual[node.kind]
        taken = float(self.played.end[i][at] - self.played.start[i][at])
        late = float(self.played.start[i][begun] - self.played.start[i][at])
        host = self._rank(node.pp_rank, begun)
        if host in scenario.faults.cpus and late >= 0.5 * (taken - usual) > 0:
            return f"the host of rank {host} is late"
        if hops and node.before != NONE and late >= 0.5 * (taken - usual) > 0:
            return self._longer(node.before, begun, hops - 1)  # a rank of its group has come late
        if usual <= 0 or taken < _LONGER * usual:
            return ""
        if scenario.loads is not None:
            pairs = scenario.loads.pairs
            more = float(pairs[dp, node.micro_batch, cp] / pairs.mean())
            if more > _LONGER:
                return f"rank {rank} has {more:.2f} times the mean attention in micro-batch {node.micro_batch}"
        head = scenario.stages[node.stage].head and pieces.ends >= 0.5 * (taken - usual)
        what = ", which has the head in it," if head else ""
        return f"{node.action}{what} takes {taken / usual:.2f} times the usual {duration(usual)}"

    def _at_end(self, pp_rank: int) -> Cause:
        """From a rank's last computation to the end of the pipeline."""
        graph, over = self.played.graph, self.played.pipeline_seconds
        own = graph.on_rank[pp_rank]
        ended = self.end[own[-1]] if own else 0.0
        events = [i for i, node in enumerate(self.nodes) if node.pp_rank == pp_rank and node.kind is Kind.REDUCE]
        done = max([ended, *(self.end[i] for i in events[-1:])])
        wait, parts = over - ended, []
        if wait <= self.least:
            return Cause(0.0, "")
        slowest = self._slowest(events[-1]) if done - ended > self.least else ""
        if done - ended > self.least:
            parts.append(f"for its gradients, which are reduced until {self._time(done)}{slowest}")
        if over - done > self.least:
            last = self._last()
            why = "; another of its replicas is slower" if last == pp_rank else f" ({PHASES[-1]})"
            parts.append(f"for pipeline rank {last}, which ends last, at {self._time(over)}{why}")
        text = f"waits {', then '.join(parts)}"
        excess, slow, dp = self.fault_on_path
        if excess < _MUCH * wait or not (slowest or over - done > self.least):
            return Cause(wait, text)
        # In its own replica, what is slow has delayed this rank as well, so the wait is not its doing.
        return Cause(wait, f"{text}; what delays the step most: {slow}", slow if dp != self.at[0] else "")

    @cached_property
    def fault_on_path(self) -> tuple[float, str, int]:
        """What is slow on purpose and lengthens the critical path most: by how many seconds, its name, its dp."""
        faults, found = self.scenario.faults, defaultdict[tuple[str, int], float](float)
        if not (faults.ranks or faults.links or faults.cpus):
            return 0.0, "", NONE
        path = self.path or critical_path(self.scenario, self.played)
        for step in path.steps:
            rank, dp = path.rank_of(step), step.replica[0]
            if rank in faults.ranks:
                own = step.seconds.get("compute", 0.0) + step.seconds.get("attention", 0.0)
                found[_slow_rank(rank, faults.ranks[rank]), dp] += own * (1 - 1 / faults.ranks[rank])
            if rank in faults.cpus:
                found[f"the host of rank {rank} is late", dp] += step.seconds.get("host", 0.0)
            if "pp" in step.seconds:
                factor, link = self._link(self.nodes[step.node], step.replica)
                found[link, dp] += step.seconds["pp"] * (1 - 1 / factor)
        return max(((seconds, *of) for of, seconds in found.items() if of[0]), default=(0.0, "", NONE))

    def _slowest(self, event: int) -> str:
        """Names the rank that a reduction waits for, if it is another replica's."""
        made = self.nodes[event].needs
        if made == NONE:
            return ""
        ends = self.played.end[made][:, :, self.at[2]]
        dp, cp = (int(n) for n in np.unravel_index(int(ends.argmax()), ends.shape))
        if float(ends[dp, cp]) - self.end[made] <= self.least:
            return ""
        slowest = self._rank(self.nodes[event].pp_rank, (dp, cp, self.at[2]))
        later = duration(float(ends[dp, cp]) - self.end[made])
        return f", as those of the slowest replica (rank {slowest}) come {later} later"

    def _last(self) -> int:
        """The pipeline rank that ends last."""
        ends = np.zeros(self.scenario.grid.pp)
        for node, end in zip(self.nodes, self.played.end, strict=True):
            if node.kind not in SENDS:
                ends[node.pp_rank] = max(ends[node.pp_rank], float(end.max()))
        return int(ends.argmax())
