"""Tokenizing: the same files whatever the workers and wherever it is stopped; nothing mixed; everything counted."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from fourfold.data import shards
from fourfold.data.check import open_files
from fourfold.data.documents import InputError, find_files
from fourfold.data.indexed import TokenFile, find_token_files
from fourfold.data.shards import plan_shards
from fourfold.data.sidecar import read_sidecar
from fourfold.data.sources import prepare_sources
from fourfold.data.tokenize import Job, tokenize
from fourfold.data.tokenizers import TokenizerError, open_tokenizer
from fourfold.data.workers import WorkerError
from fourfold.recipe import Data, RecipeError


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few KB of input make several files. Only the parent plans; its workers are told."""
    monkeypatch.setattr(shards, "SMALLEST", 1000)
    monkeypatch.setattr(shards, "FILES", 8)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Text, JSON lines plain and packed, 30 documents of differing lengths, and what is to be skipped."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    lines = [json.dumps({"text": f"line {i} " + "word " * (i * 7 % 90)}) + "\n" for i in range(20)]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:6]).encode(), mtime=0))
    for i in range(4):
        (folder / "deep" / f"{i}.txt").write_text(f"Fußnote {i}\n" * (50 * i + 1))
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    (folder / "empty.txt").touch()
    return folder


def documents_in(folder: Path) -> list[list[int]]:
    documents = []
    for file in map(TokenFile, find_token_files(folder)):
        places = zip(map(file.document_start, range(file.num_documents)), file.lengths.tolist(), strict=True)
        documents += [file.read(start, length).tolist() for start, length in places]
    return documents


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def texts_of(corpus: Path) -> list[str]:
    lines = [json.loads(line)["text"] for line in (corpus / "a.jsonl").read_text().splitlines()]
    return [*lines, *lines[:6], *((corpus / "deep" / f"{i}.txt").read_text() for i in range(4))]


def test_the_same_files_for_any_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    heard = []
    totals = tokenize(Job((str(corpus),), "bpe:300", tmp_path / "one", workers=1), heard.append)
    assert tokenize(Job((str(corpus),), "bpe:300", tmp_path / "three", workers=3)) == totals
    assert content(tmp_path / "one") == content(tmp_path / "three")
    # By the library alone, a document at a time.
    texts = texts_of(corpus)
    library = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    wanted = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert documents_in(tmp_path / "one") == wanted
    assert (totals.documents, totals.tokens) == (30, sum(map(len, wanted)))
    assert totals.input_bytes == sum(len(text.encode()) for text in texts)
    assert totals.files == totals.made == len(find_token_files(tmp_path / "one")) > 3
    assert {skip.reason: (skip.count, skip.first) for skip in totals.skipped} == {
        "empty": (1, str(corpus / "empty.txt")),
        "not UTF-8 text": (1, str(corpus / "photo.jpg")),
    }
    assert [now.done for now in heard] == sorted(now.done for now in heard)
    assert heard[-1].done == heard[-1].total == sum(f.size for f in find_files([str(corpus)]))
    assert (heard[-1].documents, heard[-1].tokens) == (30, totals.tokens)


