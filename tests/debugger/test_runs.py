"""What run.json tells, wherever in a run one stands, and when it tells nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.debugger.runs import has_finished, layout_of_run
from fourfold.layout import Grid


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(text)
    return folder


def test_layout_from_a_folder_or_one_around_it(tmp_path: Path) -> None:
    run = write(tmp_path / "run", json.dumps({"layout": {"tp": 2, "cp": 1, "pp": 4, "dp": 1}, "steps": 9}))
    deep = run / "hangs" / "step-00000003"
    deep.mkdir(parents=True)
    for folder in (run, run / "hangs", deep, deep / "rank-00000.json"):
        assert layout_of_run(folder) == Grid(tp=2, pp=4)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layout": {"tp": 2}}', '{"layout": {"tp": "x"}}',
                                  '{"layout": {"tp": 0, "cp": 1, "pp": 1, "dp": 1}}'])  # fmt: skip
def test_no_layout(tmp_path: Path, text: str) -> None:
    assert layout_of_run(write(tmp_path / "run", text)) is None


@pytest.mark.parametrize(
    ("text", "finished"),
    [('{"state": "finished"}', True), ('{"state": "running"}', False), ("{}", False), ("no JSON", False)],
)
def test_whether_it_came_to_its_end(tmp_path: Path, text: str, finished: bool) -> None:
    assert has_finished(write(tmp_path / "run", text)) is finished
    assert not has_finished(tmp_path / "elsewhere")
