"""Tokenizers behind one interface: bytes, Hugging Face's tokenizer.json, Meta's rank file, or BPE trained on the spot.

Text is text: what looks like a special token in a document, ``<|end_of_text|>`` say, is encoded letter by letter, so
that nothing in the data can end a document or open a turn of a dialogue. Nothing is cut, filled up or added, either.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fourfold.data.sidecar import TokenizerId
from fourfold.data.writer import write_atomically

if TYPE_CHECKING:
    import tokenizers

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")  # of a document, where no file says which it is

# Llama 3's rank file holds neither its split pattern nor its special tokens; llama-models has them in Python.
LLAMA3_RANKS = 128_000
LLAMA3_SPECIALS = 256
LLAMA3_NAMED = (
    *("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id"),
    *("step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image"),
)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Meta hands tiktoken at most so many characters, with no longer run of space or of anything else, lest it overflow.
LLAMA3_PIECE, LLAMA3_RUN = 400_000, 25_000
RUN = re.compile(r"\s+|\S+")


class TokenizerError(ValueError):
    """A tokenizer that is not there or cannot be used: its name, and what is wrong with it."""

    def __init__(self, name: str, rule: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(name, rule, nearest)
        self.name, self.rule, self.nearest = name, rule, nearest

    def __str__(self) -> str:
        tail = f"; for example: {', '.join(self.nearest)}" if self.nearest else ""
        return f'tokenizer "{self.name}": {self.rule}{tail}'


class Tokenizer(ABC):
    """From texts to token ids.

    Attributes:
        name: as it was asked for.
        vocab_size: larger than every id.
        eos: the id that ends a document, None if the tokenizer has none.
        files: what it is kept in, content by name, its own file first; none for bytes.
    """

    def __init__(self, name: str, vocab_size: int, eos: int | None, files: Mapping[str, bytes]) -> None:
        self.name, self.vocab_size, self.eos, self.files = name, vocab_size, eos, dict(files)

    @property
    def file(self) -> str | None:
        """The name that `save` gives its own file; None for bytes."""
        return next(iter(self.files), None)

    @property
    def sha256(self) -> str | None:
        """Of its own file; None for bytes."""
        return hashlib.sha256(self.files[self.file]).hexdigest() if self.file else None

    @property
    def id(self) -> TokenizerId:
        """Which tokenizer this is, for a sidecar."""
        return TokenizerId(name=self.name, sha256=self.sha256, file=self.file)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text: integer arrays [n]."""

    def save(self, folder: Path) -> None:
        """Writes its files, bit for bit those that it came from; `open_tokenizer` reads them."""
        for name, data in self.files.items():
            write_atomically(folder / name, data)


class ByteTokenizer(Tokenizer):
    """A token per byte of UTF-8."""

    def __init__(self) -> None:
        super().__init__("bytes", 256, None, {})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, by the library that defines the format. It uses all cores unless TOKENIZERS_PARALLELISM=false.

    Args:
        name: see `Tokenizer`.
        files: tokenizer.json and perhaps tokenizer_config.json, which names the token that ends a document.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        tokenizer = _load_json(name, files["tokenizer.json"])
        # A file may ask for these; see the top of this file.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        vocabulary = tokenizer.get_vocab()
        if not vocabulary:
            raise TokenizerError(name, "has no entries")
        # The ids of a file may have gaps: what counts is the largest.
        super().__init__(name, max(vocabulary.values()) + 1, _find_eos(vocabulary, files), files)
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=np.int32) for item in encoded]


class RankTokenizer(Tokenizer):
    """Meta's Llama 3 tokenizer, from its tiktoken rank file ``tokenizer.model``. It runs on one core."""

    def __init__(self, name: str, data: bytes) -> None:
        _need("tiktoken", name)
        import tiktoken

        ranks = _parse_ranks(name, data)
        num_reserved = LLAMA3_SPECIALS - len(LLAMA3_NAMED)
        specials = (*LLAMA3_NAMED, *(f"reserved_special_token_{2 + i}" for i in range(num_reserved)))
        ids = {f"<|{special}|>": len(ranks) + i for i, special in enumerate(specials)}
        self._encoding = tiktoken.Encoding(
            name="llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=ids
        )
        super().__init__(name, self._encoding.n_vocab, ids["<|end_of_text|>"], {"tokenizer.model": data})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        pieces = [text] if len(text) <= LLAMA3_RUN else cut_as_meta(text)
        # Into an array directly: making lists of ids and arrays of those would cost a sixth more.
        ids = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)


