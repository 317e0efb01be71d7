"""Whatever `fourfold diagnose` has found, in words, as JSON and as a page."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fourfold.debugger.ask import Answer
from fourfold.debugger.hangs import Hang
from fourfold.debugger.memory import Memory
from fourfold.debugger.slow.diagnosis import Diagnosis
from fourfold.report.diagnosis.as_json import diagnosis_json
from fourfold.report.diagnosis.memory import answer_of_memory_json, memory_page, memory_text
from fourfold.report.diagnosis.page import diagnosis_page
from fourfold.report.diagnosis.tables import table_json, table_page, table_text
from fourfold.report.diagnosis.text import diagnosis_text
from fourfold.report.drawing import Page
from fourfold.report.hangs import hang_text


def answer_text(found: Answer) -> str:
    """For the terminal."""
    if isinstance(found, Diagnosis):
        memory = "" if found.memory is None else f"\n\n{memory_text(found.memory)}"
        return f"{diagnosis_text(found)}{memory}"
    if isinstance(found, Memory):
        return memory_text(found)
    if isinstance(found, Hang):
        return hang_text(found, head="", stacks=True).lstrip("\n")
    return table_text(found)


def answer_json(found: Answer) -> dict[str, Any]:
    """docs/formats.md explains the keys. What is not known is null."""
    if isinstance(found, Diagnosis):
        return _finite(diagnosis_json(found))
    if isinstance(found, Hang):
        verdict = "hang" if found.causes or found.stuck else "no hang"
        return _finite({"format": 1, "verdict": verdict, **msgspec.to_builtins(found, str_keys=True)})
    if isinstance(found, Memory):
        return _finite(answer_of_memory_json(found))
    return _finite(table_json(found))


def _finite(value: Any) -> Any:
    """NaN and infinity are no JSON."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer_page(found: Answer) -> Page:
    """For a browser. ValueError: of a hang there is no page."""
    if isinstance(found, Diagnosis):
        return diagnosis_page(found)
    if isinstance(found, Hang):
        raise ValueError("--html: of a hang there is no page; the text says all")
    if isinstance(found, Memory):
        return memory_page(found)
    return table_page(found)
