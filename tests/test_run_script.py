"""`./run` in small clones: the real script, venv, pip and processes, with stand-ins for torch and Fourfold.

The stand-ins are tiny wheels that pip takes from a folder, so nothing is downloaded. The script is started with the
Python that `.venv` was made from, as a user would.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "run"
BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)
PATIENCE = 120.0  # seconds; only a hang takes as long

# Builds the stand-in for Fourfold. With SLOW set, it makes that file, to say that pip is at work, and holds a lock on
# it for SLOW_SECONDS or until it is ended.
BACKEND = '''\
import fcntl, os, time, zipfile

CLI = """
import json, os, sys

def main():
    if sys.argv[1:2] == ["exit"]:
        return int(sys.argv[2])
    print(json.dumps([sys.argv[1:], os.getcwd()]))
"""

def build_editable(folder, config_settings=None, metadata_directory=None):
    if "SLOW" in os.environ:
        with open(os.environ["SLOW"] + ".part", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, os.environ["SLOW"])
            time.sleep(float(os.environ["SLOW_SECONDS"]))
    name = "fourfold-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        info = "fourfold-0.1.0.dist-info/"
        extras = "Provides-Extra: demo\\nProvides-Extra: dev\\n"
        wheel.writestr("fourfold_stand_in.py", CLI)
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: fourfold\\nVersion: 0.1.0\\n" + extras)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "entry_points.txt", "[console_scripts]\\nfourfold = fourfold_stand_in:main\\n")
        wheel.writestr(info + "RECORD", "")
    return name
'''


class Clone:
    """A clone with the real script and stand-ins for what it installs."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.venv = self.root / ".venv"
        self.packages = folder / "packages"
        self.root.mkdir()
        self.packages.mkdir()
        shutil.copy(SCRIPT, self.root / "run")
        (self.root / "src").mkdir()
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (self.root / "constraints.txt").write_text("torch==2.13.0\n")
        (self.root / "benchmarks").mkdir()
        (self.root / "benchmarks" / "speed.py").write_text("import sys\nprint('speed', sys.argv[1:])\n")
        (self.root / "benchmarks" / "_shared.py").write_text("")
        with zipfile.ZipFile(self.packages / "torch-2.13.0-py3-none-any.whl", "w") as wheel:
            info = "torch-2.13.0.dist-info/"
            wheel.writestr("torch.py", "__version__ = '2.13.0'\n")
            wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
            wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(info + "RECORD", "")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_INDEX"))},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.packages),
        }

    def without(self, *modules: str) -> Clone:
        """From now on Python acts as if these modules were not installed, as on Debian without python3-venv."""
        (self.root.parent / "absent").mkdir(exist_ok=True)
        lines = [f"sys.modules[{name!r}] = None" for name in modules]
        (self.root.parent / "absent" / "sitecustomize.py").write_text("import sys\n" + "\n".join(lines) + "\n")
        self.environment["PYTHONPATH"] = str(self.root.parent / "absent")
        return self

    def start(self, *arguments: str, python: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
        command = [BASE_PYTHON, *(python or [str(self.root / "run")]), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.root, env={**self.environment, **environment}, text=True, **pipes)

    def run(self, *arguments: str, python: tuple[str, ...] = (), **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a call."""
        return finish(self.start(*arguments, python=python, **environment))

    def as_python(self, version: tuple[int, int]) -> tuple[str, ...]:
        """For `python`: the script under an interpreter that says it has this version."""
        code = "import runpy, sys; sys.version_info = {}; sys.argv[0] = {!r}; runpy.run_path({!r}, run_name='__main__')"
        script = str(self.root / "run")
        return ("-c", code.format((*version, 0, "final", 0), script, script))

    def module(self) -> ModuleType:
        loader = importlib.machinery.SourceFileLoader("run_script", str(self.root / "run"))
        spec = importlib.util.spec_from_loader("run_script", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.02)


def at_work(busy: Path) -> bool:
    """Whether the process that made this file is still there."""
    with busy.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clone, tuple[int, str, str]]:
    """A clone whose environment was made by a first call, and what that call said. It began with a stranger's .venv."""
    clone = Clone(tmp_path_factory.mktemp("made"))
    clone.venv.mkdir()
    (clone.venv / "precious").write_text("not made by ./run")
    return clone, clone.run("schedule", "--pp", "4")


# ---- what needs no environment


def test_can_be_read_by_python_3_6() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_usage_needs_no_environment(clone: Clone, arguments: list[str]) -> None:
    code, out, err = clone.run(*arguments)
    assert (code, err) == (0, "")
    assert "./run demo" in out
    assert "./run test" in out
    assert not clone.venv.exists()


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "sped"], ["bench", "_shared"]])
def test_unknown_benchmark_lists_the_known_ones(clone: Clone, arguments: list[str]) -> None:
    code, out, err = clone.run(*arguments)
    assert (code, out) == (2, "")
    assert "available: speed\n" in err
    assert not clone.venv.exists()


