"""What tables of measured runs say in words, as numbers: software, chips, sharding, recomputation, networks.

Sources word these freely. Each function looks for what the word must contain, most specific first, and has a fallback
that holds for most training runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fourfold.planner.jobs import Order, Precision, Recompute


@dataclass(frozen=True, slots=True)
class Framework:
    """A family of training software."""

    pattern: str  # somewhere in the name
    stack: str  # the planner's constants for it
    saved_set: str  # what it keeps in memory
    until: int = 9999  # last year of which this holds
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    flash: bool = True  # attention is fused where the table does not say
    fused_norms: bool = True  # likewise: a kernel each
    compiled: bool = False
    padded: bool = False  # the vocabulary, to a multiple of 128 tp
    sequence_parallel: bool = False  # with tp > 1, where the table does not say
    zero: int = 1  # where the table does not say
    network: float | None = None  # bytes/s of a node, where the table does not say and it is not that of the chip


FRAMEWORKS = (
    Framework(r"megatron-?deepspeed|gpt-neox|bloom", "megatron-deepspeed", "megatron-2021", flash=False, padded=True),
    Framework(r"megatron-?lm|megascale|mt-nlg", "megatron-2021", "megatron-2021", until=2022, gradient_bytes=2,
              reduce_bytes=2, flash=False, padded=True),
    Framework(r"^meta\b", "meta", "meta", padded=True, sequence_parallel=True),
    Framework(r"aleph|aa-scaling", "megatron-flash", "aleph-alpha", gradient_bytes=2, reduce_bytes=2,
              fused_norms=False, network=25e9),
    Framework(r"intern(lm|evo)|zero.?bubble|colossal|megascale", "megatron-flash", "megatron", padded=True),
    Framework(r"mlperf|nemo(?!.*automodel)|megatron-bridge", "megatron", "megatron", gradient_bytes=2,
              reduce_bytes=2, padded=True, sequence_parallel=True),
    Framework(r"megatron|primus|transformer.?engine", "megatron", "megatron", padded=True, sequence_parallel=True),
    Framework(r"llm-foundry|composer|mosaic|fms-fsdp|fsdp1|pytorch fsdp\b", "llm-foundry", "fsdp", reduce_bytes=2,
              zero=3),
    Framework(r"torchtitan|fsdp2|torchao|automodel|olmo", "torchtitan", "torchtitan-2024", until=2024,
              sequence_parallel=True, zero=3),
    Framework(r"torchtitan|fsdp2|torchao|automodel|olmo", "torchtitan", "torchtitan", sequence_parallel=True,
              zero=3),
    Framework(r"maxtext|pax|jax|xla", "jax", "jax", reduce_bytes=2, compiled=True, zero=3),
    Framework(r"deepspeed", "deepspeed", "fsdp", until=2022, gradient_bytes=2, reduce_bytes=2, flash=False, zero=3),
    Framework(r"deepspeed|mics", "deepspeed", "fsdp", reduce_bytes=2, zero=3),
    Framework(r"", "standard", "standard"),
)  # fmt: skip
"""First match wins; the last matches all. Where NeMo's gradients are summed in float32 its tables do not say; its
recipes sum them in bfloat16. Aleph Alpha's sheets do not state their network: runs with many bytes of data-parallel
traffic take as long as one NIC of 200 Gb/s per node would make them."""

CHIPS = (
    (r"v100", "v100-32"),
    (r"[ah](100|800).*pci", None),
    (r"h100 ?nvl|h20\b|a10g?\b", None),
    (r"a(100|800).{0,12}\b40 ?g", "a100-40"),
    (r"a(100|800)", "a100-80"),
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"gh200|h200", "h200"),
    (r"h[18]00.*(hbm2e|96 ?gi?b|2\.4 ?tb|500 ?w|variant not stated)", "h100-hbm2e"),  # Meta's, who leave it out, too
    (r"h[18]00", "h100"),
    (r"b300", "b300"),
    (r"b200|blackwell", "b200"),
    (r"mi300", "mi300x"),
    (r"mi355", "mi355x"),
    (r"v5p", "v5p"),
)
"""Words for chips and the planner's names; None for those that it has no numbers of."""


