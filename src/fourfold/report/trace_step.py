"""One simulated step as the events of its ranks: when each kernel runs, and when the host launches it.

The host runs ahead: it launches a computation when the one before it begins, so that the GPU waits for data and for
other ranks, never for a launch. A host that is late launches right before the kernels run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from fourfold.layout import Action, Kind
from fourfold.layout.actions import COMPUTE, MESSAGES, RECEIVES, SENDS
from fourfold.report.trace_events import RankTrace
from fourfold.simulator.costs import Lanes, Modelled, latest
from fourfold.simulator.graph import NONE
from fourfold.simulator.played import Played
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.segments import segments

_EVENTS = {Kind.GATHER: "all_gather", Kind.REDUCE: "reduce_scatter"}
_LONGEST_SLOT = 5_000  # ns: what a launch takes on a host
_SHORTEST_SLOT = 8  # ns: ranges are nested in whole nanoseconds
_AHEAD = 10  # slots by which a late host's first launch comes before its kernel: those of a layer
_NORM = 20e-6  # seconds that the sum of the gradients' norms takes, if what is fixed in a step allows


def slot_of(scenario: Scenario) -> int:
    """Nanoseconds of one launch: so few that a computation is launched in a fifth of its first layer."""
    work = scenario.work
    shortest, longest = np.inf, 1
    for kind, layer in work.layer.items():
        for number, ends in zip(work.layers, work.ends[kind], strict=True):
            seconds = number * (layer.compute + layer.attention + layer.tp + layer.cp) + ends
            if seconds > 0:
                shortest, longest = min(shortest, seconds / max(number, 1)), max(longest, 9 * number + 15)
    if not np.isfinite(shortest):
        return _LONGEST_SLOT
    return int(min(max(0.2e9 * shortest / longest, _SHORTEST_SLOT), _LONGEST_SLOT))


class Step:
    """One step.

    Args:
        scenario, played: what was simulated.
        number: of the step.
        begins: when, in nanoseconds of the traces' time.
        slot: nanoseconds of a launch.
    """

    def __init__(self, scenario: Scenario, played: Played, *, number: int, begins: int, slot: int) -> None:
        self.scenario, self.played, self.number, self.begins, self.slot = scenario, played, number, begins, slot
        self.costs = Modelled(scenario)
        self.messages = _Messages(scenario, played)
        schedule = scenario.schedule
        # All weights are asked for at the start of the step; in ZeRO-3 before each computation.
        first = (Kind.GATHER,) if schedule.zero < 3 else ()
        self.actions = [sorted(actions, key=lambda a: a.kind not in first) for actions in schedule.actions]
        leading = [len([*takewhile(lambda a: a.kind not in COMPUTE, actions)]) for actions in self.actions]
        self.ahead = slot * (2 + _AHEAD + 2 * max(leading, default=0))

    @property
    def mark(self) -> tuple[int, int]:
        """Start and end of the profiler's mark: the host begins before the GPU."""
        start = self.begins - self.ahead
        return start, start + round(self.played.step_seconds * 1e9)

    def write(self, traces: Sequence[RankTrace], put: Callable[[RankTrace], None]) -> None:
        """Makes the events of some ranks. `put` is called after each of their actions."""
        by_pipeline_rank: dict[int, list[RankTrace]] = defaultdict(list)
        for trace in traces:
            by_pipeline_rank[self.scenario.grid.coordinates(trace.groups.rank).pp].append(trace)
        for pp_rank, some in by_pipeline_rank.items():
            _PipelineRank(self, pp_rank, some).write(put)