@pytest.mark.parametrize("version", [(3, 9), (3, 15)])
def test_unsupported_python_says_what_is_needed(clone: Clone, tmp_path: Path, version: tuple[int, int]) -> None:
    code, out, err = clone.run("test", python=clone.as_python(version), PATH=str(tmp_path))
    assert (code, out) == (1, "")
    assert f"this is Python {version[0]}.{version[1]}" in err
    assert "python3.11 to python3.14" in err
    assert len(err.splitlines()) == 1
    assert not clone.venv.exists()


def test_unsupported_python_finds_a_supported_one(clone: Clone, tmp_path: Path) -> None:
    for minor in range(11, 15):  # stubs, as pyenv has for versions that are not chosen
        stub = tmp_path / f"python3.{minor}"
        stub.write_text("#!/bin/sh\necho not installed >&2\nexit 127\n")
        stub.chmod(0o755)
    real = tmp_path / f"python3.{sys.version_info[1]}"
    real.unlink()
    real.symlink_to(BASE_PYTHON)
    # It got past the version and then says what else is missing.
    clone.without("ensurepip", "pip")
    code, out, err = clone.run("test", python=clone.as_python((3, 9)), PATH=str(tmp_path))
    assert (code, out) == (1, "")
    assert "neither ensurepip nor pip" in err


# ---- the stamp


def stamped(clone: Clone, torch: str = "pinned") -> ModuleType:
    """The script as a module, beside an environment that is complete as far as its stamp says."""
    (clone.venv / "bin").mkdir(parents=True)
    (clone.venv / "bin" / "python").symlink_to(BASE_PYTHON)
    script = clone.module()
    (clone.venv / ".fourfold").write_text(script.stamp(script.this_version(), torch))
    assert script.ready(torch == "system")
    return script


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_stamp_knows_what_is_to_be_installed(clone: Clone, name: str) -> None:
    script = stamped(clone)
    path = clone.root / name
    before = path.read_text()
    path.write_text(before + "# changed\n")
    assert not script.ready(False)
    path.write_text(before)
    assert script.ready(False)


@pytest.mark.parametrize("content", ["", "unfinished", "3.11 pinned 0000", "\n\n\n"])
def test_other_stamps_are_not_accepted(clone: Clone, content: str) -> None:
    script = stamped(clone)
    (clone.venv / ".fourfold").write_text(content)
    assert not script.ready(False)