def framework(name: str, *, year: int | None = None) -> Framework:
    """The family that software belongs to, in that year."""
    return next(f for f in FRAMEWORKS if re.search(f.pattern, name.lower()) and (year or 9999) <= f.until)


def saved_set(software: Framework, *, chip: str) -> str:
    """What a run keeps in memory. TorchTitan's on Meta's H100 are older than the documentation that prints them."""
    return "torchtitan-2024" if software.saved_set == "torchtitan" and chip == "h100-hbm2e" else software.saved_set


def chip(gpu: str) -> str | None:
    """The planner's name of a GPU, or None."""
    return next((name for pattern, name in CHIPS if re.search(pattern, gpu.lower())), None)


def vocabulary(model: str) -> int:
    """Size of the vocabulary that a model of this name has; else GPT-2's, as Megatron pads it."""
    known = ((r"llama[- ]?3", 128_256), (r"qwen", 151_936), (r"llama|mistral|mixtral", 32_000), (r"nemotron", 256_000))
    return next((size for pattern, size in known if re.search(pattern, model.lower())), 51_200)


def precision(words: str, *, year: int | None = None) -> Precision | None:
    """Numbers that matrices are multiplied in: the narrowest that is named. None if no name is known."""
    words = words.lower()
    if not words:
        return Precision.FP16 if (year or 9999) < 2022 else Precision.BF16
    known = (
        (r"fp4", Precision.FP4),
        (r"mxfp8", Precision.MXFP8),
        (r"fp8|float8|e4m3", Precision.FP8),
        (r"bf16|bfloat16", Precision.BF16),
        (r"fp16|float16|half", Precision.FP16),
        (r"fp32|tf32|float32", Precision.FP32),
    )
    return next((precision for pattern, precision in known if re.search(pattern, words)), None)


def sharding(words: str, *, ranks: int, node: int, default: int = 0) -> tuple[int, int]:
    """(ZeRO stage, ranks that share one copy) from a sharding's name, on `ranks` = dp cp and nodes of `node` GPUs.

    "FSDP 128 x DP 4" shards over 128, "(intra-node)" and a bare "HSDP" over the node. `default`: the stage where
    the table says nothing.
    """
    words = words.lower()
    if not words:
        return default, ranks
    hybrid = "hsdp" in words or "hybrid" in words
    if re.search(r"grad_op|zero[-_ ]?(stage[- ]?)?2", words):
        stage = 2
    elif hybrid or re.search(r"fsdp|zero[-_ ]?(stage[- ]?)?3|full.?shard|mics", words):
        stage = 3
    elif re.search(r"zero[-_ ]?(stage[- ]?)?1|dist-?opt|distributed opt", words):
        stage = 1
    else:
        return 0, ranks
    # Digits of the stage, of FSDP2, of precisions and of the replicas count no ranks that share.
    rest = re.sub(r"zero[-_ ]?(?:stage[- ]?)?\d|fsdp\d|[bf][pf]?(?:loat)?(?:16|32)|x\s*dp\s*\d+|\bdp\s*\d+", "", words)
    size = re.search(r"\d+", rest)
    if size:
        shards = int(size[0])
    elif hybrid or re.search(r"intra-?node|in(?:side)? (?:a |the )?node", words):
        shards = node
    else:
        shards = ranks
    return stage, max(1, min(shards, ranks))


def recompute(words: str) -> tuple[Recompute, float]:
    """(what is computed again, in which share of the layers). Nothing where the table says nothing."""
    words = words.lower()
    if not words or re.match(r"(none|no|not|n/a|without|unknown|off|0|0\.0|false|disabled|-)\b|-$", words):
        return Recompute.NONE, 1.0
    share = re.search(r"(\d+)\s*(?:of|/)\s*(\d+)", words)
    every = re.search(r"every (\d+)|every (other|second)", words)
    if share and int(share[2]):
        return Recompute.FULL, min(1.0, int(share[1]) / int(share[2]))
    if every:
        return Recompute.FULL, 1 / int(every[1] or 2)
    if re.search(r"full|all|block|^(activation |gradient )?checkpoint|^(on|yes|true|1|1\.0)$", words):
        return Recompute.FULL, 1.0
    if re.search(r"qkv|except_mlp|out_proj", words):
        return Recompute.FEED_FORWARD, 1.0
    if re.search(r"per-op|op-level|sac\b", words):
        return Recompute.MATMULS, 1.0
    if re.search(r"select|attention|norm|act|dot|minimal|core", words):
        return Recompute.SELECTIVE, 1.0
    return Recompute.NONE, 1.0


