"""The shape of a Llama 3 model: its hyper-parameters, the known models, and Hugging Face's config.json. No torch.

Everything that must know how large the model is (planner, simulator, model, checkpoints) asks this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_LLAMA3_VOCAB = 128_256  # 128,000 ranks + 256 special tokens
_HF_MAX_POSITIONS = 8_192
_HF_MAX_POSITIONS_SCALED = 131_072


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1 frequency scaling, for a context longer than the one the model was first trained on.

    A rotary wave length is 2 pi theta^(2i/head_dim) tokens. Wave lengths below original_max_positions /
    high_freq_factor are left alone, those above original_max_positions / low_freq_factor are stretched by factor,
    those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8_192

    def __post_init__(self) -> None:
        if min(self.factor, self.low_freq_factor, self.original_max_positions) <= 0:
            raise ValueError(f"{self}: all values must be positive")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor = {self.high_freq_factor}: "
                f"must be larger than low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a Llama 3 text model. Raises ValueError naming every value that is not legal."""

    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads (grouped-query attention)."""
    ffn_dim: int
    """Width of the feed-forward network (w1, w3: dim -> ffn_dim; w2 back)."""
    vocab_size: int
    """Token ids that mean something; see padded_vocab."""
    head_dim: int = 0
    """Size of one head; 0 = dim // num_heads. After construction it is never 0."""
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    """True: the output projection is the embedding matrix."""
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this, with zero rows. It belongs to the model, so that no shape
    depends on the layout."""

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: rotary embedding needs an even head_dim")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and the head as stored: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. A head_dim that was dim // num_heads follows a change of either, unless
        given."""
        if self.head_dim * self.num_heads == self.dim:
            changes.setdefault("head_dim", 0)
        return dataclasses.replace(self, **changes)


def _problems(config: ModelConfig) -> list[str]:
    counts = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "vocab_multiple")
    problems = [f"{name} = {getattr(config, name)}: must be at least 1" for name in counts if getattr(config, name) < 1]
    if config.head_dim < 0:
        problems.append(f"head_dim = {config.head_dim}: must be at least 2, or 0 for dim / num_heads")
    if config.rope_theta <= 0 or config.norm_eps < 0:
        problems.append(f"rope_theta = {config.rope_theta}, norm_eps = {config.norm_eps}: must be positive")
    if problems:
        return problems
    if config.head_dim == 0 and config.dim % config.num_heads:
        problems.append(f"num_heads = {config.num_heads}: must divide dim = {config.dim} when head_dim is not given")
    if config.num_heads % config.num_kv_heads:
        divisors = [d for d in range(1, config.num_heads + 1) if config.num_heads % d == 0]
        lower = max(d for d in divisors if d < max(config.num_kv_heads, 2))
        higher = min((d for d in divisors if d > config.num_kv_heads), default=config.num_heads)
        problems.append(
            f"num_kv_heads = {config.num_kv_heads}: must divide num_heads = {config.num_heads}; "
            f"nearest legal: {', '.join(str(d) for d in sorted({lower, higher}))}"
        )
    return problems


PRESETS: Mapping[str, ModelConfig] = {
    "llama3-8b": ModelConfig(4096, 32, 32, 8, 14_336, _LLAMA3_VOCAB),
    "llama3-70b": ModelConfig(8192, 80, 64, 8, 28_672, _LLAMA3_VOCAB),
    # The 405B model exists only as 3.1, hence the scaled frequencies.
    "llama3-405b": ModelConfig(16_384, 126, 128, 8, 53_248, _LLAMA3_VOCAB, rope_scaling=RopeScaling(8.0)),
    "llama3.2-1b": ModelConfig(2048, 16, 32, 8, 8192, _LLAMA3_VOCAB, rope_scaling=RopeScaling(32.0), tied=True),
    "llama3.2-3b": ModelConfig(3072, 28, 24, 8, 8192, _LLAMA3_VOCAB, rope_scaling=RopeScaling(32.0), tied=True),
    # Models that train on a laptop. 260 = 256 bytes + 4 special tokens; 512 also fits the small trained BPE.
    "small": ModelConfig(256, 8, 8, 4, 768, 512),
    "tiny": ModelConfig(64, 8, 4, 2, 128, 260, vocab_multiple=16),
}


def preset(name: str) -> ModelConfig:
    """The named model. Raises ValueError with the known names."""
    if name not in PRESETS:
        raise ValueError(f"preset = {name!r}: unknown model; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of the whole model, as stored (padded vocabulary), in forward order.

    A tied model has no entry output.weight. Rows are outputs, columns inputs: a projection is x @ w.T.
    """
    attention_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (config.padded_vocab, config.dim)}
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (attention_dim, config.dim),
            f"layers.{layer}.attention.wk.weight": (kv_dim, config.dim),
            f"layers.{layer}.attention.wv.weight": (kv_dim, config.dim),
            f"layers.{layer}.attention.wo.weight": (config.dim, attention_dim),
            f"layers.{layer}.feed_forward.w1.weight": (config.ffn_dim, config.dim),
            f"layers.{layer}.feed_forward.w3.weight": (config.ffn_dim, config.dim),
            f"layers.{layer}.feed_forward.w2.weight": (config.dim, config.ffn_dim),
            f"layers.{layer}.attention_norm.weight": (config.dim,),
            f"layers.{layer}.ffn_norm.weight": (config.dim,),
        }
    shapes["norm.weight"] = (config.dim,)
    if not config.tied:
        shapes["output.weight"] = (config.padded_vocab, config.dim)
    return shapes


def config_to_hf(
    config: ModelConfig,
    *,
    max_positions: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The contents of config.json for this model, in the form of transformers 5 (rope_parameters).

    max_positions (tokens) is only a hint to readers; default 8,192, or 131,072 with scaled frequencies. dtype is a
    torch name.
    """
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": max_positions or (_HF_MAX_POSITIONS_SCALED if scaling else _HF_MAX_POSITIONS),
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "dtype": dtype,
    }


def config_from_hf(values: Mapping[str, Any], *, vocab_multiple: int = 128) -> ModelConfig:
    """ModelConfig from the contents of a config.json, new (rope_parameters) or old (rope_theta and rope_scaling) form.

    Raises ValueError when the file is not a Llama, or has something this model cannot do (biases, another activation
    or RoPE kind).
    """
    wanted = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    refused = [
        f"{key} = {values[key]!r}: only {value!r}" for key, value in wanted.items() if values.get(key, value) != value
    ]
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    refused += [f"{key}: missing" for key in needed if key not in values]
    if refused:
        raise ValueError(f"config.json is not one of a Llama that can be read here: {'; '.join(refused)}")
    rope = values.get("rope_parameters") or {}
    scaling = rope or values.get("rope_scaling") or {}
    return ModelConfig(
        dim=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        ffn_dim=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        head_dim=values.get("head_dim") or 0,
        # 10,000 and 1e-6 are what transformers assumes for a file that does not say.
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling_from_hf(scaling),
        norm_eps=values.get("rms_norm_eps", 1e-6),
        tied=bool(values.get("tie_word_embeddings", False)),
        vocab_multiple=vocab_multiple,
    )


def _rope_scaling_from_hf(values: Mapping[str, Any]) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type = {kind!r} in config.json: only 'default' and 'llama3' can be read here")
    return RopeScaling(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_positions=values["original_max_position_embeddings"],
    )
