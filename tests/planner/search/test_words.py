"""A layout has the same words everywhere, and layouts that differ in what is predicted have others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.planner.search.words import layout_words, many, pipeline_words
from tests.planner.planned import plan_of


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp": 16, "virtual_stages": 8, "schedule": "afab", "split": "ends_light"}, "afab v8 mb1 light"),
        ({"pp": 4, "virtual_stages": 4, "schedule": "flexible", "nc": 8}, "flexible v4 nc8 mb1"),
        ({"pp": 4, "virtual_stages": 1, "schedule": "1f1b"}, "1f1b v1 mb1"),
        ({"pp": 2, "virtual_stages": 1, "schedule": "1f1b", "split": (17, 15)}, "1f1b v1 mb1 split 17-15"),
        ({"pp": 1, "virtual_stages": 1, "schedule": "1f1b"}, "none mb1"),
        ({"pp": 1, "virtual_stages": 4, "schedule": "interleaved"}, "none v4 mb1"),
        ({"pp": 1, "virtual_stages": 4, "schedule": "flexible", "nc": 2}, "none v4 nc2 mb1"),
    ],
)
def test_pipeline(changes: dict[str, Any], words: str) -> None:
    one = replace(plan_of("llama3-8b", 32).candidates[0], **{"micro_batch": 1, "split": "even", **changes})
    assert pipeline_words(one) == words


def test_layout() -> None:
    one = replace(plan_of("llama3-8b", 32).candidates[0], tp=1, cp=1, pp=1, dp=32, virtual_stages=1, micro_batch=2)
    one = replace(one, zero=3, recompute="full")
    assert layout_words(one) == "tp 1 cp 1 pp 1 dp 32, none mb2, ZeRO-3, full recompute"
    assert layout_words(replace(one, recompute="none")) == "tp 1 cp 1 pp 1 dp 32, none mb2, ZeRO-3"


def test_counts() -> None:
    assert [many(1, "GPU"), many(0, "GPU"), many(1_024, "GPU")] == ["1 GPU", "0 GPUs", "1,024 GPUs"]
    assert many(2, "micro-batch", "micro-batches") == "2 micro-batches"
