"""Text tokenized for a run, once: into ``RUN/tokens``, where a resumed run finds it as it was.

    tokens/tokenizer.json      the tokenizer (or tokenizer.model), none for bytes
    tokens/texts.json          which text and which tokenizer, so that a change of either is noticed
    tokens/LABEL.bin .idx .json  a token file per text

A run that goes on reads no text: it trains on what it began with, even if the text has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import msgspec

from fourfold.data.documents import InputError, Skips, batches, read_texts
from fourfold.data.entries import Entry
from fourfold.data.tokenizers import Tokenizer, TokenizerError, entries_of, open_tokenizer
from fourfold.data.writer import PARTIAL, TokenFileWriter, write_atomically
from fourfold.recipe import Problem, RecipeError

RECORD = "texts.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # either one


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of texts.json."""

    version: int = 1
    tokenizer: str
    """As the recipe names it."""
    texts: dict[str, str]
    """Source by label."""


def tokenize_texts(
    texts: Sequence[Entry],
    tokenizer_name: str,
    folder: Path,
    *,
    vocab_size: int,
    file: Path | None = None,
    approve: Callable[[Tokenizer], None] = lambda _: None,
) -> Tokenizer:
    """Makes the token files of all texts that are not there yet, and returns the tokenizer.

    Args:
        texts: entries that are text, with labels that differ.
        tokenizer_name: as in the recipe; "bpe:N" learns from all texts together that are trained on, and from no
            validation set.
        folder: made if it is missing. A token file in it is whole or absent, whenever this is interrupted.
        vocab_size: of the model, which the tokenizer must not exceed.
        file: where the tokenizer of this name is kept; None: the name says all.
        approve: raises RecipeError if the tokenizer will not do, before anything is written.

    Raises:
        RecipeError: a text or tokenizer that is not there, cannot be used, or is not the one the run began with.
    """
    record = _read_record(folder)
    if record is not None:
        _check_unchanged(record, texts, tokenizer_name)
    check_vocabulary(entries_of(tokenizer_name), tokenizer_name, vocab_size)  # before one is trained for nothing
    missing = [text for text in texts if not (folder / f"{text.label}.idx").exists()]
    for text in missing:  # the first document of each, lest something be written when one has none
        next(_read(text, Skips()))
    kept = file
    if record is not None:  # without one, a tokenizer in the folder is not known to be the one of this name
        kept = next((folder / name for name in TOKENIZER_FILES if (folder / name).exists()), file)
    if kept is None and record is not None and tokenizer_name != "bytes":
        rule = f"holds tokens of this run, but not their tokenizer ({' or '.join(TOKENIZER_FILES)})"
        raise RecipeError([Problem("output.dir", str(folder), rule)])
    with tokenizer_problems(tokenizer_name):
        if kept is not None:
            tokenizer = open_tokenizer(str(kept), called=tokenizer_name)
        else:
            learned_from = chain.from_iterable(_read(text, Skips()) for text in missing if text.trained_on)
            tokenizer = open_tokenizer(tokenizer_name, learned_from)
    check_vocabulary(tokenizer.vocab_size, tokenizer_name, vocab_size)
    approve(tokenizer)
    with writing_problems(folder):
        save_tokenizer(tokenizer, folder)
        sources = (record.texts if record is not None else {}) | {text.label: text.source for text in texts}
        new_record = Record(tokenizer=tokenizer_name, texts=sources)
        write_atomically(folder / RECORD, msgspec.json.format(msgspec.json.encode(new_record)))
        for left in folder.glob(f"*{PARTIAL}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        for text in missing:
            _write(folder / text.label, text, tokenizer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Keeps a tokenizer's files, and no other's, in the folder of a run's tokens; RecipeError if the disk refuses."""
    with writing_problems(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in {*TOKENIZER_FILES, "tokenizer_config.json"} - tokenizer.files.keys():
            (folder / name).unlink(missing_ok=True)
        tokenizer.save(folder)


@contextmanager
def tokenizer_problems(name: str) -> Generator[None]:
    """Turns what is wrong with ``data.tokenizer`` into a RecipeError."""
    try:
        yield
    except TokenizerError as error:
        raise RecipeError([Problem("data.tokenizer", name, error.rule, error.nearest)]) from None


@contextmanager
def writing_problems(folder: Path) -> Generator[None]:
    """Turns what the disk refuses into a RecipeError."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written to: {error.filename or folder}: {error.strerror}"
        raise RecipeError([Problem("output.dir", None, rule)]) from None


def _read_record(folder: Path) -> Record | None:
    path = folder / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RecipeError([Problem("output.dir", str(folder), f"{path} cannot be used: {error}")]) from None


def _check_unchanged(record: Record, texts: Sequence[Entry], tokenizer_name: str) -> None:
    problems = []
    if tokenizer_name != record.tokenizer:
        rule = "the run began with another tokenizer, and its tokens would mean something else"
        problems.append(Problem("data.tokenizer", tokenizer_name, rule, (record.tokenizer,)))
    for text in texts:
        before = record.texts.get(text.label, text.source)
        if before != text.source:
            rule = "the run has another source under this name; give the new one another name"
            problems.append(Problem(text.key, text.source, rule, (before,)))
    if problems:
        raise RecipeError(problems)


def check_vocabulary(num_entries: int, tokenizer_name: str, vocab_size: int) -> None:
    """Raises RecipeError if the model has no entry for some token of a tokenizer with ``num_entries``."""
    if num_entries > vocab_size:
        rule = f'data.tokenizer = "{tokenizer_name}" has {num_entries} entries; must be at least as many'
        raise RecipeError([Problem("model.vocab_size", vocab_size, rule, (num_entries,))])


def _read(text: Entry, skips: Skips) -> Iterator[str]:
    try:
        yield from read_texts(text.source, skips)
    except InputError as error:
        rule = error.rule if error.where == text.source else str(error)
        raise RecipeError([Problem(text.key, text.source, rule)]) from None


def _write(prefix: Path, text: Entry, tokenizer: Tokenizer) -> None:
    skips, num_bytes = Skips(), 0
    with TokenFileWriter(prefix, tokenizer.id, tokenizer.vocab_size) as writer:
        for documents in batches(_read(text, skips)):
            with tokenizer_problems(tokenizer.name):
                encoded = tokenizer.encode_batch(documents)
            writer.write([ids for ids in encoded if len(ids)])
            num_bytes += sum(len(document.encode()) for document in documents)
        if not writer.num_tokens:
            raise RecipeError([Problem("data.tokenizer", tokenizer.name, "finds no token in the text")])
        writer.finish(input_bytes=num_bytes, skipped=skips.found())
