"""Runs a pipeline rank's list of actions for real.

One path for every schedule and every pp, 1 included: the list says what to do, and this file does it in that order.
Neighbouring stages on one rank hand their tensors over locally; everything else travels by asynchronous point-to-point
messages, whose shapes follow from the batches that every rank has, so they may differ from micro-batch to micro-batch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fourfold.layout import Action, Kind, Schedule
from fourfold.parallel.batch import LocalBatch
from fourfold.parallel.data import ShardedStage
from fourfold.parallel.groups import Groups, Transfer
from fourfold.parallel.halves import Half

Message = tuple[str, int, int]  # direction, producing stage, micro-batch: see Action.message


class LoggedAction(NamedTuple):
    """One line of the action log. Times are nanoseconds of the host's monotonic clock.

    Attributes:
        wait: the part of start to end spent waiting for a message of another rank.
        tp, cp, fsdp: the parts spent waiting in collectives of these groups.
        cpu: processor time of the main thread.
    """

    action: Action
    start: int
    end: int
    wait: int
    tp: int = 0
    cp: int = 0
    fsdp: int = 0
    cpu: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one step leaves.

    Attributes:
        losses: fp32 [micro-batches], the summed loss of this rank's tokens by micro-batch index; None without the head.
        log: what was done, in order.
    """

    losses: Tensor | None
    log: tuple[LoggedAction, ...]


class Pipeline:
    """The executor of one pipeline rank.

    Args:
        stages: this rank's virtual stages by global index.
        groups: the rank's process groups.
        width: D, the features of the hidden state.
        dtype: of the tensors between stages.
    """

    def __init__(self, stages: Mapping[int, ShardedStage], groups: Groups, *, width: int, dtype: torch.dtype) -> None:
        self.stages = stages
        self.groups = groups
        self.width = width
        self.dtype = dtype
        self._outbox = Outbox()

    def step(self, schedule: Schedule, batches: Sequence[LocalBatch], *, gradient_scale: float) -> StepResult:
        """Forward and backward of all micro-batches. Gradients are added to those that the weights have.

        Args:
            schedule: what to run; one whose stages are all frozen has forwards only.
            batches: this rank's share of every micro-batch.
            gradient_scale: gradient of the total loss with respect to each micro-batch's summed loss: one over the
                global number of valid labels.

        Raises:
            ValueError: not as many batches as the schedule has micro-batches.
        """
        if len(batches) != schedule.num_micro_batches:
            raise ValueError(f"{len(batches)} micro-batches given, the schedule has {schedule.num_micro_batches}")
        return _Step(self, schedule, batches, gradient_scale).run()

    def flush(self) -> None:
        """Waits until everything that was posted is sent, and let go of."""
        self._outbox.flush()


