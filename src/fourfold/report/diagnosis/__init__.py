"""Who holds up the others: as people read it in a terminal, as JSON, and as a page."""

from fourfold.report.diagnosis.answers import answer_json, answer_page, answer_text
from fourfold.report.diagnosis.as_json import diagnosis_json
from fourfold.report.diagnosis.page import diagnosis_page
from fourfold.report.diagnosis.text import diagnosis_text
from fourfold.report.diagnosis.words import paragraph

__all__ = [
    "answer_json",
    "answer_page",
    "answer_text",
    "diagnosis_json",
    "diagnosis_page",
    "diagnosis_text",
    "paragraph",
]