def test_stamp_knows_the_python(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    script = stamped(clone)
    python = clone.venv / "bin" / "python"
    other = 12 if sys.version_info[1] != 12 else 13
    monkeypatch.setattr(sys, "version_info", (3, other, 0))
    assert not script.ready(False)
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert script.ready(False)  # too old to run Fourfold, not to start the Python in .venv
    python.unlink()
    assert not script.ready(False)
    python.symlink_to("/bin/sh")  # the base Python became another one
    assert not script.ready(False)


def test_stamp_knows_whose_torch(clone: Clone) -> None:
    assert not stamped(clone, "pinned").ready(True)


def test_system_torch_need_not_be_repeated(clone: Clone) -> None:
    assert stamped(clone, "system").ready(False)


def test_moved_clone_is_not_ready(clone: Clone) -> None:
    stamped(clone)
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    assert not clone.module().ready(False)


# ---- which torch


@pytest.mark.parametrize(
    ("driver", "reachable", "indexes"),
    [(False, True, ["cpu"]), (False, False, ["cpu", None]), (True, True, [None])],
)
def test_index_that_torch_is_taken_from(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, driver: bool, reachable: bool, indexes: list[str | None]
) -> None:
    script = clone.module()
    tried: list[str | None] = []

    def succeeds(command: list[str]) -> bool:
        assert "torch==2.13.0" in command
        index = command[command.index("--index-url") + 1] if "--index-url" in command else None
        tried.append("cpu" if index == script.CPU_INDEX else index)
        return index is None or reachable

    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(script, "succeeds", succeeds)
    monkeypatch.setattr(script, "has_nvidia_driver", lambda: driver)
    script.install_torch("torch==2.13.0")
    assert tried == indexes


def test_torch_index_has_no_fallback(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    script = clone.module()
    tried: list[str] = []
    monkeypatch.setenv("TORCH_INDEX", "file:///my/index")
    monkeypatch.setattr(script, "succeeds", lambda command: tried.append(command[-1]))
    with pytest.raises(script.SetupError, match=r"could not install torch==2\.13\.0"):
        script.install_torch("torch==2.13.0")
    assert tried == ["file:///my/index"]


# ---- making the environment


def test_first_call_adds_nothing_to_stdout(made: tuple[Clone, tuple[int, str, str]]) -> None:
    clone, (code, out, err) = made
    assert code == 0, err
    assert json.loads(out) == [["schedule", "--pp", "4"], str(clone.root)]
    assert len(out.splitlines()) == 1
    assert "to download" in err.split("installing")[0]  # said before anything is fetched


def test_stranger_s_environment_is_kept(made: tuple[Clone, tuple[int, str, str]]) -> None:
    clone, (_, _, err) = made
    assert (clone.root / ".venv.kept-1" / "precious").read_text() == "not made by ./run"
    assert ".venv.kept-1" in err


def test_installed_packages_are_compiled(made: tuple[Clone, tuple[int, str, str]]) -> None:
    clone, _ = made
    assert list(clone.venv.glob("lib/python3.*/site-packages/__pycache__/torch.*.pyc"))


def test_second_call_is_only_the_program(made: tuple[Clone, tuple[int, str, str]]) -> None:
    clone, _ = made
    assert clone.run("schedule") == (0, json.dumps([["schedule"], str(clone.root)]) + "\n", "")
    assert clone.run("fourfold", "--help") == (0, json.dumps([["--help"], str(clone.root)]) + "\n", "")
    assert clone.run("bench", "speed", "-n", "3") == (0, "speed ['-n', '3']\n", "")
    assert clone.run("exit", "7") == (7, "", "")


def test_demo_runs_in_the_clone_wherever_it_is_called(made: tuple[Clone, tuple[int, str, str]]) -> None:
    clone, _ = made
    move = f"import os; os.chdir({str(clone.packages)!r}); " + clone.as_python(sys.version_info[:2])[1]
    _, out, _ = clone.run("demo", "--set", "train.steps=1", python=("-c", move))
    assert json.loads(out) == [["train", "recipes/demo.toml", "--set", "train.steps=1"], str(clone.root)]
    _, out, _ = clone.run("train", "mine.toml", python=("-c", move))
    assert json.loads(out) == [["train", "mine.toml"], str(clone.packages)]


def test_old_python_starts_a_ready_environment(made: tuple[Clone, tuple[int, str, str]]) -> None:
    clone, _ = made
    code, out, err = clone.run("plan", python=clone.as_python((3, 9)))
    assert (code, json.loads(out), err) == (0, [["plan"], str(clone.root)], "")


def test_works_without_ensurepip(clone: Clone) -> None:
    code, out, err = clone.without("ensurepip").run("plan")
    assert code == 0, err
    assert json.loads(out)[0] == ["plan"]
    assert not (clone.venv / "bin" / "pip").exists()


def test_failure_is_a_sentence_and_leaves_nothing(clone: Clone) -> None:
    (clone.packages / "torch-2.13.0-py3-none-any.whl").unlink()
    code, out, err = clone.without("ensurepip").run("test")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "run: could not install torch==2.13.0 (the reason is above)"
    assert "Traceback" not in err
    assert not clone.venv.exists()


def with_system_torch(clone: Clone, version: str) -> Clone:
    """The clone's Python has torch of itself, and pip has none to offer."""
    [wheel] = clone.packages.iterdir()
    absent = clone.without("ensurepip").root.parent / "absent"
    zipfile.ZipFile(wheel).extractall(absent)
    wheel.unlink()
    (absent / "torch.py").write_text(f"__version__ = {version!r}\n")
    info = (absent / "torch-2.13.0.dist-info").rename(absent / f"torch-{version}.dist-info")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return clone


def test_system_torch_is_used(clone: Clone) -> None:
    with_system_torch(clone, "2.13.1")
    code, out, err = clone.run("--system-torch", "plan")
    assert (code, json.loads(out)[0]) == (0, ["plan"])
    assert "without torch" in err
    assert not list(clone.venv.glob("lib/python3.*/site-packages/torch*"))
    assert clone.run("plan")[2] == ""


def test_system_torch_of_another_version_is_refused(clone: Clone) -> None:
    code, out, err = with_system_torch(clone, "2.12.0").run("--system-torch", "plan")
    assert (code, out) == (1, "")
    assert "torch is 2.12.0" in err
    assert "has no release of torch 2.13" in err.splitlines()[-1]
    assert not clone.venv.exists()


def test_change_of_the_constraints_makes_it_anew(clone: Clone) -> None:
    clone.without("ensurepip")
    assert clone.run("plan")[0] == 0
    (clone.venv / "old").write_text("")
    (clone.root / "constraints.txt").write_text("torch==2.13.0\nnumpy==2.4.6\n")
    code, out, err = clone.run("plan")
    assert (code, json.loads(out)[0]) == (0, ["plan"])
    assert "outdated" in err
    assert not (clone.venv / "old").exists()
    assert not (clone.root / ".venv.kept-1").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_first_call_leaves_nothing(clone: Clone, tmp_path: Path, number: signal.Signals) -> None:
    busy = tmp_path / "busy"
    process = clone.without("ensurepip").start("test", SLOW=str(busy), SLOW_SECONDS="100")
    wait_for(busy)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (128 + number, "")
    assert err.splitlines()[-1] == "run: stopped"
    assert not clone.venv.exists()
    assert not at_work(busy)
    assert clone.run("plan")[0] == 0


def test_two_first_calls_at_once(clone: Clone, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    first = clone.without("ensurepip").start("one", SLOW=str(busy), SLOW_SECONDS="1")
    wait_for(busy)
    second = clone.start("two")
    for process, name in [(first, "one"), (second, "two")]:
        code, out, err = finish(process)
        assert (code, json.loads(out)[0]) == (0, [name])
        assert ("waiting for it" in err, "this happens once" in err) == (name == "two", name == "one"), err


def test_killed_first_call_is_cleared_away_once_pip_is_gone(clone: Clone, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    first = clone.without("ensurepip").start("one", SLOW=str(busy), SLOW_SECONDS="2")
    wait_for(busy)
    first.kill()
    second = clone.start("two")
    code, out, err = finish(second)
    assert (code, json.loads(out)[0]) == (0, ["two"])
    assert "waiting for it" in err
    assert "unfinished" in err
    finish(first)
    assert not at_work(busy)
