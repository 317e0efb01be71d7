"""Figure 12: at which bandwidth keys and values are gathered."""

from __future__ import annotations

from fourfold.simulator.figures import attention
from fourfold.simulator.figures.attention import CPS
from fourfold.simulator.figures.figure import Figure, Panel, Series

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
        for mask, words in (("causal", "causal mask"), ("documents", "document mask, mean 1K"))
    )
    off = attention.median_difference(*panels)
    return Figure(
        number="12",
        title="Achieved bandwidth of the all-gather",
        panels=panels,
        assumptions=ASSUMPTIONS,
        differences=(
            f"Half of the values are less than {off:.1f} % off. With cp 4 ours are up to 16 % high at 16K and 16 % "
            "low at 4K: that latency grows by the same for every hop is a simplification, and the gathers measured "
            "under the two masks, which move the same bytes, differ by up to 7 % themselves.",
            "From 4K to 8K bandwidth hardly grows, and falls with cp 4, though messages double: ours does, too, for "
            "the change of protocol.",
        ),
    )
