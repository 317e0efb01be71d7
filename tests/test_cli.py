"""The command line as a user meets it: its own process, its exit code, its two streams."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from fourfold.layout import generate
from fourfold.report.schedule import schedule_json, schedule_text


def fourfold(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "fourfold.cli", *arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def test_schedule_as_json() -> None:
    done = fourfold("schedule", "--pp", "4", "--v", "2", "--nmb", "9", "--nc", "4", "--zero", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    # facts.md 2.2: rounds 5, 4; bubble 3 / (9 x 2); warm-up 5 + 2 (3 - rank); v reduce-scatters.
    assert found["bubble_over_compute"] == pytest.approx(1 / 6)
    assert found["bubble_over_total"] == pytest.approx(1 / 7)
    assert found["warmup"] == [11, 9, 7, 5]
    assert found["in_flight_peak"] == [12, 10, 8, 6]
    assert found["reduce_scatters"] == [2, 2, 2, 2]
    assert found["fallback"] is None
    assert found["rounds"] == [5, 4]
    assert found["actions"][0][:3] == ["0GATHER", "0F0", "0SEND_F0"]
    assert found == schedule_json(generate(pp=4, v=2, num_micro_batches=9, nc=4))


def test_schedule_as_text() -> None:
    done = fourfold("schedule", "--pp", "4", "--v", "2", "--nmb", "3", "--kind", "interleaved", "--zero", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == schedule_text(generate(pp=4, v=2, num_micro_batches=3, kind="interleaved", zero=3)) + "\n"
    assert "note: 3 micro-batches are fewer than pp = 4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--pp 4 --v 2 --nmb 8 --kind 1f1b",
            "error: kind = '1f1b' with v = 2: 1f1b has one virtual stage per rank; "
            "legal: v = 1, or kind = 'interleaved'\n",
        ),
        (
            "--pp 4 --v 2 --nmb 8 --kind zb-h1",
            "error: kind = 'zb-h1' with v = 2: zb-h1 has one virtual stage per rank; "
            "legal: v = 1, or kind = 'interleaved'\n",
        ),
        ("--pp 4 --nmb 8 --nc 9", "error: nc = 9: must be at most nmb = 8; nearest legal: 8\n"),
    ],
)
def test_illegal_combination_is_one_sentence(arguments: str, message: str) -> None:
    done = fourfold("schedule", *arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("schedule --pp 4 --nmb 8 --zeroo 2", "Unknown option: --zeroo. Did you mean --zero?"),
        ("schedule --pp 4 --nmb 8 --kind flexibl", 'Did you mean "flexible"?'),
        ("schedule --pp 4", "parameter --nmb requires an argument"),
        ("schedul --pp 4", 'Did you mean "schedule"?'),
    ],
)
def test_a_slip_of_the_pen_gets_a_hint(arguments: str, message: str) -> None:
    done = fourfold(*arguments.split())
    assert done.returncode != 0
    said = re.sub(r"[\s│]+", " ", done.stdout + done.stderr)
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize("arguments", [["--help"], ["schedule", "--help"], ["schedule", "--pp", "4", "--nmb", "9"]])
def test_it_answers_without_torch(arguments: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        "from fourfold.cli import main\n"
        "slow = ('torch', 'fourfold.planner', 'fourfold.recipe', 'fourfold.report.text')\n"
        "atexit.register(lambda: print('IMPORTED', [name for name in slow if name in sys.modules], file=sys.stderr))\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "main()\n"
    )
    done = python("-c", code)
    assert done.returncode == 0
    assert "IMPORTED []" in done.stderr
    assert done.stdout


JOB = ("--model", "llama3-8b", "--gpu", "h100", "--gpus", "8", "--seq", "8K", "--batch-tokens", "1M")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*JOB[:6], "--seq", "abc", *JOB[8:]), "--seq abc: must be a whole number"),
        ((*JOB[:8], "--batch-tokens", "0"), "--batch-tokens 0: must be at least 1"),
        ((*JOB, "--fix", "tp=x"), "tp = x: must be whole numbers"),
        ((*JOB, "--fix", "tp=2", "--fix", "tp=4"), "--fix tp: is given twice"),
        ((*JOB, "--recipe-out", "."), "--recipe-out .: is a folder"),
        ((*JOB, "--recipe-out", "/no/such/run.toml"), "--recipe-out /no/such/run.toml: there is no folder /no/such"),
        ((*JOB[:4], "--gpus", "0", *JOB[6:]), "--gpus 0: must be at least 1"),
    ],
)
def test_what_is_wrong_with_a_plan(arguments: tuple[str, ...], message: str) -> None:
    done = fourfold("plan", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert "Posix" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_recipe_that_cannot_be_written() -> None:
    done = fourfold("plan", *JOB, "--top", "1", "--recipe-out", "/proc/run.toml")
    assert done.returncode == 2
    assert done.stderr == "error: --recipe-out /proc/run.toml: No such file or directory\n"


def test_example_of_plan_is_in_its_help() -> None:
    """As the error about missing flags says."""
    found = " ".join(fourfold("plan", "--help").stdout.split())
    assert "fourfold plan --model llama3-70b --gpu h100 --gpus 128 --seq 8K --batch-tokens 4M" in found


def test_folder_of_measurements() -> None:
    done = fourfold("accuracy", "--data", ".")
    assert (done.returncode, done.stderr) == (2, "error: .: is a folder; give its CSV files\n")


def test_interrupted_while_it_starts() -> None:
    """The import of cyclopts is interrupted."""
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
import fourfold.cli
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