def open_tokenizer(name: str, training_texts: Iterable[str] = (), *, called: str | None = None) -> Tokenizer:
    """The tokenizer of a name: "bytes", "bpe:N", or the path of a tokenizer.json or of Llama 3's tokenizer.model.

    Args:
        name: which.
        training_texts: what "bpe:N" is trained on; not touched for others.
        called: the name that it is to bear, where it was asked for under another one than that of the file it is in.

    Raises:
        TokenizerError: there is none of that name, or it cannot be used.
    """
    kind, _, size = name.partition(":")
    if name == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return JsonTokenizer(name, {"tokenizer.json": _train_bpe(name, size, training_texts)})
    path = Path(name)
    if not path.is_file():
        rule = 'must be "bytes", "bpe:N", or the path of a tokenizer.json or of Llama 3\'s tokenizer.model'
        raise TokenizerError(name, rule, ("bytes", "bpe:512"))
    try:
        data = path.read_bytes()
        beside = path.with_name("tokenizer_config.json")
        files = {"tokenizer.json": data} | ({beside.name: beside.read_bytes()} if beside.is_file() else {})
    except OSError as error:
        raise TokenizerError(name, f"cannot be read: {error.strerror}") from None
    # By content, for rank files have all sorts of names.
    return JsonTokenizer(called or name, files) if data.lstrip()[:1] == b"{" else RankTokenizer(called or name, data)


def entries_of(name: str) -> int:
    """How many entries a tokenizer has, as far as its name says; 0 if it does not."""
    kind, _, size = name.partition(":")
    return 256 if kind == "bytes" else int(size) if kind == "bpe" and size.isdigit() else 0


def cut_as_meta(text: str, piece_length: int = LLAMA3_PIECE, run_length: int = LLAMA3_RUN) -> list[str]:
    """The pieces in which Meta encodes a text. A cut changes the tokens next to it, so it has to be the same one."""
    pieces = []
    for start in range(0, len(text), piece_length):
        piece = text[start : start + piece_length]
        cuts = [0]
        if _may_have_long_run(piece, run_length):
            for run in RUN.finditer(piece):
                cuts += range(run.start() + run_length, run.end(), run_length)
        pieces += [piece[a:b] for a, b in zip(cuts, [*cuts[1:], None], strict=True)]
    return pieces


def _may_have_long_run(piece: str, run_length: int) -> bool:
    """Looks at few places: a longer run covers two neighbours of those that are half a run apart."""
    half = run_length // 2
    runs = ((place, RUN.match(piece, place)) for place in range(0, len(piece), half))
    return any(run is not None and run.end() >= place + half for place, run in runs)


def _need(package: str, name: str) -> None:
    if find_spec(package) is None:
        rule = f'needs the package "{package}", which is not installed: pip install {package}'
        raise TokenizerError(name, rule)


def _load_json(name: str, data: bytes) -> tokenizers.Tokenizer:
    _need("tokenizers", name)
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(name, f"is not a tokenizer.json: {error}") from None


def _find_eos(vocabulary: Mapping[str, int], files: Mapping[str, bytes]) -> int | None:
    """What tokenizer_config.json says, else the first of the usual names that the vocabulary has."""
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        said = config.get("eos_token") if isinstance(config, dict) else None
    except ValueError:
        said = None
    said = said.get("content") if isinstance(said, dict) else said
    names = (said, *END_NAMES) if isinstance(said, str) else END_NAMES
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def _train_bpe(name: str, size: str, texts: Iterable[str]) -> bytes:
    """A byte-level BPE of `size` entries, or fewer if the text has no more pairs to merge; the content of its file."""
    if not size.isdigit() or int(size) <= 256:
        raise TokenizerError(name, "bpe:N needs N > 256 entries: every byte is one", ("bpe:512",))
    _need("tokenizers", name)
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=int(size), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


def _parse_ranks(name: str, data: bytes) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            rule = (
                f"is neither a tokenizer.json nor a tiktoken rank file: line {number} is no token in base64 and a rank"
            )
            raise TokenizerError(name, rule) from None
    if len(ranks) != LLAMA3_RANKS or set(ranks.values()) != set(range(LLAMA3_RANKS)):
        # A rank file does not say how text is split, and the wrong way makes wrong tokens without a sign.
        rule = f"has {len(ranks):,} ranks, and of rank files only Llama 3's is known, which has {LLAMA3_RANKS:,}"
        raise TokenizerError(name, f"{rule}; take its tokenizer.json instead")
    return ranks
