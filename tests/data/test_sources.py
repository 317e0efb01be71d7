"""From [data] to token files: what is made, what is found again, and what is refused before a rank starts."""

from __future__ import annotations

import errno
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fourfold.data.indexed import TokenFile
from fourfold.data.sources import Prepared, prepare_sources
from fourfold.data.stream import Position
from fourfold.data.tokenize import Job, tokenize
from fourfold.data.tokenizers import open_tokenizer
from fourfold.data.writer import TokenFileWriter
from fourfold.recipe import Data, RecipeError, from_table
from tests.data.token_files import write_token_file

TEXT = "the cat sat on the mat, the cat slept. Ünïcode too\n" * 20


def prepare(folder: Path, *, vocab_size: int = 300, seq_len: int = 4, **data: Any) -> Prepared:
    section: Data = from_table({"data": data}).data
    return prepare_sources(section, folder / "run", vocab_size=vocab_size, seq_len=seq_len)


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        prepare(folder, **settings)
    return str(caught.value)


def documents(prefix: Path) -> list[list[int]]:
    file = TokenFile(prefix)
    return [part.tolist() for part in np.split(file.read(0, file.num_tokens), np.cumsum(file.lengths)[:-1])]


def texts_of(prepared: Prepared) -> list[str]:
    """Of byte tokens, all sources."""
    return [bytes(d).decode() for source in prepared.sources for p in source.prefixes for d in documents(p)]