class _PipelineRank:
    """Some replicas of one pipeline rank."""

    def __init__(self, step: Step, pp_rank: int, traces: Sequence[RankTrace]) -> None:
        self.step, self.pp_rank, self.traces = step, pp_rank, traces
        self.played, self.graph = step.played, step.played.graph
        lanes = self.played.lanes
        at = [step.scenario.grid.coordinates(trace.groups.rank) for trace in traces]
        # Of a dimension along which all are alike, one was simulated.
        self.index = tuple(
            np.array([getattr(where, name) if extent > 1 else 0 for where in at])
            for name, extent in zip(("dp", "cp", "tp"), (lanes.dp, lanes.cp, lanes.tp), strict=True)
        )
        own = [i for i, node in enumerate(self.graph.nodes) if node.pp_rank == pp_rank and node.kind not in SENDS]
        self.events = iter([i for i in own if self.graph.nodes[i].kind in _EVENTS])
        self.done: Lanes = np.max([self.played.end[i] for i in own], axis=0) if own else 0.0
        self.together = latest(latest(self.done, 0), 1)  # replicas end a step together: they share the weights
        self.earliest = [step.begins - step.ahead] * len(traces)  # when the host may launch the next computation

    def write(self, put: Callable[[RankTrace], None]) -> None:
        step = self.step
        for trace in self.traces:
            trace.host = max(trace.host, step.mark[0] + 1)
            trace.annotate_step(step.number, *step.mark)
        actions = step.actions[self.pp_rank]
        last = max((i for i, action in enumerate(actions) if action.kind is Kind.REDUCE), default=NONE)
        for i, action in enumerate(actions):
            if action.kind in COMPUTE:
                self._compute(action)
            elif action.kind in MESSAGES:
                self._message(action)
            else:
                self._event(action, is_last=i == last)
            for trace in self.traces:
                put(trace)
        self._finish()

    def _times(self, lanes: Sequence[Lanes]) -> list[list[int]]:
        """Nanoseconds of each trace, of each of some moments."""
        picked = np.array([self._pick(moment) for moment in lanes])
        return (np.rint(picked * 1e9).astype(np.int64) + self.step.begins).T.tolist()

    def _pick(self, lanes: Lanes) -> np.ndarray:
        """The value of each trace; along a dimension in which all are alike, there may be but one."""
        if not isinstance(lanes, np.ndarray):
            return np.full(len(self.traces), lanes)
        return lanes[tuple(at if extent > 1 else 0 * at for at, extent in zip(self.index, lanes.shape, strict=True))]

    def _compute(self, action: Action) -> None:
        i = self.graph.where[action]
        parts = segments(self.step.costs, self.step.scenario.grid, self.played, i)
        late = self._pick(self.step.costs.host(self.graph.nodes[i]))
        times = self._times([self.played.start[i], *(t for part in parts for t in (part.start, part.end))])
        for j, (trace, (start, *ends)) in enumerate(zip(self.traces, times, strict=True)):
            earliest = self.earliest[j]
            if late[j] > 0:
                earliest = start - min(_AHEAD * self.step.slot, round(late[j] * 5e8))
            kernels = [
                (part.what, part.kind, begin, end)
                for part, begin, end in zip(parts, ends[::2], ends[1::2], strict=True)
            ]
            trace.action(*action, earliest=earliest, kernels=kernels)
            self.earliest[j] = start

    def _message(self, action: Action) -> None:
        i = self.graph.where[action.send]
        node = self.graph.nodes[i]
        begin = self.step.messages.sent[i] if action.kind in SENDS else self.step.messages.received[i]
        pair = (node.pp_rank, node.receiver)
        for trace, (start, end) in zip(self.traces, self._times([begin, self.step.messages.end[i]]), strict=True):
            trace.action(*action, earliest=trace.host, kernels=[("pp", pair, start, end)])

    def _event(self, action: Action, *, is_last: bool) -> None:
        """FSDP's collectives: they begin on a rank when it is ready, and end for all together."""
        grid = self.step.scenario.grid
        when = self._when(action, is_last=is_last) if grid.dp * grid.cp > 1 else None
        if when is None:
            for trace in self.traces:
                trace.action(*action, earliest=trace.host)
            return
        for trace, (start, end) in zip(self.traces, self._times(when), strict=True):
            trace.action(*action, earliest=trace.host, kernels=[("fsdp", _EVENTS[action.kind], start, end)])

    def _when(self, action: Action, *, is_last: bool) -> tuple[Lanes, Lanes] | None:
        """Start and end of FSDP's collective for an action, if it has one of its own. `is_last`: no REDUCE follows."""
        end = self.played.end
        if action.kind not in _EVENTS:
            return None
        if self.step.scenario.schedule.zero == 3 and action.kind is Kind.REDUCE:
            # Its time is in the layers, and replicas meet in the next GATHER; after the last, at the end of the step.
            return (self.done, self.together) if is_last else None
        i = next(self.events)
        node = self.graph.nodes[i]
        ready: Lanes = end[node.after[0]] if node.after else 0.0
        if node.needs != NONE:
            left: Lanes = 0.0
            if action.kind is Kind.REDUCE:
                made = self.graph.nodes[node.needs]
                layer = self.step.costs.computation(made, self.played.start[node.needs]).layer
                left = max(self.step.costs.layers(made.stage) - 1, 0) * layer
            ready = np.maximum(ready, end[node.needs] - left)
        return np.minimum(ready, self.played.start[i]), end[i]

    def _finish(self) -> None:
        """The end of the step, which all ranks share."""
        work, played = self.step.scenario.work, self.played
        summed = played.pipeline_seconds + min(_NORM, work.fixed)
        for j, (trace, (start, end, stepped)) in enumerate(
            zip(self.traces, self._times([self.together, summed, summed + work.optimizer]), strict=True)
        ):
            trace.finish_step(self.earliest[j], (start, end), (end, stepped))


