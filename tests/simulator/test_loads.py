"""Attention of every rank against `layout.documents` token by token, hand computations, and a reference table."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.indexed import HEADER, MAGIC, VERSION, TokenFileError
from fourfold.layout.documents import Strategy, attention_pairs, pack, shards
from fourfold.planner.imbalance import Documents
from fourfold.report.documents import documents_table
from fourfold.simulator.loads import STRATEGIES, Lengths, Loads, both_splits, loads_of, parse_mix

LONG = 131_072


def micro_batches_of(lengths: list[int], seq_len: int, micro_batch: int, number: int) -> list[list[list[int]]]:
    """The lengths of the documents in each row of each micro-batch, as `layout.pack` packs them."""
    rows = [[segment.length for segment in row] for row in pack(lengths, seq_len)]
    return [rows[i * micro_batch : (i + 1) * micro_batch] for i in range(number)]


class TestAgainstLayout:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("case", range(40))
    def test_random_small_cases(self, strategy: Strategy, case: int) -> None:
        """Every rank of every micro-batch, exactly; rows that do not divide by 2 cp, and ranks without tokens."""
        draw = np.random.default_rng(case).integers
        lengths = draw(1, draw(2, 40), 30).tolist()
        seq_len, micro_batch, dp, number, cp = (
            int(draw(*range_)) for range_ in ((1, 50), (1, 4), (1, 4), (1, 4), (1, 7))
        )
        mix = parse_mix("lengths=" + ",".join(map(str, lengths)))
        found = loads_of(
            mix, seq_len=seq_len, micro_batch=micro_batch, dp=dp, micro_batches=number, cp=cp, strategy=strategy
        )
        rounds = -(-dp * number * micro_batch * seq_len // sum(lengths))
        truth = [
            [attention_pairs(rows, shard) for shard in shards(rows, cp=cp, strategy=strategy)]
            for rows in micro_batches_of(lengths * rounds, seq_len, micro_batch, dp * number)
        ]
        np.testing.assert_array_equal(found.pairs, np.reshape(truth, (dp, number, cp)))

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_a_distribution(self, strategy: Strategy) -> None:
        mix = Documents(13, "exponential")
        found = loads_of(mix, seq_len=100, dp=2, micro_batches=3, cp=4, strategy=strategy, seed=5)
        lengths = mix.sample(200, np.random.default_rng(5)).tolist()
        truth = [
            [attention_pairs(rows, shard) for shard in shards(rows, cp=4, strategy=strategy)]
            for rows in micro_batches_of(lengths, 100, 1, 6)
        ]
        np.testing.assert_array_equal(found.pairs, np.reshape(truth, (2, 3, 4)))

    def test_work_in_parts_is_the_same(self) -> None:
        """Half a million documents of one token, each with one pair, on 16 ranks: more than is cut in one go."""
        found = loads_of(parse_mix("lengths=1"), seq_len=8192, dp=8, micro_batches=8, cp=16, strategy="per_document")
        np.testing.assert_array_equal(found.pairs, np.full((8, 8, 16), 8192 // 16))

    def test_without_documents(self) -> None:
        found = loads_of(None, seq_len=8, dp=1, micro_batches=2, cp=2)
        np.testing.assert_array_equal(found.pairs, [[[1 + 2 + 7 + 8, 3 + 4 + 5 + 6]] * 2])
        assert (found.slowest_over_mean, found.slowest_over_fastest, found.waiting_share) == (1, 1, 0)

    def test_both_strategies_have_the_same_documents(self) -> None:
        sums = {
            loads_of(Documents(100, "lognormal", 1.0), seq_len=512, dp=2, micro_batches=4, cp=4, strategy=s).pairs.sum()
            for s in STRATEGIES
        }
        assert len(sums) == 1

    def test_a_seed_gives_the_same_again_and_another_something_else(self) -> None:
        sizes = {"seq_len": 512, "dp": 2, "micro_batches": 4, "cp": 4}
        mix = Documents(100, "exponential")
        first, again, other = (loads_of(mix, **sizes, seed=seed).pairs for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()


class TestStatistics:
    """The tiny oracle of algorithms.md 3.7: documents of 4 and 12 tokens on two ranks."""

    @pytest.mark.parametrize(("strategy", "pairs"), [("head_tail", [52, 36]), ("per_document", [44, 44])])
    def test_the_tiny_oracle(self, strategy: Strategy, pairs: list[int]) -> None:
        found = loads_of(parse_mix("lengths=4,12"), seq_len=16, dp=1, micro_batches=1, cp=2, strategy=strategy)
        assert found.pairs.tolist() == [[pairs]]
        assert found.slowest_over_fastest == max(pairs) / min(pairs)
        assert found.slowest_over_mean == max(pairs) / 44
        assert found.waiting.tolist() == [[[max(pairs) - p for p in pairs]]]
        assert found.waiting_share == pytest.approx(1 - 44 / max(pairs))

    def test_by_hand(self) -> None:
        """Two groups of two micro-batches on two ranks. Group 0 takes 6 + 5, group 1 takes 1 + 3; of (11 + 4) x 2 rank
        times, 22 are work and 8 waiting."""
        found = Loads(np.array([[[6, 2], [4, 5]], [[1, 1], [0, 3]]]), "head_tail", 8, 1, "by hand")
        assert found.per_rank.tolist() == [[10, 7], [1, 4]]
        assert found.slowest_over_mean == 10 / 5.5
        assert found.slowest_over_fastest == 10
        assert found.waiting.sum() == 8
        assert found.waiting_share == 8 / 30

    def test_a_rank_without_work(self) -> None:
        assert loads_of(None, seq_len=1, dp=1, micro_batches=1, cp=2).slowest_over_fastest == float("inf")


class TestTable:
    """The table of algorithms.md 3.7: 131,072 tokens, 200 draws, attention work only.

    max / mean is a mean over draws, max / min a median. Its 200 draws are not ours: so both are random, and may differ
    by three standard errors of the difference, and by how they are rounded.
    """

    TRUTH = (
        ("", (1.00, 1.00, 1.00, 1.00), 1.0),
        ("mean=1024,dist=exponential", (1.09, 1.26, 1.53, 1.99), 3.8),
        ("mean=8192,dist=exponential", (1.19, 1.49, 1.84, 2.04), 6.8),
        ("median=1024,dist=lognormal,sigma=1.5", (1.28, 1.65, 2.04, 2.37), 12),
        ("lengths=32768,1024x96", (1.89, 2.80, 3.26, 3.49), 30),
    )

    @pytest.mark.parametrize(("documents", "factors", "spread"), TRUTH)
    def test_head_tail(self, documents: str, factors: tuple[float, ...], spread: float) -> None:
        for cp, factor in zip((2, 4, 8, 16), factors, strict=True):
            loads, _ = of_both_splits(documents, cp)
            largest = loads.pairs.max(axis=2) / loads.pairs.mean(axis=2)
            error = 3 * (2 / largest.size) ** 0.5 * largest.std()
            assert loads.slowest_over_mean_per_micro_batch == pytest.approx(factor, abs=0.005 + error), cp
        # The middle of 200, three standard errors up and down: 0.5 -+ 3 (2 / 200) ** 0.5 / 2 of them.
        loads, _ = of_both_splits(documents, 16)
        low, high = np.quantile(loads.pairs.max(axis=2) / loads.pairs.min(axis=2), (0.35, 0.65))
        rounding = 0.5 if spread >= 10 else 0.05
        assert low - rounding <= spread <= high + rounding
        assert low <= loads.slowest_over_fastest_per_micro_batch <= high

    @pytest.mark.parametrize("documents", [documents for documents, _, _ in TRUTH])
    def test_per_document_is_even(self, documents: str) -> None:
        """Of every document each rank gets two chunks of equal length, but for a token: some 0.1 % of 8,192 tokens."""
        for cp in (2, 4, 8, 16):
            _, loads = of_both_splits(documents, cp)
            assert loads.slowest_over_mean_per_micro_batch < 1.002
            assert loads.slowest_over_fastest_per_micro_batch < 1.005


class TestDocumentsTable:
    def test_the_tiny_oracle(self) -> None:
        """Documents of 4 and 12 tokens on two ranks: 52 and 36 pairs, or 44 and 44."""
        both = both_splits(parse_mix("lengths=4,12"), seq_len=16, dp=1, micro_batches=1, cp=2)
        table = documents_table(both)
        assert table.title == "Attention by split of context parallelism: lengths=4,12"
        waiting = f"{1 - 44 / 52:.1%}"
        assert table.rows == (
            ("head-tail", "1.18", "1.44", "1.18", "1.44", waiting),
            ("per document", "1.00", "1.00", "1.00", "1.00", "0.0%"),
        )
        assert len(table.columns) == len(table.rows[0]) == len({*table.columns})

    def test_a_rank_without_work(self) -> None:
        table = documents_table(both_splits(None, seq_len=1, dp=1, micro_batches=1, cp=2))
        assert [row[2] for row in table.rows] == ["-", "-"]

    def test_per_micro_batch_by_hand(self) -> None:
        """Ratios to the mean of 6/4, 5/4.5, 1 and 2; to the smallest of 3, 5/4, 1 and infinity."""
        found = Loads(np.array([[[6, 2], [4, 5]], [[1, 1], [0, 3]]]), "head_tail", 8, 1, "by hand")
        assert found.slowest_over_mean_per_micro_batch == pytest.approx((6 / 4 + 5 / 4.5 + 1 + 2) / 4)
        assert found.slowest_over_fastest_per_micro_batch == (3 + 5 / 4) / 2


class TestParse:
    def test_distributions_are_the_planner_s(self) -> None:
        assert parse_mix("mean=1024,dist=exponential") == Documents(1024, "exponential")
        assert parse_mix(" dist = lognormal, mean=2, sigma=1") == Documents(2, "lognormal", 1)

    def test_lengths(self) -> None:
        mix = parse_mix("lengths = 32768, 1024x3, 7")
        assert isinstance(mix, Lengths)
        assert str(mix) == "lengths=32768, 1024x3, 7"
        assert mix.fill(32768 + 3 * 1024 + 7).tolist() == [32768, 1024, 1024, 1024, 7]
        assert mix.fill(2 * (32768 + 3 * 1024 + 7))[4:7].tolist() == [7, 32768, 1024]

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "lengths.txt"
        path.write_text("5\n\n 3x2 \n")
        assert parse_mix(f"file={path}").fill(11).tolist() == [5, 3, 3]  # pyrefly: ignore

    def test_many_lengths_are_not_all_looked_at(self) -> None:
        mix = parse_mix("lengths=2x3000000")
        assert isinstance(mix, Lengths)
        assert len(mix.fill(100)) == 1 << 20
        assert mix.fill(5_000_000).sum() >= 5_000_000

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("lenghts=5", "lenghts: unknown key; nearest legal: lengths"),
            ("zzz=5", "zzz: unknown key; nearest legal: mean, median, lengths, file, tokens"),
            ("meam=5", "meam: unknown key; nearest legal: mean"),
            ("1024", "must be key=value"),
            ("mean=0.1", "must be at least 1 token"),
            ("lengths=", 'lengths: entry 1: length = "": must be a whole number of at least 1; nearest legal: 1'),
            ("lengths=5,0", 'entry 2: length = "0": must be a whole number of at least 1'),
            ("lengths=5x0", 'entry 1: count = "0": must be a whole number'),
            ("lengths=-5", 'length = "-5": must be'),
            ("lengths=1K", 'length = "1K": must be'),
            ("lengths=5x", 'count = "": must be'),
            ("lengths=99999999999999999999", "must be a whole number"),
            ("file=/nowhere.txt", 'file = "/nowhere.txt": cannot be read: No such file or directory'),
            ("tokens=/nowhere", 'tokens = "/nowhere": must be a folder or a prefix of token files'),
            ("tokens=", 'tokens = "": must be a folder or a prefix'),
        ],
    )
    def test_refusals(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_mix(text)

    def test_files_that_are_no_lengths(self, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(ValueError, match="is not text; one length per line"):
            parse_mix(f"file={tmp_path / 'binary'}")
        with pytest.raises(ValueError, match="holds no length"):
            parse_mix(f"file={tmp_path / 'empty'}")


class TestTokenFiles:
    def test_documents_in_the_order_stored(self, tmp_path: Path) -> None:
        write_tokens(tmp_path / "b", [4, 0, 2])
        write_tokens(tmp_path / "a", [7])
        mix = parse_mix(f"tokens={tmp_path}")
        assert isinstance(mix, Lengths)
        assert mix.fill(13).tolist() == [7, 4, 2]
        assert mix.fill(14).tolist() == [7, 4, 2, 7, 4, 2]
        found = loads_of(mix, seq_len=13, dp=1, micro_batches=2, cp=1)
        assert found.pairs.ravel().tolist() == [28 + 10 + 3] * 2

    def test_tokens_are_not_read(self, tmp_path: Path) -> None:
        """A file of 64 GB, which is a hole on disk."""
        write_tokens(tmp_path / "huge", [1 << 30] * 16, size=1 << 36)
        found = loads_of(parse_mix(f"tokens={tmp_path / 'huge'}"), seq_len=1024, dp=1, micro_batches=1, cp=1)
        assert found.pairs.item() == 1024 * 1025 // 2

    def test_damaged_or_empty(self, tmp_path: Path) -> None:
        write_tokens(tmp_path / "none", [0, 0])
        with pytest.raises(ValueError, match="has no document with tokens"):
            parse_mix(f"tokens={tmp_path / 'none'}")
        (tmp_path / "none.idx").write_bytes(b"nonsense")
        with pytest.raises(TokenFileError, match="the file ends here"):
            parse_mix(f"tokens={tmp_path / 'none'}")


class TestSizes:
    @pytest.mark.parametrize("key", ["seq_len", "micro_batch", "dp", "micro_batches", "cp"])
    def test_below_one(self, key: str) -> None:
        sizes = {"seq_len": 8, "micro_batch": 1, "dp": 1, "micro_batches": 1, "cp": 1} | {key: 0}
        with pytest.raises(ValueError, match=f"{key} = 0: must be at least 1; nearest legal: 1"):
            loads_of(None, **sizes)  # pyrefly: ignore

    def test_strategy_and_seed(self) -> None:
        sizes = {"seq_len": 8, "dp": 1, "micro_batches": 1, "cp": 1}
        with pytest.raises(ValueError, match=r'strategy = "per-document": .* nearest legal: per_document'):
            loads_of(None, **sizes, strategy="per-document")  # pyrefly: ignore
        with pytest.raises(ValueError, match="seed = -1: must be at least 0; nearest legal: 0"):
            loads_of(None, **sizes, seed=-1)


class TestSpeed:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize(("dp", "cp"), [(8, 16), (128, 16)])
    def test_all_ranks_of_405b(self, strategy: Strategy, dp: int, cp: int) -> None:
        """16,384 ranks, and 262,144: about 0.02 and 0.4 s."""
        begin = time.process_time()
        found = loads_of(
            Documents(1024, "exponential"), seq_len=LONG, dp=dp, micro_batches=16, cp=cp, strategy=strategy
        )
        assert found.waiting_share == pytest.approx(0.5 if strategy == "head_tail" else 0.001, abs=0.02)
        assert time.process_time() - begin < 1.5

    def test_a_tail_so_heavy_that_nearly_all_documents_are_short(self) -> None:
        begin = time.process_time()
        found = loads_of(Documents(1024, "lognormal", 30.0), seq_len=LONG, dp=4, micro_batches=4, cp=2)
        assert found.pairs.min() > 0
        assert time.process_time() - begin < 2


@cache
def of_both_splits(documents: str, cp: int) -> tuple[Loads, Loads]:
    """200 rows of 131,072 tokens."""
    mix = parse_mix(documents) if documents else None
    return both_splits(mix, seq_len=LONG, dp=1, micro_batches=200, cp=cp)


def write_tokens(prefix: Path, lengths: list[int], *, size: int | None = None) -> None:
    """A token file of 4-byte ids with a sequence per document. `size`: bytes of .bin, as a hole."""
    counts = np.array(lengths, dtype="<i4")
    ends = np.cumsum(counts.astype(np.int64)) * 4
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 4, len(lengths), len(lengths) + 1))
        for column in (counts, ends - counts.astype(np.int64) * 4, np.arange(len(lengths) + 1, dtype=np.int64)):
            file.write(column.tobytes())
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(int(ends[-1]) if size is None else size)
