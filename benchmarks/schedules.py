"""Validates every schedule of the grid pp <= 8, v <= 4, nmb <= 33, nc <= nmb, of every kind and ZeRO mode.

Each one must be complete and free of deadlock, its bubble (F = 1, B = 2, free messages) equal to the formula, and its
peak in flight equal to min(warm-up + 1, nmb v), of ZB-H1 on every rank to that of the first. Different arguments often
mean the same actions; those are proven once. Then times the player on pp 16, v 8, nmb 128. Tests check a sample of this
grid.

    ./run bench schedules
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product

from fourfold.layout import Schedule, compile_program, generate, play, validate


def schedules(pp: int, v: int, num_micro_batches: int, zero: int) -> Iterator[Schedule]:
    """All kinds, and all nc of the flexible one."""
    kinds: list[tuple[str, int | None]] = [("afab", None), ("1f1b" if v == 1 else "interleaved", None)]
    kinds += [("flexible", nc) for nc in range(1, num_micro_batches + 1)]
    kinds += [("zb-h1", None)] if v == 1 else []
    for kind, nc in kinds:
        yield generate(pp=pp, v=v, num_micro_batches=num_micro_batches, kind=kind, nc=nc, zero=zero)


def ideal_bubble(schedule: Schedule) -> Fraction:
    """Idle over compute: (pp-1) / (nmb v), and with fewer micro-batches than ranks what AFAB has then. ZB-H1: (pp-1)
    (F + I - W) of nmb (F + I + W), with fewer micro-batches (pp-1)(F + I) - (nmb-1) W."""
    pp, v, nmb = schedule.pp, schedule.v, schedule.num_micro_batches
    if schedule.splits_backward:
        return Fraction(2 * (pp - 1) - min(pp - 1, nmb - 1), 3 * nmb)
    return Fraction(pp - 1, nmb * v) if nmb >= pp else Fraction(pp * v + nmb - 1 - nmb * v, nmb * v)


def check(schedule: Schedule) -> None:
    """Raises ValueError if the schedule is not what it should be."""
    validate(schedule)
    bubble, ideal = play(schedule).bubble_over_compute, ideal_bubble(schedule)
    if abs(bubble - ideal) > 1e-12:
        raise ValueError(f"bubble {bubble}, but the formula gives {ideal}")
    most = schedule.num_micro_batches * schedule.v
    warmups = schedule.warmup[:1] * schedule.pp if schedule.splits_backward else schedule.warmup
    if schedule.in_flight_peak != tuple(min(warmup + 1, most) for warmup in warmups):
        raise ValueError(f"in flight {schedule.in_flight_peak} for warm-ups {schedule.warmup}")


def best_ms(what: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of some runs, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        what()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> int:
    start = time.perf_counter()
    asked, ran, fallbacks, distinct, num_actions, faults = Counter(), Counter(), 0, 0, 0, 0
    for pp, v in product(range(1, 9), range(1, 5)):
        for nmb, zero in product(range(1, 34), (1, 2, 3)):
            seen: set[tuple[object, ...]] = set()
            for schedule in schedules(pp, v, nmb, zero):
                asked["cases"] += 1
                ran[schedule.kind] += 1
                fallbacks += schedule.fallback is not None
                key = (schedule.kind, schedule.rounds, schedule.warmup, schedule.actions)
                if key in seen:
                    continue
                seen.add(key)
                distinct += 1
                num_actions += sum(map(len, schedule.actions))
                try:
                    check(schedule)
                except ValueError as error:
                    faults += 1
                    print(f"FAULT pp {pp} v {v} nmb {nmb} zero {zero} {schedule.kind} nc {schedule.nc}: {error}")
        print(f"pp {pp} v {v}: {asked['cases']:,} cases, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    seconds = time.perf_counter() - start
    print(f"{asked['cases']:,} cases, {distinct:,} different schedules with {num_actions:,} actions, {faults} faults")
    print(
        f"ran as {', '.join(f'{kind} {count:,}' for kind, count in ran.most_common())}; {fallbacks:,} of them fell back"
    )
    print("every bubble and in-flight peak equals its formula" if not faults else "see the faults above")
    print(f"{seconds:.0f} s to make all and prove the different ones")
    large = generate(pp=16, v=8, num_micro_batches=128)
    program = compile_program(large)
    print(
        f"pp 16 v 8 nmb 128: generate {best_ms(lambda: generate(pp=16, v=8, num_micro_batches=128), 3):.0f} ms, "
        f"validate {best_ms(lambda: validate(large), 3):.0f} ms, "
        f"compile {best_ms(lambda: compile_program(large), 3):.0f} ms, "
        f"play {best_ms(program.play):.1f} ms for {len(program.actions):,} timed actions"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
