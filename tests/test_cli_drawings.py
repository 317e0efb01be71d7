"""`fourfold schedule --html, --png, --svg`: files where they are wanted, or one line that says why not, and no file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from fourfold.cli.training import schedule
from fourfold.layout import generate
from fourfold.report.schedule import schedule_text


def test_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, png, svg = (tmp_path / f"a.{suffix}" for suffix in ("html", "png", "svg"))
    assert schedule(pp=3, v=2, nmb=6, html=html, png=png, svg=svg) == 0
    text = schedule_text(generate(pp=3, v=2, num_micro_batches=6))
    assert capsys.readouterr().out == (
        f"{text}\n\npage: {html} (open it in a browser)\npicture: {png}\npicture: {svg}\n"
    )
    with Image.open(png) as image:
        assert image.format == "PNG"
    assert svg.read_text(encoding="utf-8").count("pp 2") >= 1
    assert "16.67%" in html.read_text(encoding="utf-8")


def test_json_stays_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule(pp=2, nmb=4, as_json=True, svg=tmp_path / "a.svg") == 0
    assert json.loads(capsys.readouterr().out)["pp"] == 2
    assert (tmp_path / "a.svg").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"png": "a.jpg"}, "error: --png {0}/a.jpg: ends in '.jpg'; must end in .png, such as {0}/a.png\n"),
        ({"svg": "a.png"}, "error: --svg {0}/a.png: ends in '.png'; must end in .svg, such as {0}/a.svg\n"),
        ({"html": "a"}, "error: --html {0}/a: has no ending; must end in .html or .htm, such as {0}/a.html\n"),
        ({"png": ""}, "error: --png {0}: is a folder; give the name of a file, such as {0}/picture.png\n"),
        ({"html": "no/a.html"}, "error: --html {0}/no/a.html: there is no folder {0}/no\n"),
        ({"svg": "a.svg", "nmb": 0}, "error: nmb = 0: must be at least 1\n"),
    ],
)
def test_refusals_come_before_anything_is_written(
    options: dict[str, str | int], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nmb = int(options.get("nmb", 4))
    given = {"png": tmp_path / "good.png"} | {name: tmp_path / str(path) for name, path in options.items()}
    assert schedule(pp=2, nmb=nmb, html=given.get("html"), png=given["png"], svg=given.get("svg")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == message.format(tmp_path)
    assert not list(tmp_path.iterdir())


def test_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Sequence[object]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert schedule(pp=2, nmb=4, svg=tmp_path / "a.svg") == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'a.svg'}: No space left on device\n"