def fused_attention(words: str, *, default: bool) -> bool:
    """Whether scores stay out of memory. Megatron's fused softmax keeps them: "fused" alone means that kernel."""
    words = words.lower()
    if re.search(r"unfused|no flash|fused softmax|^fused$|^torch$|naive|eager|data parallel", words):
        return False
    return default or bool(re.search(r"flash|fused|cudnn|sdpa|ring|te\b", words))


def fused_norms(words: str, *, default: bool) -> bool:
    """Whether each norm is one kernel, from what the table says of attention's."""
    return default or bool(re.search(r"fused (rms|layer)?norm", words.lower()))


def order(words: str, *, pp: int, v: int) -> Order:
    """The kind of a pipeline's schedule."""
    words = words.lower()
    if re.search(r"zero.?bubble|zb|v-half|v-min", words):
        return Order.ZB_H1
    if "flexible" in words and pp > 1:
        return Order.FLEXIBLE
    if re.search(r"afab|gpipe|all.?f", words):
        return Order.AFAB
    return Order.INTERLEAVED if v > 1 else Order.ONE_F_ONE_B


def overlaps_tp(words: str) -> bool:
    """Whether flags say that collectives of tensor parallelism run under matrix products."""
    words = words.lower()
    if re.search(r"tp[-_ ]comm[-_ ]overlap ?(off|= ?false)|no async ?tp", words):
        return False
    return bool(re.search(r"tp[-_ ]comm[-_ ]overlap|async ?tp|userbuffers", words))


_RATE = r"(\d+(?:\.\d+)?)\s*([GT])(b/s|bps|bit/s|B/s|\b)"  # 400 Gb/s, 400 Gbps, 50 GB/s, 200G: bits but for a capital B


def network(words: str, *, gpus_per_node: int) -> float | None:
    """Bytes/s one-way per GPU between nodes; None if the words give no rate."""
    # "8x 400 Gb/s", "8x ConnectX-7 400 Gb/s"
    nics = re.search(r"(\d+)\s*[x\u00d7]\s*(?:[A-Za-z][\w-]*\s+){0,3}" + _RATE, words)
    if nics:
        return int(nics[1]) * _bytes_per_second(*nics.groups()[1:]) / gpus_per_node
    rate = re.search(_RATE, words)
    if not rate:
        return None
    return _bytes_per_second(*rate.groups()) / (1 if "per gpu" in words.lower() else gpus_per_node)


def _bytes_per_second(number: str, scale: str, unit: str) -> float:
    return float(number) * {"G": 1e9, "T": 1e12}[scale] / (1 if unit == "B/s" else 8)


def oversubscription(words: str) -> float:
    """How many times less bandwidth there is beyond the network's lowest tier, written 7:1 or 1:7."""
    ratio = re.search(r"\b(\d+):(\d+)\b", words)
    return max(int(ratio[1]), int(ratio[2])) / min(int(ratio[1]), int(ratio[2])) if ratio else 1.0


def links(words: str) -> float | None:
    """Bytes/s one-way per GPU inside a node; None if the words give no rate. Vendors print both ways together."""
    rate = re.search(r"(\d+(?:\.\d+)?)\s*(gb/s|tb/s) bidir", words.lower())
    return float(rate[1]) * (1e12 if rate[2] == "tb/s" else 1e9) / 2 if rate else None


def memory(notes: str, *, framework: str) -> tuple[float, Literal["allocated", "reserved"]]:
    """(bytes of a unit, "allocated" or "reserved") of peak memory.

    Most numbers come from the allocator's own counters: GiB, whatever they are called, of what it reserved. MLPerf's
    logs have what was allocated.
    """
    words = notes.lower()
    unit = 1e9 if re.search(r"10\^9|1e9|decimal gb|memory in gb\b", words) else 2.0**30
    return unit, "allocated" if "allocated" in words or "mlperf" in framework.lower() else "reserved"