def make_tokens(prefix: Path, texts: list[str], tokenizer: str) -> Path:
    """As `fourfold data tokenize` does: with a sidecar, and the tokenizer beside it."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    made = open_tokenizer(tokenizer, texts)
    made.save(prefix.parent)
    with TokenFileWriter(prefix, made.id, made.vocab_size) as writer:
        writer.write(made.encode_batch(texts))
        writer.finish()
    return prefix


def test_text_becomes_a_token_file_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "first é"), ("empty.txt", "")):
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    (tmp_path / "text" / "photo.jpg").write_bytes(b"abc\xff\xd8")
    prepared = prepare(tmp_path, source=str(tmp_path / "text"))
    (source,) = prepared.sources
    assert (source.name, source.num_documents, source.num_tokens) == ("text", 2, 14)
    assert source.prefixes == (tmp_path / "run" / "tokens" / "train-text",)
    assert texts_of(prepared) == ["first é", "second"]
    assert prepared.vocab_size == 256
    assert prepared.tokenizer_files == ()
    empty, skipped, long = prepared.notes
    assert empty.startswith("text: skipped 1 inputs (empty), such as ")
    assert skipped.startswith("text: skipped 1 inputs (not UTF-8 text), such as ")
    assert "photo.jpg" in skipped
    assert long.startswith("text: 2 of 2 documents are longer than a row of 4 tokens")
    assert f"{source.prefixes[0]}.bin, byte 0" in long


def test_what_is_prepared_can_be_sent_to_a_rank_and_opened_there(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    prepared = prepare(tmp_path, source=str(tmp_path / "x.txt"), seed=5)
    sent = pickle.loads(pickle.dumps(prepared))
    rows = [p.open_stream().rows(Position(), 4, 0, 8) for p in (prepared, sent)]
    for a, b in zip(*rows, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
    whole = TEXT.encode()
    assert all(bytes(row.tokens.astype(np.uint8)) in whole + whole for row in rows[0])


def test_a_run_that_goes_on_finds_its_tokens_whatever_became_of_the_text(tmp_path: Path) -> None:
    source = tmp_path / "x.txt"
    source.write_text(TEXT)
    settings: dict[str, Any] = {"source": str(source), "tokenizer": "bpe:280"}
    before = prepare(tmp_path, **settings)
    files = {file: file.read_bytes() for file in (tmp_path / "run" / "tokens").iterdir()}
    times = {file: file.stat().st_mtime_ns for file in files if file.suffix in (".bin", ".idx")}
    source.unlink()
    assert prepare(tmp_path, **settings) == before
    assert {file: file.read_bytes() for file in (tmp_path / "run" / "tokens").iterdir()} == files
    assert {file: file.stat().st_mtime_ns for file in times} == times


def test_a_run_that_goes_on_refuses_another_text_or_tokenizer_of_the_same_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(TEXT)
    first = str(tmp_path / "a" / "x.txt")
    prepare(tmp_path, source=first)
    assert f'nearest legal: "{first}"' in refused(tmp_path, source=str(tmp_path / "b" / "x.txt"))
    assert 'data.tokenizer = "bpe:280": the run began with another tokenizer' in refused(
        tmp_path, source=first, tokenizer="bpe:280"
    )
    mix = [{"source": first}, {"source": str(tmp_path / "b" / "x.txt"), "name": "new"}]
    assert [source.name for source in prepare(tmp_path, mix=mix).sources] == ["x", "new"]


def test_a_run_that_has_lost_its_tokenizer_does_not_train_another_one(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    settings: dict[str, Any] = {"source": str(tmp_path / "x.txt"), "tokenizer": "bpe:280"}
    prepare(tmp_path, **settings)
    (tmp_path / "run" / "tokens" / "tokenizer.json").unlink()
    assert "holds tokens of this run, but not their tokenizer" in refused(tmp_path, **settings)


def test_damage_to_the_tokens_of_a_run_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    settings: dict[str, Any] = {"source": str(tmp_path / "x.txt"), "verify": False}
    (source,) = prepare(tmp_path, **settings).sources
    binary = Path(f"{source.prefixes[0]}.bin")
    content = bytearray(binary.read_bytes())
    content[10] ^= 1
    binary.write_bytes(content)
    assert f"{binary}, byte 0" in refused(tmp_path, **settings)
    binary.write_bytes(content[:-2])
    assert f"{binary}, byte {len(content) - 2:,}: the file ends here" in refused(tmp_path, **settings)
    binary.unlink()
    assert f"{binary}, byte 0: the file is missing" in refused(tmp_path, **settings)


def test_a_death_while_tokenizing_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    settings: dict[str, Any] = {"source": str(tmp_path / "x.txt"), "tokenizer": "bpe:280"}
    with monkeypatch.context() as patch:
        patch.setattr(TokenFileWriter, "finish", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path, **settings)
    left = {file.name for file in (tmp_path / "run" / "tokens").iterdir()}
    assert left == {"tokenizer.json", "texts.json"}
    assert prepare(tmp_path, **settings).sources[0].num_tokens > 0


def test_bpe_learns_from_all_texts_that_are_trained_on_and_from_no_validation_set(tmp_path: Path) -> None:
    for name, text in (("a", "xyxyxyxy " * 50), ("b", "pqpqpqpq " * 50), ("held", "mnmnmnmn " * 50)):
        (tmp_path / f"{name}.txt").write_text(text)
    prepared = prepare(
        tmp_path,
        mix=[{"source": str(tmp_path / f"{name}.txt")} for name in ("a", "b")],
        validation=[{"name": "held", "source": str(tmp_path / "held.txt")}],
        tokenizer="bpe:280",
    )
    assert prepared.vocab_size is not None
    assert 256 < prepared.vocab_size <= 280
    (file,) = prepared.tokenizer_files
    vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    assert {"xy", "pq"} <= vocabulary.keys()
    assert "mn" not in vocabulary
    assert [tokens.name for tokens in prepared.validation] == ["held"]
    (held,) = prepared.open_validation()
    ids = held.read(0, held.num_tokens).tokens.tolist()
    assert Tokenizer.from_file(str(file)).decode(ids) == "mnmnmnmn " * 50


def test_a_tokenizer_from_a_file_is_kept_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("red green red blue")
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "red": 1, "green": 7}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = tmp_path / "words.json"
    tokenizer.save(str(file))
    settings: dict[str, Any] = {"source": str(tmp_path / "x.txt"), "tokenizer": str(file)}
    prepared = prepare(tmp_path, **settings)
    assert documents(prepared.sources[0].prefixes[0]) == [[1, 7, 1, 0]]
    assert prepared.vocab_size == 8  # ids may have gaps: the model needs room for the largest
    assert prepared.tokenizer_files[0].read_bytes() == file.read_bytes()
    assert "model.vocab_size = 7: " in refused(tmp_path / "other", vocab_size=7, **settings)
    file.unlink()
    assert prepare(tmp_path, **settings) == prepared


def test_a_tokenizer_in_the_folder_of_a_run_does_not_pass_for_another(tmp_path: Path) -> None:
    tokens = str(write_token_file(tmp_path / "other", [[1, 2, 3, 4]]))
    (tmp_path / "x.txt").write_text("red green")
    for number, name in enumerate(("first", "second")):
        tokenizer = Tokenizer(models.WordLevel({"?": 0, "red": 1 + number, "green": 3 + number}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / f"{name}.json"))
    prepare(tmp_path, seq_len=2, source=tokens, tokenizer=str(tmp_path / "first.json"))
    mix = [{"source": tokens}, {"source": str(tmp_path / "x.txt")}]
    second = prepare(tmp_path, seq_len=2, mix=mix, tokenizer=str(tmp_path / "second.json"))
    assert documents(second.sources[1].prefixes[0]) == [[2, 4]]
    assert second.tokenizer_files[0].read_bytes() == (tmp_path / "second.json").read_bytes()


def test_unigram_entropy_is_that_of_the_mixture(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa")
    (tmp_path / "b.txt").write_text("bbcc" * 10)
    mix = [{"source": str(tmp_path / "a.txt"), "weight": 1}, {"source": str(tmp_path / "b.txt"), "weight": 3}]
    # a in 1/4 of the tokens, b and c in 3/8 each: not the shares in the files.
    assert prepare(tmp_path, mix=mix).unigram_entropy == pytest.approx(math.log(4) / 4 + 0.75 * math.log(8 / 3))


def test_token_files_of_other_tools(tmp_path: Path) -> None:
    shards = [write_token_file(tmp_path / "set" / name, [[1, 2, 3], [4, 5]]) for name in ("b", "a")]
    for source in (tmp_path / "set", shards[1], f"{shards[1]}.bin", f"{shards[1]}.idx"):
        prepared = prepare(tmp_path, source=str(source))
        (tokens,) = prepared.sources
        assert tokens.prefixes == (tuple(sorted(shards)) if source == tmp_path / "set" else (shards[1],))
        assert (prepared.vocab_size, prepared.tokenizer_files) == (None, ())
        assert prepared.notes == ()
    assert tokens.name == "a"
    dotted = write_token_file(tmp_path / "v1.2", [[1, 2, 3, 4]])
    assert {prepare(tmp_path, source=f"{dotted}{end}").sources[0].name for end in ("", ".idx")} == {"v1.2"}
    assert prepare(tmp_path, source=str(shards[0]), verify=False).unigram_entropy is None


def test_what_was_checked_is_not_read_again_until_it_changes(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "tokens", [[1, 2, 3, 4, 5], [6]])
    read: list[str] = []

    def look(**settings: Any) -> Prepared:
        read.clear()
        section: Data = from_table({"data": {"source": str(prefix)}}).data
        run, told = tmp_path / "run", lambda name, done, total: read.append(name)
        return prepare_sources(section, run, **{"vocab_size": 300, "seq_len": 4, "progress": told, **settings})

    first = look()
    assert read
    again = look()
    assert not read
    assert (again.notes, again.unigram_entropy) == (first.notes, first.unigram_entropy)
    assert again.notes
    with pytest.raises(RecipeError, match="token 4, in document 0, is 5"):
        look(vocab_size=5)
    os.utime(prefix.with_suffix(".bin"))
    look()
    assert read


def test_faults_of_token_files_are_all_named_by_file_and_byte(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_token_file(folder / "a", [[1, 2], [3, 300]])
    write_token_file(folder / "b", [[1], [-1, 5]])
    text = refused(tmp_path, source=str(folder))
    assert f"{folder / 'a.bin'}, byte 12: token 3, in document 1, is 300" in text
    assert f"{folder / 'b.bin'}, byte 4: token 1, in document 1, is -1" in text
    (folder / "a.bin").write_bytes(b"1234567")
    (folder / "b.idx").unlink()
    text = refused(tmp_path, source=str(folder), verify=False)
    assert f"{folder / 'a.bin'}, byte 7: the file ends here" in text
    assert f"{folder / 'b.idx'}, byte 0: the file is missing" in text


def test_a_token_file_that_is_gone_is_missed_by_its_sidecar(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_tokens(tmp_path / "set" / name, [TEXT], "bpe:280")
    (tmp_path / "set" / "other.json").write_text("{}")
    assert prepare(tmp_path, source=str(tmp_path / "set")).sources[0].num_documents == 2
    for suffix in (".bin", ".idx"):
        (tmp_path / "set" / "b").with_suffix(suffix).unlink()
    assert f"{tmp_path / 'set' / 'b.idx'}, byte 0: the file is missing" in refused(
        tmp_path, source=str(tmp_path / "set")
    )


def test_a_folder_without_its_first_token_file_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    tokenize(Job((str(tmp_path / "x.txt"),), "bpe:280", tmp_path / "out", workers=1))
    (tmp_path / "out" / "tokens-000000.idx").unlink()
    (tmp_path / "out" / "tokens-000000.bin").unlink()
    assert "1 of its 1 token files are not finished" in refused(tmp_path, source=str(tmp_path / "out"))
    assert not (tmp_path / "run").exists()


def test_token_files_bring_their_tokenizer(tmp_path: Path) -> None:
    prefix = make_tokens(tmp_path / "set" / "x", [TEXT], "bpe:280")
    for tokenizer in ({}, {"tokenizer": "bpe:280"}, {"tokenizer": str(tmp_path / "set" / "tokenizer.json")}):
        prepared = prepare(tmp_path, source=str(prefix), **tokenizer)
        assert prepared.vocab_size == 280
        assert prepared.tokenizer_files[0].read_bytes() == (tmp_path / "set" / "tokenizer.json").read_bytes()
    # Also for text beside them, by any of its names.
    (tmp_path / "x.txt").write_text(TEXT)
    for number, tokenizer in enumerate(({}, {"tokenizer": str(tmp_path / "set" / "tokenizer.json")})):
        mix = [{"source": str(prefix)}, {"source": str(tmp_path / "x.txt"), "name": "text"}]
        prepared = prepare(tmp_path / str(number), mix=mix, **tokenizer)
        assert documents(prepared.sources[0].prefixes[0]) == documents(prepared.sources[1].prefixes[0])


def test_two_tokenizers_are_refused(tmp_path: Path) -> None:
    one, other = (
        make_tokens(tmp_path / "one" / "x", [TEXT], "bpe:280"),
        make_tokens(tmp_path / "o" / "y", [TEXT], "bytes"),
    )
    assert f'{other}.bin was made by "bytes", but {one}.bin by "bpe:280"' in refused(
        tmp_path, mix=[{"source": str(one)}, {"source": str(other)}]
    )
    text = refused(tmp_path, source=str(one), tokenizer="bytes")
    assert f'data.tokenizer = "bytes": is not what made {one}.bin: that is "bpe:280"' in text
    assert f'nearest legal: "{tmp_path / "one" / "tokenizer.json"}"' in text
    assert "is trained on text" in refused(tmp_path, source=str(one), tokenizer="bpe:400", vocab_size=400)
    (tmp_path / "x.txt").write_text(TEXT)
    mixed = [
        {"source": str(tmp_path / "x.txt"), "name": "text"},
        {"source": str(write_token_file(tmp_path / "z", [[1]]))},
    ]
    assert "data.tokenizer: must be given" in refused(tmp_path, mix=mixed)
    assert "is not what made" in refused(tmp_path, mix=[mixed[0], {"source": str(one)}], tokenizer="bytes")
    assert not (tmp_path / "run" / "tokens" / "train-text.idx").exists()


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, source="nowhere").startswith('data.source = "nowhere": must be')
    (tmp_path / "empty").mkdir()
    assert "must hold text" in refused(tmp_path, source=str(tmp_path / "empty"))
    (tmp_path / "photo.jpg").write_bytes(b"abc\xff\xd8")
    assert "photo.jpg is not UTF-8" in refused(tmp_path, source=str(tmp_path / "photo.jpg"))
    (tmp_path / "table.jsonl.gz").write_bytes(b"")
    text = refused(tmp_path, source=str(tmp_path / "table.jsonl.gz"))
    assert "holds texts, but is none: make token files of it by `fourfold data tokenize`" in text
    (tmp_path / "good.txt").write_text("good")
    bad = [{"source": str(tmp_path / "good.txt")}, {"source": "nowhere"}]
    assert refused(tmp_path, mix=bad).startswith('data.mix[1].source = "nowhere"')
    held = [{"name": "held", "source": "nowhere"}]
    text = refused(tmp_path, source=str(tmp_path / "good.txt"), validation=held)
    assert text.startswith('data.validation[0].source = "nowhere"')
    assert not (tmp_path / "run").exists()


def test_bad_tokenizers_are_refused_and_no_text_is_read_for_one_too_large(tmp_path: Path) -> None:
    source = str(tmp_path / "x.txt")
    (tmp_path / "x.txt").write_text("some text")
    assert refused(tmp_path, source=source, tokenizer="gone.json").startswith('data.tokenizer = "gone.json": must be')
    assert "is neither a tokenizer.json nor" in refused(tmp_path, source=source, tokenizer=source)
    deaf = tmp_path / "deaf.json"
    Tokenizer(models.BPE({"z": 0}, [])).save(str(deaf))
    assert (
        refused(tmp_path, source=source, tokenizer=str(deaf))
        == f'data.tokenizer = "{deaf}": finds no token in the text'
    )
    text = refused(tmp_path / "other", source="nowhere", tokenizer="bpe:512", vocab_size=260)
    assert text == (
        'model.vocab_size = 260: data.tokenizer = "bpe:512" has 512 entries; must be at least as many; '
        "nearest legal: 512"
    )


def test_a_text_shorter_than_a_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("sixteen letters.")
    source = str(tmp_path / "x.txt")
    assert refused(tmp_path, source=source, seq_len=17) == (
        f'batch.seq_len = 17: data.source = "{source}" has 16 tokens, which fill no row; must be at most that many; '
        "nearest legal: 16"
    )
    assert prepare(tmp_path, source=source, seq_len=16).row_length == 16


def test_names_must_differ(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(TEXT)
    mix = [{"source": str(tmp_path / folder / "x.txt")} for folder in ("a", "b")]
    assert "give it a name of its own: data.mix[1].name" in refused(tmp_path, mix=mix)
    assert [s.name for s in prepare(tmp_path, mix=[mix[0], mix[1] | {"name": "a/x"}]).sources] == ["x", "a/x"]


def test_weights_that_cannot_be_kept_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    mix = [{"source": "nowhere", "weight": 0.333333333}, {"source": "gone", "weight": 0.6666666667}]
    assert refused(tmp_path, mix=mix).startswith("data.mix = [0.333333333, 0.6666666667]: weights repeat after")


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text(TEXT)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TokenFileWriter, "write", full)
    tokens = tmp_path / "run" / "tokens"
    text = refused(tmp_path, source=str(tmp_path / "x.txt"))
    assert text == f"output.dir: cannot be written to: {tokens}: No space left on device"
    assert [file.name for file in tokens.iterdir()] == ["texts.json"]


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, fourfold.data.sources; print([m for m in ('torch', 'tokenizers', 'tiktoken') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
