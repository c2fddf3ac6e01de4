"""Experts without an exchange: three runners with equal bits, weights in arrays of every kind, grouped products."""

import unittest

import support
from stored import KINDS, draw, swiglu, widened

import heddle
import ml_dtypes
import numpy as np
import oracle

HIDDEN, WIDE, EXPERTS = 256, 128, 4


def error(got, expected):
    return oracle.relative_error(np.asarray(got, np.float64), expected)


class Layer:
    def __init__(self, kind, clamp=None, **options):
        random = np.random.default_rng([support.SEED, len(kind)])
        self.kind, self.clamp = kind, clamp
        self.gate_up, self.gate_up_scales = draw(random, kind, EXPERTS, 2 * WIDE, HIDDEN)
        self.down, self.down_scales = draw(random, kind, EXPERTS, HIDDEN, WIDE)
        self.source = heddle.Source.of_fused_arrays(
            self.gate_up,
            self.down,
            topk=2,
            kind=kind,
            gate_up_scales=self.gate_up_scales,
            down_scales=self.down_scales,
            clamp=clamp,
        )
        self.experts = heddle.Experts(self.source.load(0, 1), heddle.ExpertOptions(**options))

    def rounded(self, rows):
        """As operands of a product are."""
        if self.kind == "bf16":
            return rows.astype(ml_dtypes.bfloat16).astype(np.float64)
        how = self.experts.options.quantisation
        return heddle.formats.widen_fp8(*heddle.formats.quantise_fp8(rows.astype(np.float32), how), how).astype(np.float64)

    def expected(self, rows, expert, weights=1):
        """float64, rounded where docs/numerics.md says."""
        first = widened(self.kind, self.gate_up, self.gate_up_scales)[expert]
        second = widened(self.kind, self.down, self.down_scales)[expert]
        gate_up = (self.rounded(rows) @ first.T).astype(ml_dtypes.bfloat16).astype(np.float64)
        return self.rounded(swiglu(gate_up, self.clamp) * weights) @ second.T


def bf16(*shape, seed=0):
    return np.random.default_rng([support.SEED, seed]).normal(size=shape).astype(ml_dtypes.bfloat16)


