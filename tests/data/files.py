"""Token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fourfold.data.sidecar import Sidecar, TokenizerId
from fourfold.data.writer import TokenFileWriter

BYTES = TokenizerId(name="bytes", sha256=None, file=None)


def write_tokens(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int = 256) -> Sidecar:
    """A token file with these documents."""
    with TokenFileWriter(prefix, BYTES, vocab_size) as writer:
        writer.write([np.array(document, dtype=np.int64) for document in documents])
        return writer.finish()