@dataclass
class _Step:
    """The state of one step. Keys are messages or (stage, micro-batch)."""

    pipeline: Pipeline
    schedule: Schedule
    batches: Sequence[LocalBatch]
    gradient_scale: float
    receiving: dict[Message, tuple[Transfer, Tensor]] = field(default_factory=dict)
    arrived: dict[Message, Tensor] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)
    halves: dict[tuple[int, int], list[Half]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    waited: int = 0

    def run(self) -> StepResult:
        pipeline, groups = self.pipeline, self.pipeline.groups
        handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.backward_of_input,
            Kind.WEIGHT: self.backward_of_weights,
            Kind.SEND_FORWARD: lambda action: self.send(action.message, to_stage=action.stage + 1),
            Kind.SEND_BACKWARD: lambda action: self.send(action.message, to_stage=action.stage - 1),
            Kind.RECV_FORWARD: lambda action: self.receive(action.message),
            Kind.RECV_BACKWARD: lambda action: self.receive(action.message),
            Kind.GATHER: lambda action: pipeline.stages[action.stage].gather(),
            Kind.REDUCE: lambda action: pipeline.stages[action.stage].reduce(),
            Kind.FREE: lambda action: pipeline.stages[action.stage].free(),
        }
        log = []
        for action in self.schedule.actions[groups.pp.rank]:
            groups.position.stage, groups.position.micro_batch = action.stage, action.micro_batch
            group = groups.fsdp if action.kind in (Kind.GATHER, Kind.REDUCE, Kind.FREE) else groups.pp
            self.waited = 0
            tp, cp, fsdp = groups.tp.waited, groups.cp.waited, groups.fsdp.waited
            cpu, start = time.thread_time_ns(), time.monotonic_ns()
            with group.labelled(action.kind.value):
                handlers[action.kind](action)
            end = time.monotonic_ns()
            ties = groups.tp.waited - tp, groups.cp.waited - cp, groups.fsdp.waited - fsdp
            log.append(LoggedAction(action, start, end, self.waited, *ties, time.thread_time_ns() - cpu))
        groups.position.stage = groups.position.micro_batch = -1
        with groups.recorder.flushing():
            pipeline.flush()
        undone = self.receiving or self.arrived or self.inputs or self.outputs or self.halves
        assert not undone, "the schedule left something undone"
        losses = torch.stack([self.losses[m] for m in sorted(self.losses)]) if self.losses else None
        return StepResult(losses, tuple(log))

    def forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        batch = self.batches[micro_batch]
        if stage == 0:
            x = batch.tokens
        else:
            x = self.take(("F", stage - 1, micro_batch))
            x.requires_grad_(stage > self.schedule.num_frozen_stages)
        trained = stage >= self.schedule.num_frozen_stages
        with torch.set_grad_enabled(trained):
            out = self.pipeline.stages[stage].module(x, batch)
        last = stage == self.schedule.num_stages - 1
        if trained:
            # Backward needs the graph behind the output, not its data: those live until the send is done and no longer.
            self.outputs[stage, micro_batch] = get_gradient_edge(out)
            if x.requires_grad:
                self.inputs[stage, micro_batch] = x
        if last:
            self.losses[micro_batch] = out.detach()
        else:
            self.arrived["F", stage, micro_batch] = out.detach()

    def backward(self, action: Action) -> None:
        _, stage, micro_batch = action
        edge = self.outputs.pop((stage, micro_batch))
        if stage == self.schedule.num_stages - 1:
            grad = self.losses[micro_batch].new_tensor(self.gradient_scale)
        else:
            grad = self.take(("B", stage + 1, micro_batch))
        torch.autograd.backward([edge], [grad])
        x = self.inputs.pop((stage, micro_batch), None)
        if x is not None:
            assert x.grad is not None
            self.arrived["B", stage, micro_batch] = x.grad

    def backward_of_input(self, action: Action) -> None:
        _, stage, micro_batch = action
        with self.pipeline.stages[stage].halves.keeping() as kept:
            self.backward(action)
        self.halves[stage, micro_batch] = kept

    def backward_of_weights(self, action: Action) -> None:
        _, stage, micro_batch = action
        self.pipeline.stages[stage].add_gradients(self.halves.pop((stage, micro_batch)))

    def take(self, message: Message) -> Tensor:
        """What a neighbouring stage sent, or left here if it is on this rank."""
        if message in self.receiving:
            work, buffer = self.receiving.pop(message)
            start = time.monotonic_ns()
            with self.pipeline.groups.pp.named(f"WAIT_{message[0]}"):
                work.wait()
            self.waited += time.monotonic_ns() - start
            return buffer
        return self.arrived.pop(message)

    def send(self, message: Message, *, to_stage: int) -> None:
        tensor = self.arrived.pop(message).contiguous()
        work = self.pipeline.groups.send(tensor, self.schedule.rank_of(to_stage))
        self.pipeline._outbox.put(work, tensor)

    def receive(self, message: Message) -> None:
        pipeline, (_, from_stage, micro_batch) = self.pipeline, message
        batch = self.batches[micro_batch]
        shape = (batch.num_tokens // pipeline.groups.tp.size, pipeline.width)
        buffer = torch.empty(shape, dtype=pipeline.dtype, device=batch.tokens.device)
        work = pipeline.groups.receive(buffer, self.schedule.rank_of(from_stage))
        self.receiving[message] = (work, buffer)


class Outbox:
    """Holds what is being sent, and lets go of each tensor as soon as its send is done.

    gloo never reports a send as completed unless somebody waits for it, so a thread does; waiting releases the
    interpreter. On a GPU waiting would make the device's later computations wait for the send: there, completion is
    asked for whenever something else is sent.
    """

    def __init__(self) -> None:
        self._on_device: deque[tuple[Transfer, Tensor]] = deque()
        self._queue: queue.SimpleQueue[tuple[Transfer, Tensor] | threading.Event] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, work: Transfer, tensor: Tensor) -> None:
        """Takes over a started send."""
        if tensor.is_cuda:
            self._on_device.append((work, tensor))
            while self._on_device and self._on_device[0][0].is_completed():
                self._on_device.popleft()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, daemon=True, name="fourfold-outbox")
            self._thread.start()
        self._queue.put((work, tensor))

    def flush(self) -> None:
        """Waits until everything is sent. Raises what a send raised."""
        while self._on_device:
            self._on_device.popleft()[0].wait()
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            done.wait()
        if self._error is not None:
            raise self._error

    def _wait_for_all(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                item[0].wait()
            except BaseException as error:  # handed to the main thread by flush
                self._error = self._error or error
            del item
