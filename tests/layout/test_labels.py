"""Labels of trace ranges: written, read back, and told apart from everybody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.layout import Kind, Label, parse_label
from fourfold.layout.labels import DIMENSIONS

NUMBERS = st.integers(-1, 1 << 40)


@given(
    st.builds(
        Label,
        dimension=st.sampled_from(DIMENSIONS),
        kind=st.sampled_from([*map(str, Kind), "all_gather", "reduce_scatter", "all_reduce"]),
        group=NUMBERS,
        stage=NUMBERS,
        micro_batch=NUMBERS,
        sequence=NUMBERS,
    )
)
def test_round_trip(label: Label) -> None:
    assert parse_label(str(label)) == label


def test_text_is_as_documented() -> None:
    label = Label("tp", "all_gather", group=12, stage=3, micro_batch=7, sequence=41)
    assert str(label) == "ff:tp:all_gather:group=12:stage=3:mb=7:seq=41"


def test_keys_in_any_order_and_unknown_ones_are_passed_over() -> None:
    # A later version may add keys; today's reader has to live with them.
    text = "ff:pp:F:seq=1:bytes=512:mb=-1:stage=2:group=0:note=a=b:flag"
    assert parse_label(text) == Label("pp", "F", group=0, stage=2, micro_batch=-1, sequence=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ff",
        "ff:",
        "ff:tp",
        "ff:tp:all_gather",
        "ff:tp:all_gather:group=0:stage=0:mb=0",  # no sequence number
        "ff:tp:all_gather:group=x:stage=0:mb=0:seq=0",
        "ff:tp:all_gather:group=:stage=0:mb=0:seq=0",
        "ff:ep:all_gather:group=0:stage=0:mb=0:seq=0",  # no dimension of ours
        "ff:tp::group=0:stage=0:mb=0:seq=0",
        "gg:tp:all_gather:group=0:stage=0:mb=0:seq=0",
        "aten::mm",
        "nccl:all_gather",
        "FSDP::pre_forward",
        "ProfilerStep#3",
    ],
)
def test_foreign_names_are_none(text: str) -> None:
    assert parse_label(text) is None


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    assert parse_label(text) is None or text.startswith("ff:")
