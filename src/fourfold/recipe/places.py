"""Places that a recipe names: a folder of this machine by path or file:// URL, or a URL of another kind, by fsspec."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any


def local_folder(place: str | Path) -> Path | None:
    """The folder of this machine that a path or a file:// URL names; None: it is another URL."""
    text = str(place)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return None if "://" in text else Path(place)


def open_url(url: str) -> tuple[Any, str]:
    """The file system that a URL is in, and the path there. Raises OSError if its kind is not known here.

    The package for the kind of store must be installed, such as s3fs for s3://. A process that is forked must open it
    anew.
    """
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:  # an unknown scheme, or a package that is not installed
        raise OSError(f"{url} cannot be opened: {error}") from None
    return files, path.rstrip("/")


def read_file(place: str, name: str) -> bytes:
    """A small file at a path or URL. Raises OSError, whatever a store raises; of a URL, the message says it all."""
    folder = local_folder(place)
    if folder is not None:
        return (folder / name).read_bytes()
    url = f"{place.rstrip('/')}/{name}"
    files, path = open_url(place)
    try:
        return files.cat_file(f"{path}/{name}")
    except FileNotFoundError:
        raise OSError(f"{url}: {os.strerror(errno.ENOENT)}") from None
    except Exception as error:  # of any kind: each store has its own for a wrong password, or a host that is not there
        raise OSError(f"{url} cannot be read: {error or type(error).__name__}") from None
