"""Which tokenizer a run has: that of the recipe, or of the token files it trains on, and never two at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.data.entries import Entry
from fourfold.data.indexed import TokenFileError
from fourfold.data.run_tokens import check_vocabulary, save_tokenizer, tokenize_texts, tokenizer_problems
from fourfold.data.sidecar import TokenizerId, read_sidecar
from fourfold.data.tokenizers import Tokenizer, open_tokenizer
from fourfold.recipe import Problem, RecipeError


def settle_tokenizer(name: str | None, entries: Sequence[Entry], folder: Path, *, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a run, saved in ``folder``, and the texts among the entries tokenized with it.

    Args:
        name: ``data.tokenizer``.
        entries: sources and validation sets.
        folder: of the run's tokens.
        vocab_size: of the model.

    Returns:
        None if all entries are token files whose tokenizer is not at hand: nothing needs it.

    Raises:
        RecipeError: the tokenizer cannot be used, is larger than the model, or is not what made the token files.
    """
    maker = _find_maker(entries)
    texts = [entry for entry in entries if entry.is_text]
    if maker is not None:
        check_vocabulary(maker.vocab_size, maker.id.name, vocab_size)
    if name is None:
        if not texts and (maker is None or not maker.is_at_hand):
            return None
        name = _implied(maker, entries, texts)
    file = maker.file if maker is not None and name == maker.id.name else None
    if file is None and name.startswith("bpe:") and not any(text.trained_on for text in texts):
        rule = "is trained on text, but the sources are token files; give the path of the tokenizer that made them"
        raise RecipeError([Problem("data.tokenizer", name, rule)])

    def approve(tokenizer: Tokenizer) -> None:
        if maker is not None:
            maker.approve(tokenizer)

    if texts:
        return tokenize_texts(texts, name, folder, vocab_size=vocab_size, file=file, approve=approve)
    with tokenizer_problems(name):
        tokenizer = open_tokenizer(name) if file is None else open_tokenizer(str(file), called=name)
    check_vocabulary(tokenizer.vocab_size, name, vocab_size)
    approve(tokenizer)
    save_tokenizer(tokenizer, folder)
    return tokenizer


@dataclass(frozen=True)
class _Maker:
    """What made some token files, by the sidecar of the first one, ``prefix``."""

    id: TokenizerId
    vocab_size: int
    prefix: Path

    @property
    def file(self) -> Path | None:
        """Its copy beside the token files, if it is there."""
        path = self.prefix.with_name(self.id.file) if self.id.file else None
        return path if path is not None and path.is_file() else None

    @property
    def is_at_hand(self) -> bool:
        return self.id.file is None or self.file is not None

    def approve(self, tokenizer: Tokenizer) -> None:
        """Refuses another one."""
        if _identity(tokenizer.id) != _identity(self.id):
            rule = f'is not what made {self.prefix}.bin: that is "{self.id.name}"'
            raise RecipeError([Problem("data.tokenizer", tokenizer.name, rule, (str(self.file),) if self.file else ())])


def _find_maker(entries: Sequence[Entry]) -> _Maker | None:
    """Of all token files that have a sidecar: RecipeError if they do not agree."""
    maker: _Maker | None = None
    for entry in entries:
        for prefix in entry.prefixes:
            try:
                sidecar = read_sidecar(prefix)
            except TokenFileError as error:
                raise RecipeError([Problem(entry.key, entry.source, str(error))]) from None
            if sidecar is None:
                continue
            if maker is None:
                maker = _Maker(sidecar.tokenizer, sidecar.vocab_size, prefix)
            elif _identity(sidecar.tokenizer) != _identity(maker.id):
                rule = (
                    f'{prefix}.bin was made by "{sidecar.tokenizer.name}", but {maker.prefix}.bin by "{maker.id.name}"'
                )
                raise RecipeError([Problem(entry.key, entry.source, rule)])
    return maker


def _identity(tokenizer: TokenizerId) -> str:
    """The same for the same ids: names are only names."""
    return tokenizer.sha256 or tokenizer.name


def _implied(maker: _Maker | None, entries: Sequence[Entry], texts: Sequence[Entry]) -> str:
    """What no recipe has to say."""
    if maker is not None:
        return maker.id.name
    if len(texts) < len(entries):
        rule = f'must be given: {texts[0].key} = "{texts[0].source}" is text, and token files do not say what made them'
        raise RecipeError([Problem("data.tokenizer", None, rule)])
    return "bytes"
