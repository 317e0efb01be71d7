"""Files by relative name under one root: a folder of this machine, or an fsspec URL such as s3://bucket/run.

What differs between the two is kept here: on a local disk a file is safe once it and its folder are synced, and a
folder is published by renaming it; an object store keeps a file once it is uploaded whole, and cannot rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from fourfold.data.writer import open_folder, sync_folder
from fourfold.recipe.places import local_folder, open_url


class Files(Protocol):
    """The files under one root. Names are relative, with "/" between parts. Failures are OSError."""

    root: str
    renames: bool
    """Whether a folder can be renamed, at once and with all that is in it."""

    def below(self, name: str) -> Files:
        """The files of a folder."""
        ...

    def names(self) -> list[str]:
        """What lies directly under the root, sorted; nothing if the root does not exist."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        ...

    def read(self, name: str) -> bytes:
        """The whole of a file."""
        ...

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes from ``begin`` on. Raises EOFError if the file ends before."""
        ...

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Writes a new file, whose folders are made as needed. It is safe on return."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Writes a small file so that a reader finds it as it was before, or whole."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Renames a folder, for good on return. Raises FileExistsError if the new one exists and is not empty."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file or a folder with all that is in it, if it exists."""
        ...


def files_at(place: str | Path) -> Files:
    """The files under a local path, a file:// URL, or any other URL that fsspec knows."""
    folder = local_folder(place)
    return UrlFiles(str(place)) if folder is None else LocalFiles(folder)


class LocalFiles:
    """Files under a folder of this machine, or of a file system that all machines mount."""

    renames = True

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._root = root

    def below(self, name: str) -> LocalFiles:
        return LocalFiles(self._root / name)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._root))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        path = self._root / name
        return path.stat().st_size if path.is_file() else None

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        with (self._root / name).open("rb", buffering=0) as file:
            file.seek(begin)
            _fill(file, buffer, f"{self.root}/{name}")

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
                del part  # parts are large, and the next one is about to be made
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)

    def replace(self, name: str, content: bytes) -> None:
        path, temporary = self._root / name, f"{name}.partial"
        self.write(temporary, [content])
        with open_folder(path.parent) as folder:
            os.replace(self._root / temporary, path)
            os.fsync(folder)  # by descriptor: now that the file is there, another rank may have renamed the folder

    def rename(self, old: str, new: str) -> None:
        sync_folder(self._root / old)
        os.rename(self._root / old, self._root / new)
        sync_folder(self._root)

    def remove(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class UrlFiles:
    """Files under a URL, by fsspec: its package for the kind of store must be installed (s3fs for s3://)."""

    renames = False

    def __init__(self, root: str) -> None:
        self.root = root
        self._opened, self._path = open_url(root)
        self._process = os.getpid()

    @property
    def _fs(self) -> Any:
        """The store, which a process that was forked since must open anew: the connections are its parent's."""
        if self._process != os.getpid():
            self._opened, self._process = open_url(self.root)[0], os.getpid()
        return self._opened

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def below(self, name: str) -> UrlFiles:
        return UrlFiles(f"{self.root.rstrip('/')}/{name}")

    def names(self) -> list[str]:
        self._fs.invalidate_cache()  # other ranks write here, too
        try:
            return sorted({path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False)})
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        try:
            info = self._fs.info(self._at(name))
        except FileNotFoundError:
            return None
        return info["size"] if info["type"] == "file" else None

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._at(name))

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        content = self._fs.cat_file(self._at(name), start=begin, end=begin + len(buffer))
        if len(content) != len(buffer):
            raise EOFError(f"{self.root}/{name} ends within the bytes {begin} to {begin + len(buffer)}")
        buffer[:] = content

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        path = self._at(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            for part in parts:
                file.write(part)
                del part  # parts are large, and the next one is about to be made

    def replace(self, name: str, content: bytes) -> None:
        self.write(name, [content])

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("an object store cannot rename a folder")

    def remove(self, name: str) -> None:
        if self._fs.exists(self._at(name)):
            self._fs.rm(self._at(name), recursive=True)


def _fill(file: Any, buffer: memoryview, path: str) -> None:
    """One read call gives at most 2 GiB."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise EOFError(f"{path} ends {len(buffer) - done} bytes too early")
        done += count
