"""The exchange alone: experts written in NumPy over what arrived, in every way and layout."""

import contextlib
import unittest
from pathlib import Path

import support

import heddle
import ml_dtypes
import numpy as np
import oracle

HIDDEN, EXPERTS, TOPK, TOKENS = 128, 6, 3, 9
LAYOUTS = [
    ("gather", "routed"),
    ("normal", "contiguous"),
    ("low_latency", "masked"),
    ("elastic", "contiguous"),
    ("elastic", "routed"),
    ("one_sided", "routed"),
]


def batch(rank):
    random = np.random.default_rng([support.SEED, rank])
    tokens = 0 if rank == 1 else TOKENS + rank
    ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
    ids[::4, 1] = -1
    hidden = random.normal(size=(tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
    return hidden, ids, random.uniform(0.1, 1, (tokens, TOPK)).astype(np.float32)


def factor(expert):
    """Expert e multiplies by e + 1."""
    return np.asarray(expert) + 1.0


def expected(hidden, ids, weights):
    return np.sum(np.where(ids >= 0, factor(ids) * weights, 0), axis=1)[:, None] * hidden.astype(np.float64)


def by_expert(exchange, arrived, rows):
    results = np.zeros(rows.shape, ml_dtypes.bfloat16)
    for local, expert in enumerate(exchange.experts):
        mine = slice(arrived.begins[local], arrived.begins[local] + arrived.counts[local])
        weighted = rows[mine].astype(np.float32) * arrived.row_weights[mine, None]
        results[mine] = (factor(expert) * weighted).astype(ml_dtypes.bfloat16)
    return results


def routed(exchange, arrived, rows):
    mine = arrived.local_ids >= 0
    values = np.where(mine.any(axis=1, keepdims=True), rows.astype(np.float32), 0)  # padding rows hold anything
    factors = factor(np.array([*exchange.experts, -1]))[arrived.local_ids] * np.where(mine, arrived.weights, 0)
    slots = factors[:, :, None] * values[:, None, :]
    return (slots if arrived.slots_wanted else slots.sum(axis=1)).astype(ml_dtypes.bfloat16)


def run_experts(exchange, arrived, rows):
    return (routed if arrived.layout == "routed" else by_expert)(exchange, arrived, rows)


class Exchanges(unittest.TestCase):
    def options(self, **changed):
        return heddle.ExchangeOptions(**({"hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, "cap": 16} | changed))

    def round_trips(self, ranks, options, rows_of=lambda arrived: arrived.bf16()):
        def main(group):
            exchange, mine = heddle.Exchange(group, options), batch(group.rank)
            for _ in range(2):
                arrived = exchange.dispatch(*mine)
                self.assertFalse(arrived.rows.flags.writeable)
                out = exchange.combine(run_experts(exchange, arrived, rows_of(arrived)))
            return out, arrived.layout

        return heddle.run_threads(ranks, main)

    def check(self, outputs, bound):
        for rank, (out, _) in enumerate(outputs):
            hidden, ids, weights = batch(rank)
            self.assertEqual(out.shape, hidden.shape)
            if len(hidden):
                self.assertLess(oracle.relative_error(out, expected(hidden, ids, weights)), bound, f"rank {rank}")

    def test_ways_and_layouts(self):
        for way, layout in LAYOUTS:
            for ranks in (1, 2, 8):
                for reduce in ("rank", "home") if way == "elastic" else ("rank",):
                    with self.subTest(way=way, layout=layout, ranks=ranks, reduce=reduce):
                        outputs = self.round_trips(ranks, self.options(way=way, arrived=layout, reduce=reduce))
                        self.assertEqual({arrived for _, arrived in outputs}, {layout})
                        self.check(outputs, 6e-3)

    def test_an_fp8_wire(self):
        how = heddle.Quantisation(32, "f32")

        def widened(arrived):
            codes, scales = arrived.fp8()
            return heddle.formats.widen_fp8(codes.copy(), scales.copy(), how)

        self.check(self.round_trips(2, self.options(wire="fp8", quantisation=how), widened), 4e-2)

    def test_closed(self):
        """By all ranks, also amid a round trip and twice; then there are no calls. Looking at what had arrived does no harm."""

        def main(group):
            with heddle.Exchange(group, self.options()) as first:
                first.combine(run_experts(first, arrived := first.dispatch(*batch(group.rank)), arrived.bf16()))
            second = heddle.Exchange(group, self.options())
            arrived = second.dispatch(*batch(group.rank))
            self.assertTrue(arrived.rows.any())
            for _ in range(2):
                second.close()
            self.assertGreaterEqual(arrived.rows.sum(), 0)
            for call in (lambda: second.dispatch(*batch(0)), lambda: second.combine(batch(0)[0]), second.reset):
                with self.assertRaisesRegex(heddle.InputError, f"exchange of rank {group.rank} is closed"):
                    call()
            return second.bytes

        self.assertEqual(len(set(heddle.run_threads(2, main, deadline=20))), 1)

    def test_memory_goes_back(self):
        """Pages of closed exchanges are given back to the system, those of others stay as long as their group."""

        def held():
            bytes_held = 0
            for file in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # that of this list itself
                    bytes_held += 512 * file.stat().st_blocks if "/memfd:" in str(file.readlink()) else 0
            return bytes_held

        group, options = heddle.thread_group(1)[0], self.options(cap=2000)
        before = held()
        for _ in range(3):
            with heddle.Exchange(group, options) as exchange:
                self.assertGreaterEqual(held() - before, exchange.bytes)
        self.assertEqual(held(), before)

    def test_order_of_calls_and_arrays(self):
        group = heddle.thread_group(1)[0]
        exchange, mine = heddle.Exchange(group, self.options()), batch(0)
        with self.assertRaisesRegex(heddle.InputError, "dispatch comes first"):
            exchange.combine(mine[0], mine[0].copy())
        with self.assertRaisesRegex(heddle.InputError, "dispatch comes first"):
            exchange.combine(mine[0])
        arrived = exchange.dispatch(*mine)
        with self.assertRaisesRegex(heddle.InputError, "combine comes before"):
            exchange.dispatch(*mine)
        with self.assertRaisesRegex(heddle.InputError, r"results: expected bfloat16 \[\d+, 128\].*got shape \[1, 128\]"):
            exchange.combine(arrived.bf16()[:1])
        exchange.reset()
        with self.assertRaisesRegex(heddle.InputError, "hidden: expected bfloat16"):
            exchange.dispatch(mine[0].astype(np.float32), *mine[1:])
        exchange.reset()
        exchange.combine(run_experts(exchange, *(lambda arrived: (arrived, arrived.bf16()))(exchange.dispatch(*mine))))

    def test_options(self):
        group = heddle.thread_group(1)[0]
        for changed, words in (({"arrived": "masked", "way": "gather"}, "gather"), ({"way": "mega"}, "mega"), ({"topk": 0}, "0")):
            with self.subTest(changed=changed), self.assertRaisesRegex(heddle.InputError, words):
                heddle.Exchange(group, self.options(**changed))


if __name__ == "__main__":
    unittest.main()