def test_the_end_of_document_token(corpus: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bpe:300", texts_of(corpus))
    library = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    library.add_special_tokens([AddedToken("</s>")])
    library.save(str(tmp_path / "tokenizer.json"))
    job = Job((str(corpus / "a.jsonl"),), str(tmp_path / "tokenizer.json"), tmp_path / "out", append_eos=True)
    totals = tokenize(job)
    eos = library.token_to_id("</s>")
    assert totals.vocab_size == eos + 1
    assert all(document[-1] == eos and eos not in document[:-1] for document in documents_in(tmp_path / "out"))
    # What was made with it is not gone on with without it, and some tokenizers have none.
    with pytest.raises(InputError, match=f"eos was {eos} for the files that are there, and is None now"):
        tokenize(Job(job.inputs, job.tokenizer, job.out))
    with pytest.raises(TokenizerError, match="has no end-of-document token"):
        tokenize(Job(job.inputs, "bytes", tmp_path / "bytes", append_eos=True))


MARK = "TOKENIZED_BY_A_TEST_INTO"
STOPPED_EARLY = """
import os, sys, time
from pathlib import Path
from fourfold.data import shards
from fourfold.data.tokenize import Job, tokenize

shards.SMALLEST, shards.FILES = 1000, 8
corpus, out, number = sys.argv[1:]
def watch(now):
    # While the parent is in here, no worker gets a second shard: one or two are finished, however the cores are shared.
    while not list(Path(out).glob("*.idx")):
        time.sleep(0.01)
    os.kill(os.getpid(), int(number))
tokenize(Job((corpus,), "bpe:300", Path(out), workers=2), watch)
"""


def stopped_by(number: int, corpus: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), MARK: str(out)}
    command = [sys.executable, "-c", STOPPED_EARLY, str(corpus), str(out), str(number)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_after_kill_9_only_what_is_missing_is_made_and_all_is_as_it_would_have_been(
    corpus: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    tokenize(Job((str(corpus),), "bpe:300", whole, workers=1))
    assert stopped_by(signal.SIGKILL, corpus, out).returncode == -signal.SIGKILL
    until = time.monotonic() + 20
    while live := processes_of(out):  # the workers find that their parent is gone
        assert time.monotonic() < until, live
        time.sleep(0.05)
    finished = [prefix for prefix in find_token_files(out) if shards.finished(prefix)]
    assert 1 <= len(finished) <= 2 < len(find_token_files(whole))
    (unfinished,) = shards.missing_files(out, find_token_files(out))
    left, number = map(int, re.findall(r"\d+", unfinished.rule))
    assert 0 < left <= number - len(finished)
    with pytest.raises(RecipeError, match=rf"{left} of its {number} token files are not finished"):
        prepare_sources(Data(source=str(out)), tmp_path, vocab_size=300, seq_len=8)
    _, problems = open_files([str(out)])
    assert unfinished.rule in [problem.rule for problem in problems]
    (out / "tokens-000007.bin.123.partial").write_bytes(b"left by a run that was killed")
    before = {prefix: prefix.with_suffix(".bin").stat().st_mtime_ns for prefix in finished}
    totals = tokenize(Job((str(corpus),), "bpe:300", out, workers=2))
    assert content(out) == content(whole)
    assert totals.made == totals.files - len(finished)
    assert shards.missing_files(out, find_token_files(out)) == []
    assert {prefix: prefix.with_suffix(".bin").stat().st_mtime_ns for prefix in finished} == before
    # And once more: there is nothing left to do. But a shard that lost its end is made anew.
    assert tokenize(Job((str(corpus),), "bpe:300", out)).made == 0
    (out / "tokens-000001.bin").write_bytes(b"12")
    assert tokenize(Job((str(corpus),), "bpe:300", out)).made == 1
    assert content(out) == content(whole)


def processes_of(out: Path) -> list[str]:
    """Those that stopped_by has started and that still live, by what is in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [file.parent.name] if f"{MARK}={out}".encode() in file.read_bytes() else []
    return found


def test_ctrl_c_leaves_finished_files_only(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "KeyboardInterrupt" in stopped_by(signal.SIGINT, corpus, out).stderr
    assert not list(out.glob("*.partial"))
    assert all(shards.finished(prefix) for prefix in find_token_files(out))
    assert tokenize(Job((str(corpus),), "bpe:300", out)).documents == 30


def test_half_a_pair_is_cleared_away_and_made_anew(corpus: Path, tmp_path: Path) -> None:
    """As it is left by a worker that is stopped between the names of the .bin and of the .idx."""
    job = Job((str(corpus),), "bytes", tmp_path / "out")
    tokenize(job)
    whole = content(job.out)
    (job.out / "tokens-000001.idx").unlink()
    with shards.locked(job.out):
        assert content(job.out).keys() == {name for name in whole if not name.startswith("tokens-000001")}
    assert tokenize(job).made == 1
    assert content(job.out) == whole


def changed(job: Job) -> str:
    with pytest.raises(InputError) as caught:
        tokenize(job)
    return str(caught.value)


def test_what_has_changed_is_not_mixed_with_what_was(corpus: Path, tmp_path: Path) -> None:
    job = Job((str(corpus),), "bpe:300", tmp_path / "out")
    tokenize(job)
    kept = content(job.out)
    file = corpus / "deep" / "1.txt"
    old, times = file.read_bytes(), file.stat()
    since = f"since {job.out / 'tokenize.json'} was written; choose another --out"
    file.write_bytes(old[:-1] + b"!")
    assert changed(job) == f"{file}: has changed {since}"
    file.write_bytes(old)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (corpus / "new").write_text("text")
    assert changed(job) == f"{corpus / 'new'}: is new {since}"
    (corpus / "new").unlink()
    (corpus / "photo.jpg").rename(tmp_path / "photo.jpg")
    assert changed(job) == f"{corpus / 'photo.jpg'}: is gone {since}"
    (tmp_path / "photo.jpg").rename(corpus / "photo.jpg")
    assert "tokenizer was bpe:300 (sha256 " in changed(Job(job.inputs, "bytes", job.out))
    assert "field was 'text' for" in changed(Job(job.inputs, job.tokenizer, job.out, field="body"))
    assert tokenize(job).made == 0
    assert content(job.out) == kept
    # Under another path, it is still the same tokenizer.
    assert tokenize(Job(job.inputs, str(job.out / "tokenizer.json"), job.out)).made == 0
    (job.out / "tokenizer.json").write_bytes(kept["tokenizer.json"] + b"\n")
    assert "is not the tokenizer that" in changed(job)
    (job.out / "tokenize.json").unlink()
    assert "holds token files, but no tokenize.json" in changed(job)


def test_a_file_that_changes_meanwhile(corpus: Path, tmp_path: Path) -> None:
    def meddle(now: object) -> None:
        (corpus / "deep" / "0.txt").write_text("other")

    with pytest.raises(InputError, match="has changed since"):
        tokenize(Job((str(corpus),), "bytes", tmp_path / "out"), meddle)


def test_a_worker_that_is_killed(corpus: Path, tmp_path: Path) -> None:
    def kill(now: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(WorkerError, match=r"ended from outside \(exit code -9\)"):
        tokenize(Job((str(corpus),), "bytes", tmp_path / "out", workers=2), kill)
    assert not list((tmp_path / "out").glob("*.partial"))
    assert tokenize(Job((str(corpus),), "bytes", tmp_path / "out")).documents == 30


def test_bad_lines(corpus: Path, tmp_path: Path) -> None:
    with (corpus / "a.jsonl").open("a") as file:
        file.write('{"text": 7}\n')
    job = Job((str(corpus),), "bytes", tmp_path / "out")
    assert changed(job).startswith(f"{corpus / 'a.jsonl'}, line 21: Expected `str`, got `int`")
    assert not list(job.out.glob("*.partial"))
    totals = tokenize(Job(job.inputs, "bytes", tmp_path / "skipped", skip_bad=True))
    assert totals.documents == 30
    assert [skip.first for skip in totals.skipped if skip.reason == "not readable"] == [
        f"{corpus / 'a.jsonl'}, line 21"
    ]


@pytest.mark.parametrize("inputs", [("empty.txt",), ("nothing",)])
def test_input_without_text(corpus: Path, tmp_path: Path, inputs: tuple[str, ...]) -> None:
    (corpus / "nothing").mkdir()
    out = tmp_path / "out"
    assert "must hold text" in changed(Job(tuple(str(corpus / name) for name in inputs), "bytes", out))
    assert not list(out.glob("*.idx"))
    # Nothing was made, so nothing can be mixed with what now comes there.
    assert tokenize(Job((str(corpus / "deep"),), "bytes", out)).documents == 4
    assert [file.num_documents for file in map(TokenFile, find_token_files(out))] == [3, 1]


def test_out_is_neither_inside_an_input_nor_shared(corpus: Path, tmp_path: Path) -> None:
    assert "must not be inside an input" in changed(Job((str(corpus),), "bytes", corpus / "out"))
    (tmp_path / "file").touch()
    assert "cannot be made" in changed(Job((str(corpus),), "bytes", tmp_path / "file"))
    (tmp_path / "out").mkdir()
    with shards.locked(tmp_path / "out"):
        assert "another run is writing there" in changed(Job((str(corpus),), "bytes", tmp_path / "out"))
    assert "name a file or folder" in changed(Job((), "bytes", tmp_path / "out"))
    assert "must not be negative" in changed(Job((str(corpus),), "bytes", tmp_path / "out", workers=-1))


def test_how_input_is_dealt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGEST", 2000)
    for name, size in (
        ("a.txt", 400),
        ("b.txt", 700),
        ("c.txt", 9000),
        ("d.jsonl", 8100),
        ("e.jsonl.gz", 5000),
        ("f", 1),
    ):
        (tmp_path / name).write_bytes(b"x" * size)
    dealt = plan_shards(find_files([str(tmp_path)]))
    shown = [[(Path(part.path).name, part.start, part.stop) for part in shard] for shard in dealt]
    assert shown == [
        [("a.txt", 0, 400), ("b.txt", 0, 700), ("c.txt", 0, 9000)],  # a text is one document and stays whole
        [("d.jsonl", 0, 2025)],
        [("d.jsonl", 2025, 4050)],
        [("d.jsonl", 4050, 6075)],
        [("d.jsonl", 6075, 8100)],
        [("e.jsonl.gz", 0, 5000)],  # there is no way to its middle but through its beginning
        [("f", 0, 1)],
    ]
    assert sum(part.size for shard in dealt for part in shard) == 23_201


def test_documents_without_a_token_are_counted(tmp_path: Path) -> None:
    texts = [" ", "word", "  "]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    library = Tokenizer(models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "words.json"))
    totals = tokenize(Job((str(tmp_path / "x.jsonl"),), str(tmp_path / "words.json"), tmp_path / "out"))
    assert (totals.documents, totals.skipped[0].count, totals.skipped[0].reason) == (1, 2, "without a token")
    side = read_sidecar(tmp_path / "out" / "tokens-000000")
    assert side is not None
    assert side.tokenizer.name == str(tmp_path / "words.json")
    assert TokenFile(tmp_path / "out" / "tokens-000000").dtype == np.uint16
