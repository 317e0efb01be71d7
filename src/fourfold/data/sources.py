"""From the recipe's [data] to token files that every rank can open: found, tokenized, checked, before a rank starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fourfold.data.check import CheckReport, check_files, open_prefixes
from fourfold.data.entries import Entry, find_entries
from fourfold.data.findings import Findings, looked_at, read_findings, write_findings
from fourfold.data.fingerprint import compare, fingerprint
from fourfold.data.indexed import TokenFile
from fourfold.data.mixture import Mixture
from fourfold.data.shards import missing_files
from fourfold.data.sidecar import Skipped, read_sidecar
from fourfold.data.source import TokenSource
from fourfold.data.stream import Stream
from fourfold.data.vocabulary import settle_tokenizer
from fourfold.recipe import Data, Problem, RecipeError

__all__ = ["Prepared", "TokenSet", "compare", "prepare_sources"]


@dataclass(frozen=True)
class TokenSet:
    """The token files of one source.

    Attributes:
        name: of the source.
        prefixes: of its files, in order.
        num_documents, num_tokens: in all of them.
    """

    name: str
    prefixes: tuple[Path, ...]
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class Prepared:
    """What ranks need in order to read their tokens: paths and numbers, so that it can be sent to them.

    Attributes:
        sources: what is trained on, by weight.
        weights: of the sources.
        validation: the sets of ``data.validation``, in order.
        vocab_size: of the tokenizer; None if it is not known which tokenizer made the token files.
        tokenizer_files: what a model needs beside it to be used; none for bytes, or if they are not known.
        unigram_entropy: nats per token of a model that knows how frequent each token is in the mixture and nothing
            else: what learning must beat. None if not all files were read through.
        notes: sentences for the person who starts the run.
        fingerprint: JSON for checkpoints; :func:`compare` says what has changed since.
    """

    data: Data
    row_length: int
    model_vocab_size: int
    sources: tuple[TokenSet, ...]
    weights: tuple[float, ...]
    validation: tuple[TokenSet, ...]
    vocab_size: int | None
    tokenizer_files: tuple[Path, ...]
    unigram_entropy: float | None
    notes: tuple[str, ...]
    fingerprint: Mapping[str, Any]

    def open_stream(self) -> Stream:
        """The stream of the mixture; every rank opens its own."""
        sources = [self._open(tokens) for tokens in self.sources]
        return Stream(sources, self.weights, chunk=self.row_length, seed=self.data.seed, skip=self.data.skip)

    def open_validation(self) -> list[TokenSource]:
        """The validation sets, in order."""
        return [self._open(tokens) for tokens in self.validation]

    def _open(self, tokens: TokenSet) -> TokenSource:
        return TokenSource(tokens.name, tokens.prefixes, vocab_size=self.model_vocab_size)


def prepare_sources(
    data: Data,
    folder: Path,
    *,
    vocab_size: int,
    seq_len: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Prepared:
    """Finds, tokenizes and checks all sources and validation sets. Run by one process before there are ranks.

    Args:
        data: the recipe's section.
        folder: of the run. Text is tokenized into ``folder/tokens``, where a run that goes on finds it.
        vocab_size: of the model.
        seq_len: the longest row of the recipe, over all its phases.
        progress: is told which source is read through, its bytes read, and its bytes in all.

    Raises:
        RecipeError: by key; what is wrong with a token file also by file and byte.
    """
    training, validation = find_entries(data)
    entries = [*training, *validation]
    weights = tuple(source.weight for source in data.mix) or (1.0,)
    Mixture(weights)  # refuses weights that it cannot keep
    _check_finished(entries)
    tokenizer = settle_tokenizer(data.tokenizer, entries, folder / "tokens", vocab_size=vocab_size)
    files = {entry: _open(entry, folder / "tokens") for entry in entries}
    for entry in training:
        _check_length(entry, files[entry], seq_len)
    found = _look(data, folder / "tokens", files, weights, vocab_size, seq_len, progress)
    return Prepared(
        data=data,
        row_length=seq_len,
        model_vocab_size=vocab_size,
        sources=tuple(_token_set(entry, files[entry]) for entry in training),
        weights=weights,
        validation=tuple(_token_set(entry, files[entry]) for entry in validation),
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        tokenizer_files=tuple((folder / "tokens" / name).absolute() for name in tokenizer.files) if tokenizer else (),
        unigram_entropy=found.unigram_entropy,
        notes=found.notes,
        fingerprint=fingerprint(
            {entry.name: files[entry] for entry in training}, weights, row_length=seq_len, seed=data.seed
        ),
    )


def _look(
    data: Data,
    tokens: Path,
    files: Mapping[Entry, Sequence[TokenFile]],
    weights: tuple[float, ...],
    vocab_size: int,
    seq_len: int,
    progress: Callable[[str, int, int], None],
) -> Findings:
    """Reads all tokens through, unless an earlier start of this run has, and they have not changed since."""
    looked = {entry: its_files for entry, its_files in files.items() if data.verify or entry.is_text}
    found = Findings(
        files=looked_at(file for its_files in looked.values() for file in its_files),
        weights=weights,
        vocab_size=vocab_size,
        row_length=seq_len,
        unigram_entropy=None,
        notes=(),
    )
    before = read_findings(tokens)
    if before is not None and before.same_input(found):
        return before
    reports = {
        entry: check_files(its_files, vocab_size, seq_len, partial(progress, entry.name))
        for entry, its_files in looked.items()
    }
    _refuse(reports)
    training = [reports.get(entry) for entry in files][: len(weights)]
    found = msgspec.structs.replace(
        found,
        unigram_entropy=_entropy(training, weights),
        notes=(*_skipped(files), *_long(reports, seq_len)),
    )
    write_findings(tokens, found)
    return found


def _open(entry: Entry, tokens: Path) -> list[TokenFile]:
    files, problems = open_prefixes(entry.prefixes or (tokens / entry.label,))
    if problems:
        raise RecipeError([Problem(entry.key, entry.source, str(error)) for error in problems])
    return files


def _check_finished(entries: Sequence[Entry]) -> None:
    """Refuses folders of token files that are not all there. Without any, what is beside them would pass for text."""
    problems = [
        Problem(entry.key, entry.source, str(error))
        for entry in entries
        for error in missing_files(Path(entry.source), entry.prefixes)
    ]
    if problems:
        raise RecipeError(problems)


def _check_length(entry: Entry, files: Sequence[TokenFile], seq_len: int) -> None:
    tokens = sum(file.num_tokens for file in files)
    if tokens < seq_len:
        rule = f'{entry.key} = "{entry.source}" has {tokens:,} tokens, which fill no row; must be at most that many'
        raise RecipeError([Problem("batch.seq_len", seq_len, rule, (tokens,) if tokens else ())])


def _refuse(reports: Mapping[Entry, CheckReport]) -> None:
    problems = [
        Problem(entry.key, entry.source, str(error)) for entry, report in reports.items() for error in report.problems
    ]
    if problems:
        raise RecipeError(problems)


def _token_set(entry: Entry, files: Sequence[TokenFile]) -> TokenSet:
    return TokenSet(
        name=entry.name,
        prefixes=tuple(file.prefix.absolute() for file in files),
        num_documents=sum(file.num_documents for file in files),
        num_tokens=sum(file.num_tokens for file in files),
    )


def _entropy(reports: Sequence[CheckReport | None], weights: Sequence[float]) -> float | None:
    """Of the distribution of a token of the mixture."""
    share = 0.0
    for report, weight in zip(reports, weights, strict=True):
        if report is None or report.counts is None:
            return None
        share = share + weight / sum(weights) * report.counts / report.num_tokens
    share = np.asarray(share)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def _skipped(files: Mapping[Entry, Sequence[TokenFile]]) -> list[str]:
    """Input from which no document came, by the sidecars."""
    notes = []
    for entry, its_files in files.items():
        for file in its_files:
            sidecar = read_sidecar(file.prefix)
            for skipped in sidecar.skipped if sidecar else ():
                notes.append(f"{entry.name}: skipped {_inputs(skipped)}")
    return notes


def _inputs(skipped: Skipped) -> str:
    return f"{skipped.count:,} inputs ({skipped.reason}), such as {skipped.first}"


def _long(reports: Mapping[Entry, CheckReport], seq_len: int) -> list[str]:
    notes = []
    for entry, report in reports.items():
        first, longest = report.first_long, report.longest
        if first is not None and longest is not None:
            notes.append(
                f"{entry.name}: {report.num_long:,} of {report.num_documents:,} documents are longer than a row of "
                f"{seq_len:,} tokens and are cut: the first at {first.path}, byte {first.offset:,}, "
                f"the longest of {longest.length:,} tokens"
            )
    return notes
