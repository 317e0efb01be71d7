"""How inputs are dealt to token files, and the record that lets a later run go on where an earlier one stopped."""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from fourfold.data.documents import InputError, Part
from fourfold.data.indexed import TokenFile, TokenFileError
from fourfold.data.sidecar import Sidecar, TokenizerId, read_sidecar
from fourfold.data.writer import PARTIAL, write_atomically

RECORD, LOCK, PREFIX = "tokenize.json", ".tokenize.lock", "tokens-"
# Bytes of input per token file: enough files to keep the cores of one machine busy, and no more than that needs.
SMALLEST, LARGEST, FILES = 8 * 2**20, 256 * 2**20, 64

Shard = tuple[Part, ...]


class InputFile(msgspec.Struct, frozen=True):
    """An input as it was when the work began."""

    path: str
    size: int
    modified: int  # nanoseconds since 1970


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``DIR/tokenize.json``: what the token files of a folder are made of. A restart must find all of it unchanged."""

    version: int = 1
    tokenizer: TokenizerId
    vocab_size: int
    eos: int | None  # appended to each document; None: nothing is
    field: str
    skip_bad: bool
    inputs: tuple[InputFile, ...]
    shards: int
    """Token files that are made, those included of which nothing but a sidecar is left for want of documents."""


def input_files(files: Sequence[Part]) -> tuple[InputFile, ...]:
    """The inputs as they are now."""
    return tuple(InputFile(file.path, file.size, Path(file.path).stat().st_mtime_ns) for file in files)


def plan_shards(files: Sequence[Part]) -> tuple[Shard, ...]:
    """Deals whole files, and stretches of large ones that can be cut, to shards of about equal input, in order.

    Nothing but the inputs enters, so that any number of workers makes the same token files.
    """
    size = min(max(sum(file.size for file in files) // FILES, SMALLEST), LARGEST)
    shards: list[Shard] = []
    current: list[Part] = []
    filled = 0
    for part in (part for file in files for part in _cut(file, size)):
        current.append(part)
        filled += part.size
        if filled >= size:
            shards.append(tuple(current))
            current, filled = [], 0
    return (*shards, tuple(current)) if current else tuple(shards)


def shard_prefix(folder: Path, number: int) -> Path:
    """Where the token file of a shard is. Names sort in the order of the documents."""
    return folder / f"{PREFIX}{number:06d}"


def finished(prefix: Path) -> Sidecar | None:
    """The sidecar of a shard that is all there; None if the shard has to be made."""
    try:
        sidecar = read_sidecar(prefix)
        if sidecar is None or sidecar.documents == 0:  # without documents, there is only the sidecar
            return sidecar
        return sidecar if TokenFile(prefix).num_tokens == sidecar.tokens else None
    except TokenFileError:
        return None


def missing_files(path: Path, prefixes: Sequence[Path]) -> list[TokenFileError]:
    """What is not in a folder of token files, and should be; of another path, nothing.

    That is what `fourfold data tokenize` has not finished there, or else files of which only a sidecar is left. What is
    there and damaged is found by opening it.

    Args:
        path: of the folder.
        prefixes: what is there.
    """
    record_path = path / RECORD
    if record_path.exists():
        try:
            record = _decode(record_path)
        except InputError as error:
            return [TokenFileError(record_path, 0, error.rule)]
        made = (shard_prefix(path, number) for number in range(record.shards))
        left = sum(not prefix.with_suffix(".idx").exists() and finished(prefix) is None for prefix in made)
        bare = [shard_prefix(path, n).with_suffix(".json") for n in range(record.shards)]
        damaged = [file for file in bare if _is_no_sidecar(file)]
        if damaged:
            return [
                TokenFileError(file, 0, "is damaged: it does not say what the token file holds") for file in damaged
            ]
        if left or not prefixes:
            what = f"{left} of its {record.shards} token files are not finished" if left else "it holds no token file"
            return [TokenFileError(record_path, 0, f"{what}: run the same `fourfold data tokenize` again")]
    problems: list[TokenFileError] = []
    for prefix in sorted({file.with_suffix("") for file in path.glob("*.json")} - {*prefixes}):
        try:
            if (sidecar := read_sidecar(prefix)) is not None and sidecar.documents:
                TokenFile(prefix)
        except TokenFileError as error:
            problems.append(error)
    return problems


def _is_no_sidecar(file: Path) -> bool:
    """Whether a file that should be a sidecar is something else; one that is damaged further on says so itself."""
    try:
        return file.exists() and read_sidecar(file.with_suffix("")) is None
    except TokenFileError:
        return False


def read_record(folder: Path) -> Record | None:
    """The record of the run that made the token files in a folder; None if there are no token files.

    Raises:
        InputError: the folder holds token files without a record, or the record cannot be read.
    """
    path = folder / RECORD
    if not any(folder.glob("*.idx")):
        return None
    if not path.exists():
        raise InputError(str(folder), f"holds token files, but no {RECORD} that says what they are made of")
    return _decode(path)


def _decode(path: Path) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(str(path), f"cannot be read: {error}") from None


def clear(folder: Path) -> None:
    """Removes the sidecars that a run has left that found no document."""
    if (folder / RECORD).exists():
        for path in folder.glob(f"{PREFIX}*.json"):
            path.unlink()


def write_record(folder: Path, record: Record) -> None:
    """Writes it, whole or not at all."""
    write_atomically(folder / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1))


def check_same(folder: Path, then: Record, now: Record) -> None:
    """Raises InputError, with the first difference, if token files of both would be mixed."""
    before, after = ({file.path: file for file in record.inputs} for record in (then, now))
    for path in before.keys() | after.keys():
        if before.get(path) != after.get(path):
            what = "is new" if path not in before else "is gone" if path not in after else "has changed"
            raise InputError(path, f"{what} since {folder / RECORD} was written; choose another --out")
    for name in msgspec.structs.fields(Record):
        old, new = getattr(then, name.name), getattr(now, name.name)
        if old != new:
            was, is_now = (_show(value) for value in (old, new))
            rule = f"{name.name} was {was} for the files that are there, and is {is_now} now"
            raise InputError(str(folder), f"{rule}; choose another --out")


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Holds the folder against a second run, and clears away what a killed one left. InputError if it is taken."""
    with open(folder / LOCK, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(str(folder), "another run is writing there") from None
        except OSError:
            pass  # some cluster file systems have no locks: there, nothing but care keeps two runs apart
        remove_unfinished(folder)
        yield


def remove_unfinished(folder: Path) -> None:
    """Removes what a worker that was stopped has left: files under temporary names, and a .bin that has no .idx yet."""
    for path in folder.glob(f"token*{PARTIAL}"):
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{PREFIX}*.bin"):
        if (folder / RECORD).exists() and not path.with_suffix(".idx").exists():
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink()


def _show(value: object) -> str:
    if isinstance(value, TokenizerId):
        return value.name + (f" (sha256 {value.sha256[:12]}...)" if value.sha256 else "")
    return repr(value)


def _cut(file: Part, size: int) -> list[Part]:
    num = max(1, min(file.size // size, file.stop))  # no more than bytes or row groups
    if not file.can_be_cut or num == 1:
        return [file]
    bounds = ([i * whole // num for i in range(num + 1)] for whole in (file.stop, file.size))
    return [
        msgspec.structs.replace(file, start=start, stop=stop, size=end - begin)
        for (start, stop), (begin, end) in zip(*map(pairwise, bounds), strict=True)
    ]
