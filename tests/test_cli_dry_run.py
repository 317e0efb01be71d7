"""`fourfold dry-run` as its users meet it: what is printed, what is refused, and how long it takes at full size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.dry_running import dry_run

RECIPES = Path(__file__).parents[1] / "recipes"
DEMO = RECIPES / "demo.toml"
NO_DATA = "data.source=/there/is/none"


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two pipeline ranks, the second is the middle one, and the last."""
    assert dry_run(DEMO, overrides=(NO_DATA, "batch.sequences=8")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("Rank ") == 2
    for words in ("Rank 0 of 16 (tp 0, cp 0, pp 0, dp 0)", "Rank 4 of 16", "gradient sums", "matrix products"):
        assert words in captured.out
    assert max(map(len, captured.out.splitlines()[:-1])) < 120


def test_json_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(DEMO, rank=13, overrides=("batch.sequences=8",), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    assert (found["name"], found["num_ranks"], rank["rank"]) == ("demo", 16, 13)
    assert rank["at"] == {"tp": 1, "cp": 0, "pp": 1, "dp": 1}
    assert sum(rank["peak"]["held"].values()) == rank["peak"]["bytes"]
    sends = [sent for sent in rank["traffic"] if sent["kind"] == "send"]
    assert {(sent["group"], sent["size"], sent["link"]) for sent in sends} == {("pp", 2, "node")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 16}, "--rank 16: must be one of the job's ranks, 0 to 15; nearest legal: 15"),
        ({"rank": -1}, "nearest legal: 0"),
        ({"rank": 3, "stages": True}, "leave one of them out"),
        ({"overrides": ("layout.tp=3",)}, "layout.tp = 3"),
    ],
)
def test_refusals(arguments: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(DEMO, **arguments) == 2  # type: ignore[arg-type]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_a_rank_of_405b_on_16384() -> None:
    """In a process of its own: less than a minute, less than 8 GB, and as the planner says."""
    command = [
        sys.executable,
        "-m",
        "fourfold.cli",
        "dry-run",
        str(RECIPES / "llama3-405b.toml"),
        "--rank",
        "64",
        "--json",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        (rank,) = json.loads(process.stdout.read())["ranks"]
        _, process.returncode, used = os.wait4(process.pid, 0)
    assert process.returncode == 0
    assert used.ru_utime + used.ru_stime < 60  # of a processor, which others may want, too
    assert used.ru_maxrss * 1024 < 8e9
    assert rank["parameters"] == 3_187_933_184
    assert [one for one in rank["planner"] if not one["agrees"]] == []
    assert {sent["group"]: sent["link"] for sent in rank["traffic"]} == {
        "dp": "network", "fsdp": "network", "pp": "network", "tp": "node", "world": "network",
    }  # fmt: skip
