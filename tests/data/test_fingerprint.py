"""What a run that goes on says about data that are no longer what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.data.fingerprint import compare, fingerprint
from fourfold.data.indexed import TokenFile
from fourfold.recipe import RecipeError
from tests.data.token_files import write_token_file


def of(folder: Path, *, row_length: int = 4, seed: int = 0, **sources: float) -> dict[str, Any]:
    """Of sources by weight, as it comes back from a checkpoint."""
    files = {name: [TokenFile(folder / name)] for name in sources}
    return json.loads(json.dumps(fingerprint(files, list(sources.values()), row_length=row_length, seed=seed)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, length in (("a", 10), ("b", 20), ("c", 30)):
        write_token_file(tmp_path / name, [[1] * length])
    return tmp_path


def test_nothing_is_said_where_nothing_has_changed(folder: Path) -> None:
    before = of(folder, a=1, b=2)
    moved = folder / "moved"
    moved.mkdir()
    for file in folder.glob("[ab].*"):
        file.rename(moved / file.name)
    assert compare(before, of(moved, a=0.5, b=1.0)) == []


def test_every_change_that_can_be_gone_on_from_is_said(folder: Path) -> None:
    notes = compare(of(folder, a=1, b=1), of(folder, row_length=8, seed=3, a=3, c=1))
    assert notes[:3] == [
        "Share of a: 50.00% of the samples before, 75.00% from here on",
        "c is new and begins at its beginning",
        "b is no longer trained on; its place is kept",
    ]
    assert [note.split(":")[0] for note in notes[3:]] == [
        "data.seed was 0 and is 3",
        "The longest row was 4 and is 8",
    ]


def test_other_tokens_under_the_same_name_are_refused(folder: Path) -> None:
    before = of(folder, a=1, b=1)
    write_token_file(folder / "a", [[1] * 5, [1] * 5])  # as many tokens
    with pytest.raises(RecipeError) as caught:
        compare(before, of(folder, a=1, b=1))
    (problem,) = caught.value.problems
    assert problem.value == "a"
    assert "10 tokens in 2 documents and 1 files, but had 10 tokens in 1 documents and 1 files" in problem.rule