class Runners(unittest.TestCase):
    def test_every_kind(self):
        rows, counts = bf16(EXPERTS, 7, HIDDEN), np.array([7, 0, 3, 1], np.int32)
        weights = np.random.default_rng(support.SEED).uniform(0.1, 1, (EXPERTS, 7)).astype(np.float32)
        flat, begins = rows.reshape(-1, HIDDEN), np.arange(EXPERTS, dtype=np.int32) * 7
        for kind in KINDS:
            layer = Layer(kind, clamp=None if kind == "bf16" else 2.0)
            out = np.full_like(rows, 7)
            self.assertIs(layer.experts.masked(rows, counts, weights, out), out)
            runs = layer.experts.contiguous(flat, begins, counts, weights.reshape(-1), np.full_like(flat, 7))
            np.testing.assert_array_equal(support.bits(runs).reshape(out.shape), support.bits(out))
            for expert, count in enumerate(counts):
                with self.subTest(kind=kind, expert=expert):
                    self.assertTrue((out[expert, count:] == 7).all())
                    if count:
                        expected = layer.expected(rows[expert, :count], expert, weights[expert, :count, None])
                        self.assertLess(error(out[expert, :count], expected), support.BOUND["bf16" if kind == "bf16" else "fp8"])

    def test_routed_is_a_sum_of_runs(self):
        rows, ids = bf16(5, HIDDEN), np.array([[0, 3], [2, -1], [-1, -1], [1, 0], [-1, 3]], np.int32)
        weights = np.random.default_rng(support.SEED).uniform(0.1, 1, ids.shape).astype(np.float32)
        layer = Layer("bf16", weight_at="combine")
        out = layer.experts.routed(rows, ids, weights)
        expected = np.zeros(rows.shape)
        for token, choice in np.argwhere(ids >= 0):
            expected[token] += weights[token, choice] * layer.expected(rows[token : token + 1], ids[token, choice])[0]
        self.assertLess(error(out, expected), support.BOUND["bf16"])
        self.assertTrue((out[2] == 0).all())

    def test_fp8_rows_are_taken_as_they_are(self):
        for scale in ("f32", "ue8m0"):
            how = heddle.Quantisation(128, scale)
            layer, rows = Layer("fp8_block", quantisation=how), bf16(EXPERTS, 4, HIDDEN)
            counts = np.array([4, 2, 0, 1], np.int32)
            codes, scales = heddle.formats.quantise_fp8(rows.reshape(-1, HIDDEN).astype(np.float32), how)
            given = codes.reshape(rows.shape), scales.reshape(EXPERTS, 4, -1)
            with self.subTest(scale=scale):
                out = layer.experts.masked(given, counts, out=np.zeros_like(rows))
                expected = layer.experts.masked(rows, counts, out=np.zeros_like(rows))
                np.testing.assert_array_equal(support.bits(out), support.bits(expected))

    def test_a_part_of_the_experts(self):
        """The arrays of one rank, as a layer over two ranks has them."""
        layer = Layer("mxfp4")
        half = EXPERTS // 2
        arrays = {"gate_up_scales": layer.gate_up_scales[half:], "down_scales": layer.down_scales[half:]}
        source = heddle.Source.of_fused_arrays(
            layer.gate_up[half:], layer.down[half:], topk=2, kind="mxfp4", first=half, experts=EXPERTS, **arrays
        )
        self.assertEqual((source.shape.experts, source.kind), (EXPERTS, "mxfp4"))
        rows, counts = bf16(half, 3, HIDDEN), np.array([3, 2], np.int32)
        out = heddle.Experts(source.load(1, 2)).masked(rows, counts, out=np.zeros_like(rows))
        everything = np.concatenate([np.zeros_like(rows), rows])
        expected = layer.experts.masked(everything, np.array([0, 0, 3, 2], np.int32), out=np.zeros_like(everything))
        np.testing.assert_array_equal(support.bits(out), support.bits(expected[half:]))
        with self.assertRaisesRegex(heddle.InputError, "expert 0 is not in these arrays, which have 2 to 3"):
            source.load(0, 2)

    def test_refusals(self):
        layer, rows = Layer("bf16"), bf16(8, HIDDEN)
        begins, counts = np.array([0, 2, 4, 6], np.int32), np.array([2, 2, 2, 3], np.int32)
        with self.assertRaisesRegex(heddle.InputError, "local expert 3: rows 6 to 9 of 8"):
            layer.experts.contiguous(rows, begins, counts)
        with self.assertRaisesRegex(heddle.InputError, r"rows: expected bfloat16 \[4, rows, 256\]"):
            layer.experts.masked(rows, counts)
        with self.assertRaisesRegex(heddle.InputError, "masked_m\\[3\\] is 3; it must be 0 to 2"):
            layer.experts.masked(rows.reshape(4, 2, HIDDEN), counts)
        with self.assertRaisesRegex(heddle.InputError, "names local expert 4; it must be -1 to 3"):
            layer.experts.routed(rows, np.full((8, 1), 4, np.int32), np.ones((8, 1), np.float32))
        with self.assertRaisesRegex(heddle.InputError, "down scales: expected those of quantised weights, got None"):
            values, scales = draw(np.random.default_rng(0), "mxfp8", 2, 128, 64)
            down, _ = draw(np.random.default_rng(0), "mxfp8", 2, 64, 64)
            heddle.Source.of_fused_arrays(values, down, topk=1, kind="mxfp8", gate_up_scales=scales)
        with self.assertRaisesRegex(heddle.InputError, "fp8 blocks of 128 rows cannot be cut at row 64"):
            (first, first_scales), (second, second_scales) = (
                draw(np.random.default_rng(0), "fp8_block", 2, rows, columns) for rows, columns in ((128, 128), (128, 64))
            )
            scales = {"gate_up_scales": first_scales, "down_scales": second_scales}
            heddle.Source.of_fused_arrays(first, second, topk=1, kind="fp8_block", **scales).load(0, 1)
        with self.assertRaisesRegex(heddle.InputError, r"gate_up is \[4, 256, 256\] and down \[4, 256, 256\]"):
            heddle.Source.of_fused_arrays(layer.gate_up, layer.gate_up, topk=1)


class Products(unittest.TestCase):
    def test_every_kind(self):
        groups = np.array([2, 0, -1, 0, 3, 2, -1, 1, 0] * 30, np.int32)  # several pieces of the tile engine
        rows = bf16(len(groups), HIDDEN)
        for kind in KINDS:
            weights, weight_scales = draw(np.random.default_rng(support.SEED), kind, EXPERTS, 192, HIDDEN)
            values, how = np.asarray(rows, np.float64), heddle.Quantisation(32 if kind.startswith("mx") else 128, "f32")
            given = rows
            if kind != "bf16":
                given = heddle.formats.quantise_fp8(rows.astype(np.float32), how)
                values = heddle.formats.widen_fp8(*given, how).astype(np.float64)
            out = np.full((len(groups), 192), 7, ml_dtypes.bfloat16)
            heddle.grouped_product(given, weights, groups, out, kind=kind, weight_scales=weight_scales, quantisation=how)
            wide = widened(kind, weights, weight_scales)
            with self.subTest(kind=kind):
                self.assertTrue((out[groups < 0] == 7).all())
                here = groups >= 0
                expected = np.einsum("mk,mnk->mn", values[here], wide[groups[here]])
                self.assertLess(error(out[here], expected), support.BOUND["bf16"])

    def test_refusals(self):
        rows, weights, out = bf16(3, HIDDEN), bf16(2, 64, HIDDEN), np.zeros((3, 64), ml_dtypes.bfloat16)
        for groups, words in (([0, 2, 0], "row 1 is of group 2; it must be -1 to 1"), ([0, 1], r"groups: expected int32 \[3\]")):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                heddle.grouped_product(rows, weights, np.array(groups, np.int32), out)
        with self.assertRaisesRegex(heddle.InputError, "nvfp4"):
            heddle.grouped_product(rows, weights, np.zeros(3, np.int32), out, kind="nvfp4")


if __name__ == "__main__":
    unittest.main()
