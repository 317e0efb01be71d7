"""Figure 12: at which bandwidth keys and values are gathered."""

from __future__ import annotations

from fourfold.simulator.figures import attention
from fourfold.simulator.figures.attention import CPS, MASKS, named
from fourfold.simulator.figures.cp_attention import LINK
from fourfold.simulator.figures.figure import Difference, Figure, Panel, Point, Series, union

ASSUMPTIONS = (
    "Not printed: K and V of one head, 256 bytes each per token (405B with tp 8), are gathered one after the other.",
    "Not printed: bandwidth is what arrives at a GPU, the (cp - 1) / cp of K and V that others hold, over the time of "
    "both gathers. Were all of K and V meant, two GPUs would have used half as much of a link as four.",
    "NCCL takes its protocol for small messages (LL) at 4K and that for large ones (Simple) from 8K on: so its tuning "
    "table of 2023 says for an H100 node. LL takes the time that the table says, Simple twice the latency in the table "
    "(16.8 us, and 6.8 us per hop): that factor is the one number that is read off this figure.",
    "NVLink reaches 370 GB/s (facts.md 4.2), and a GPU handles all of the result at that rate, its own part among it.",
    "The mask makes no difference to a gather.",
)


def figure() -> Figure:
    """The figure, a panel per mask."""
    panels = tuple(
        Panel(
            title=f"Bandwidth of the gather, {words}",
            unit="GB/s",
            x="tokens",
            series=tuple(
                Series(f"cp {cp}", attention.published("12", cp=cp, mask=mask), attention.bandwidth(cp=cp))
                for cp in CPS
            ),
            reading_error=attention.READING_GB_S,
            kind="lines",
        )
        for mask, words in MASKS.items()
    )
    return Figure(
        number="12",
        title="Achieved bandwidth of the all-gather",
        panels=panels,
        assumptions=ASSUMPTIONS,
        differences=_differences(panels),
    )


def _differences(panels: tuple[Panel, ...]) -> tuple[Difference, ...]:
    beyond = union(panel.beyond() for panel in panels)
    measured = _within_the_other_mask(panels)
    own = union(panel.beyond(series=["cp 2"], labels=["64K", "128K"]) for panel in panels) - measured
    rest = beyond - own - measured
    low, high = (
        frozenset(point for point in rest if (point.label in ("4K", "8K")) == is_low) for is_low in (True, False)
    )
    return (
        Difference(
            f"Half of the values are less than {attention.median_difference(*panels):.1f} % off. {named(measured)}: "
            "gathers under the two masks move the same bytes, and their published values differ by up to 7 %; ours is "
            "within the reading error of that under the other mask.",
            measured,
        ),
        Difference(
            f"{named(own)}: a GPU handles its own part of the result at the link's rate here, so that no more than "
            f"{LINK / 2e9:.0f} GB/s can come out of two GPUs, where 191 and 197 are published: it takes less.",
            own,
        ),
        Difference(
            f"{named(low)}: ours are 8 to 16 % low. NCCL's table has a hop take 0.6 us for small messages, and we have "
            "all others take 6.8 us; with cp 2, one hop, the same constants agree within 5 %, so it is the two further "
            "hops that are too slow here. From 4K to 8K bandwidth falls, though messages double: ours does, too, for "
            "the change of protocol.",
            low,
            explained=False,
        ),
        Difference(
            f"{named(high)}: ours are 3 to 16 % high. A higher latency per hop would mend these, and make 8K worse.",
            high,
            explained=False,
        ),
    )


def _within_the_other_mask(panels: tuple[Panel, ...]) -> frozenset[Point]:
    """Points beyond the reading error, of which the same gather under the other mask is not."""
    return union(
        frozenset(
            point
            for point in panel.beyond()
            if Point(other.title, point.series, point.label) not in other.beyond()
        )
        for panel, other in (panels, panels[::-1])
    )  # fmt: skip