class _Messages:
    """When the two ends of each message are busy with it. Seconds of each replica, by place in the graph.

    A send runs from when its data are there, a receive from when it was posted, and both until the message is over:
    as with NCCL, none moves before both are there. The engine lets messages travel before their receive is posted; that
    changes nothing but when they are over, which is before they are needed.
    """

    def __init__(self, scenario: Scenario, played: Played) -> None:
        graph, schedule = played.graph, scenario.schedule
        self.sent: dict[int, np.ndarray] = {}
        self.received: dict[int, np.ndarray] = {}
        self.end: dict[int, np.ndarray] = {}
        posted, needed = self._posted(scenario, played), {}
        for i, node in enumerate(graph.nodes):
            if node.kind in COMPUTE and node.needs != NONE and graph.nodes[node.needs].kind in SENDS:
                needed[node.needs] = played.start[i]
        if schedule.pp > 1 and not posted and needed:
            raise ValueError("a trace needs the schedule's messages; generate it with messages=True")
        free: dict[object, np.ndarray | float] = defaultdict(float)  # when a stream is
        for i, node in enumerate(graph.nodes):
            if node.kind not in SENDS:
                continue
            ends = (node.pp_rank, node.receiver)
            here, there = (ends, ends) if graph.receives == "asynchronous" else ends
            arrived = played.end[i]
            end = np.maximum(arrived, posted[i] + (arrived - played.start[i]))
            end = np.maximum(np.minimum(end, np.maximum(arrived, needed[i])), np.maximum(free[here], free[there]))
            self.sent[i] = np.minimum(np.maximum(played.end[node.needs], free[here]), end)
            self.received[i] = np.minimum(np.maximum(posted[i], free[there]), end)
            self.end[i] = free[here] = free[there] = end

    @staticmethod
    def _posted(scenario: Scenario, played: Played) -> dict[int, np.ndarray | float]:
        """When each message's receive is posted: after the computation before it in its rank's list."""
        graph, posted = played.graph, {}
        for actions in scenario.schedule.actions:
            before: np.ndarray | float = 0.0
            for action in actions:
                if action.kind in COMPUTE:
                    before = played.end[graph.where[action]]
                elif action.kind in RECEIVES:
                    posted[graph.where[action.send]] = before
        return posted
