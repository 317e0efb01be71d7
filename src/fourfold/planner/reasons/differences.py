"""The paper's layout beside the one that was found: judged by the same model, and every difference with its price.

A difference is explained by what it would cost to agree: the fastest layout that has the paper's value in that one
dimension, everything else free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.planner.machines.chips import GIB
from fourfold.planner.reasons.explanation import Comparison, Difference
from fourfold.planner.search.exact import play_exactly
from fourfold.planner.search.infeasible import explain_infeasible, fastest_fit
from fourfold.planner.search.judge import Candidate, allocatable_bytes, candidate
from fourfold.planner.search.misses import SECONDS_WORDS, paper_job
from fourfold.planner.search.paper import PaperAnswer, paper_layout
from fourfold.planner.search.search import Plan
from fourfold.planner.search.words import layout_words
from fourfold.planner.timing.stack import load_stack

if TYPE_CHECKING:
    from fourfold.planner.search.problem import Problem

DIMENSIONS = ("tp", "cp", "pp", "virtual_stages", "micro_batch", "schedule", "zero", "recompute", "split")
"""In the order in which they are compared; dp follows from the first three, and nc from the schedule."""
OF_A_PIPELINE = ("virtual_stages", "schedule", "split")
NOTICEABLE = 0.002  # of the step: less is no reason


def compare_with_paper(plan: Plan) -> Comparison:
    """The paper's layout under the problem's stack, and what keeps the plan from it."""
    problem = plan.problem
    paper = paper_layout(problem)
    if paper.refusal is not None:
        return Comparison(paper, None, f"The paper's rules give no layout for this job: {paper.refusal}.")
    theirs = paper_candidate(problem, paper)
    if not plan.candidates:
        neither = "would" if theirs.fits else "does not"
        verdict = f"The paper's layout, {theirs.layout}, {neither} fit{_too_much(plan, theirs)}."
        return Comparison(paper, theirs, verdict)
    found = plan.candidates[0]
    return Comparison(paper, theirs, _verdict(plan, found, theirs), _differences(plan, found, theirs))


def paper_candidate(problem: Problem, paper: PaperAnswer) -> Candidate:
    """The paper's layout judged as any other under the problem's stack, whether it fits or not."""
    job = paper_job(problem, paper)
    return candidate(problem, job, play_exactly(job, problem.stack, imbalance=problem.imbalance))


def _too_much(plan: Plan, theirs: Candidate) -> str:
    """: 81.6 GiB on pipeline rank 1, of 76.0 usable under the stack standard."""
    usable = allocatable_bytes(plan.problem)
    return (
        f": {theirs.memory_bytes / GIB:.1f} GiB on pipeline rank {theirs.worst_rank}, where {usable / GIB:.1f} can "
        f"be allocated, under the stack {plan.problem.stack.name}"
    )


def _with_its_own_stack(plan: Plan) -> str:
    """What the paper's layout takes with the paper's saved set, if the stack has another."""
    if plan.problem.stack.saved_set == "meta":
        return ""
    problem = plan.problem.replace(stack=load_stack("meta"))
    theirs = paper_candidate(problem, paper_layout(problem))
    fits = "fits" if theirs.fits else "does not fit either"
    return f" Under the stack meta, which keeps less for backward, it {fits}: {_numbers(theirs)}."


def _verdict(plan: Plan, found: Candidate, theirs: Candidate) -> str:
    numbers = f"{_numbers(found)} for the layout found, {_numbers(theirs)} for the paper's"
    if not theirs.fits:
        return f"The paper's layout does not fit{_too_much(plan, theirs)} ({numbers}).{_with_its_own_stack(plan)}"
    if not _differing(found, theirs):
        return f"The layout found is the paper's: {_numbers(found)}."
    change = theirs.step_seconds / found.step_seconds - 1
    if abs(change) < NOTICEABLE:
        return f"As fast as the paper's layout: {numbers}."
    low, high = found.step_seconds_band
    sure = "" if not low <= theirs.step_seconds <= high else "; the difference is within the band of the prediction"
    return f"{abs(change):.1%} {'faster' if change > 0 else 'slower'} than the paper's layout: {numbers}{sure}."


def _differing(found: Candidate, theirs: Candidate) -> list[str]:
    """Dimensions in which two layouts really differ."""
    names = [name for name in DIMENSIONS if getattr(found, name) != getattr(theirs, name)]
    if "zero" in names and found.schedule == theirs.schedule == "afab" and 3 not in (found.zero, theirs.zero):
        names.remove("zero")  # one stage's gradients at a time in either mode
    return names


def _differences(plan: Plan, found: Candidate, theirs: Candidate) -> tuple[Difference, ...]:
    differences, seen = [], {}
    for name in _differing(found, theirs):
        mine, wanted = getattr(found, name), getattr(theirs, name)
        if name in OF_A_PIPELINE and found.pp != theirs.pp and 1 in (found.pp, theirs.pp):
            sentence = "follows from pp: without a pipeline there is nothing to choose."
        else:
            sentence = _price(plan, found, name, mine, wanted, seen)
        differences.append(Difference(name, mine, wanted, sentence))
    if found.dp != theirs.dp:
        follows = (
            f"follows from the others: {plan.problem.gpus:,} GPUs / (tp {found.tp} x cp {found.cp} x pp {found.pp}) = "
            f"{found.dp}, against {theirs.dp}."
        )
        differences.append(Difference("dp", found.dp, theirs.dp, follows))
    return tuple(differences)


def _price(plan: Plan, found: Candidate, name: str, mine: int | str, theirs: int | str, seen: dict[str, str]) -> str:
    """What it costs to have the paper's value in one dimension, with everything else free.

    `seen`: layouts that have been named before, to the dimension for which.
    """
    held = plan.problem.replace(limits={**plan.problem.limits, name: (theirs,)})
    best = fastest_fit(held)
    instead = f"with {theirs} instead of {mine}"
    if best is None:
        return f"{instead} nothing fits: {explain_infeasible(held).constraint}"
    words = layout_words(best)
    which = f"the best is the one of {seen[words]} above" if words in seen else f"the best is {words}"
    seen.setdefault(words, name)
    loss = best.step_seconds - found.step_seconds
    numbers = f"{instead} {which}: {_numbers(best)} against {_numbers(found)}"
    if abs(loss) < NOTICEABLE * found.step_seconds:
        memory = (best.memory_bytes - found.memory_bytes) / GIB
        return f"{numbers}; as fast, with {abs(memory):.1f} GiB {'more' if memory > 0 else 'less'} memory."
    more = {part: best.breakdown[part] - found.breakdown[part] for part in found.breakdown}
    part = max(more, key=lambda part: more[part])
    return f"{numbers}; {loss:+.2g} s, mostly by {SECONDS_WORDS[part]} ({more[part]:+.2g} s)."


def _numbers(one: Candidate) -> str:
    return f"{one.step_seconds:.3g} s and {one.memory_bytes / GIB:.1f} GiB"
