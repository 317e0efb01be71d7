"""What people read before a run: the numbers are there, a newcomer's words are there, and a pipe gets plain text."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from fourfold.planner import Consequences, consequences
from fourfold.recipe import check, from_table
from fourfold.report.text import consequences_text, format_bytes, format_count, print_consequences


def of(**sections: dict[str, Any]) -> Consequences:
    return consequences(check(from_table(sections)))


DEMO = {
    "layout": {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
    "pipeline": {"virtual_stages": 2},
    "batch": {"sequences": 18},
    "output": {"name": "demo"},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestNumbers:
    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (512, "512 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (2**20 - 1, "1.00 MiB"),  # not 1024 KiB
            (973 * 1024, "973 KiB"),
            (12 * 2**20, "12.0 MiB"),
            (6_375_866_368, "5.94 GiB"),
            (80 * 2**30, "80.0 GiB"),
            (3 * 2**40, "3.00 TiB"),
        ],
    )
    def test_bytes(self, count: int, text: str) -> None:
        assert format_bytes(count) == text

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0"),
            (999, "999"),
            (1000, "1.00 k"),
            (999_999, "1.00 M"),
            (82_900, "82.9 k"),
            (405_853_388_800, "406 B"),
            (8_030_261_248, "8.03 B"),
            (15.6e12, "15.6 T"),
        ],
    )
    def test_counts(self, count: float, text: str) -> None:
        assert format_count(count) == text


class TestPlain:
    def test_demo(self) -> None:
        text = consequences_text(of(**DEMO))
        for part in (
            "Plan for demo",
            "329 k parameters",
            "16 = tp 2 x cp 2 x pp 2 x dp 2",
            "18 sequences of 256 tokens = 4,608 tokens",
            "interleaved 1f1b, 2 stages per rank; 9 micro-batches of 1 sequence per DP group",
            "in 1 round of 3 and 3 of 2",
            "ranks idle for 5.6% of their computing time, 5.3% of the step",  # (pp-1)/(nmb v) = 1/18
            "ZeRO-1: bs = 9 sequences per DP group >= 2 x pp = 4",
            "embedding + 4 layers",
            "4 layers + head",
            "activations: with logits",
        ):
            assert part in text

    def test_recomputation_stage_by_stage(self) -> None:
        text = consequences_text(of(**DEMO, train={"recompute": ["full", "none", "none", "norms"]}))
        assert "stage 0: full: layers are made again" in text
        assert "stages 1 to 2: nothing; stage 3: norms: " in text
        assert re.search(r"recompute +selective: ", consequences_text(of(train={"recompute": "selective"})))
        assert "recompute" not in consequences_text(of(**DEMO))

    def test_numbers_of_a_run_that_mixes_them(self) -> None:
        text = consequences_text(of(**DEMO, train={"dtype": "bfloat16"}))
        assert re.search(r"bf16 bf16 bf16 +residual stream \(rounded at every addition\)", text)
        assert re.search(r"fp32 +fp32 +norms' statistics; .*sum over micro-batches", text)
        assert re.search(r"fp32 fp32 fp32 .*FSDP reduce-scatter", text)
        assert re.search(r"numbers +all is held, sent and summed in float32", consequences_text(of(**DEMO)))

    def test_zero_bubble(self) -> None:
        text = consequences_text(of(layout={"pp": 4}, pipeline={"schedule": "zb-h1"}, batch={"sequences": 8}))
        assert "zb-h1 (1f1b, gradients of weights put off), 1 stage per rank; 8 micro-batches" in text
        assert "ranks idle for 12.5% of their computing time" in text  # (pp-1)(F+I-W) of 8 (F+I+W)

    def test_bubble_of_the_tiny_run(self) -> None:
        """pains T06: nmb, the predicted bubble and the idle time are never silent."""
        text = consequences_text(of(layout={"pp": 4}, batch={"sequences": 9}))
        assert "pp = 4, 9 micro-batches, 1 stage per rank" in text
        assert f"{3 / 9:.1%} of their computing time" in text

    def test_it_is_plain(self) -> None:
        text = consequences_text(of(**DEMO))
        assert text.isascii()
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())

    def test_nothing_is_wrapped(self) -> None:
        (sharding,) = [line for line in consequences_text(of(**DEMO)).splitlines() if "sharding" in line]
        assert sharding.endswith("reduces them once a step")

    def test_fallback_is_a_note(self) -> None:
        text = consequences_text(of(layout={"pp": 4}, pipeline={"schedule": "1f1b"}, batch={"sequences": 3}))
        assert re.search(r"note +3 micro-batches are fewer than pp = 4", text)
        assert "afab (all forwards, then all backwards)" in text

    def test_one_rank(self) -> None:
        text = consequences_text(of())
        assert "1 = tp 1 x cp 1 x pp 1 x dp 1" in text
        assert "none (pp = 1); 16 micro-batches of 1 sequence per DP group" in text
        assert "bubble    none: no rank waits for another stage" in text
        assert "embedding + 8 layers + head" in text

    def test_frozen(self) -> None:
        text = consequences_text(of(layout={"pp": 8}, train={"freeze": ["tok_embeddings", "layers.0"]}))
        assert "276 k of 329 k parameters are trained; no backward in the first 1 of 8 stages" in text

    def test_ranks_that_agree_share_a_line(self) -> None:
        """405B on 16 pipeline ranks is three lines; sums agree with facts.md 2.5 (about 19.3 GB)."""
        text = consequences_text(
            of(
                model={"preset": "llama3-405b"},
                layout={"tp": 8, "pp": 16, "dp": 128},
                pipeline={"virtual_stages": 8, "split": "ends_light"},
                batch={"sequences": 4096, "seq_len": 8192},
                train={"dtype": "bfloat16"},
            )
        )
        numbers = r"3\.19 B +5\.94 +12\.0 +0\.28 +58\.7-71\.7 +76\.8-89\.8 +115-141"
        assert re.search(rf"^1-14 +8 layers +{numbers}$", text, re.MULTILINE)
        assert re.search(r"^0 +embedding \+ 7 layers ", text, re.MULTILINE)
        assert re.search(r"^15 +7 layers \+ head ", text, re.MULTILINE)
        assert "Memory per rank in GiB" in text
        assert len(text.splitlines()) < 30

    def test_a_name_is_not_markup(self) -> None:
        assert "Plan for [bold]x" in consequences_text(of(output={"name": "[bold]x"}))

    def test_sgd_keeps_no_moments(self) -> None:
        assert "float32 master weights." in consequences_text(of(optimizer={"name": "sgd"}))
        assert "SGD's momentum" in consequences_text(of(optimizer={"name": "sgd", "momentum": 0.9}))


class TestPrinting:
    def test_a_pipe_gets_the_plain_text(self) -> None:
        out = io.StringIO()
        print_consequences(of(**DEMO), file=out)
        assert out.getvalue() == consequences_text(of(**DEMO)) + "\n"

    @pytest.mark.parametrize("columns", ["80", "120"])
    def test_a_terminal_gets_colour_within_its_width(self, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        out = Terminal()
        print_consequences(of(**DEMO), file=out)
        text = out.getvalue()
        assert "\x1b[" in text
        shown = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert max(map(len, shown.splitlines())) <= int(columns)
        assert "16 = tp 2 x cp 2 x pp 2 x dp 2" in shown
        assert "4 layers + head" in shown
