"""DeepGEMM's grouped products and scale layouts, against float64."""

import unittest

import adapted
import support
from adapted import back, to
from stored import draw, widened

import heddle
import ml_dtypes
import numpy as np
import oracle
from heddle.adapters import deepgemm

GROUPS, N, K = 3, 192, 256


def error(got, expected):
    return oracle.relative_error(np.asarray(got, np.float64), expected)


def rows(*shape):
    return np.random.default_rng([support.SEED, *shape]).normal(size=shape).astype(np.float32)


def packed(scales):
    """float8_e8m0fnu [.., rows, groups] as DeepGEMM packs them."""
    return deepgemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales.astype(np.float32))


class Operands:
    """a [.., K] of fp8 and its values, and b [G, N, K] of a kind and its values."""

    def __init__(self, kind, shape, gran_a=128, packed_a=False):
        how = heddle.Quantisation(gran_a, "ue8m0" if packed_a else "f32")
        flat = rows(*shape, K).reshape(-1, K)
        codes, scales = heddle.formats.quantise_fp8(flat, how)
        self.values = heddle.formats.widen_fp8(codes, scales, how).astype(np.float64).reshape(*shape, K)
        scales = scales.reshape(*shape, -1)
        self.a = codes.reshape(*shape, K), packed(scales) if packed_a else scales
        stored, weight_scales = draw(np.random.default_rng(support.SEED), kind, GROUPS, N, K)
        self.weights = widened(kind, stored, weight_scales)
        self.b = stored.view(np.int8) if kind == "mxfp4" else stored, weight_scales
        if kind.startswith("mx"):
            self.b = self.b[0], packed(weight_scales)

    def given(self, kind):
        return tuple(tuple(to(kind, part) for part in pair) for pair in (self.a, self.b))


RECIPES = (
    ("fp8_block", 128, False, {}),
    ("fp8_block", 128, False, {"recipe": (1, 128, 128)}),
    ("fp8_block", 32, True, {"recipe_a": (1, 32), "recipe_b": (128, 128)}),
    ("mxfp8", 32, True, {"recipe_a": (1, 32), "recipe_b": (1, 32)}),
    ("mxfp8", 32, True, {"recipe": (1, 1, 32)}),
    ("mxfp4", 128, False, {"recipe_a": (1, 128), "recipe_b": (1, 32)}),
)


class Products(unittest.TestCase):
    def test_contiguous(self):
        layout = np.array([2, 2, 0, -1, 1, 0, -1, 2] * 20, np.int32)  # no order is asked for
        here = layout >= 0
        for of, gran, is_packed, recipe in RECIPES:
            operands = Operands(of, (len(layout),), gran, is_packed)
            expected = np.einsum("mk,mnk->mn", operands.values[here], operands.weights[layout[here]])
            for kind in adapted.kinds(self):
                for zero in (True, False):
                    with self.subTest(weights=of, recipe=recipe, kind=kind, zero=zero):
                        d = to(kind, np.full((len(layout), N), 7, ml_dtypes.bfloat16))
                        a, b = operands.given(kind)
                        more = {**recipe, "ensure_zero_padding": zero}
                        self.assertIsNone(deepgemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, to(kind, layout), **more))
                        self.assertLess(error(back(d)[here], expected), support.BOUND["bf16"])
                        self.assertTrue((back(d)[~here] == (0 if zero else 7)).all())

    def test_ends_of_groups(self):
        """The same rows by a psum layout, an empty group among them."""
        self.addCleanup(deepgemm.set_mk_alignment_for_contiguous_layout, 128)
        for alignment in (128, 16):
            deepgemm.set_mk_alignment_for_contiguous_layout(alignment)
            self.assertEqual(deepgemm.get_m_alignment_for_contiguous_layout(), alignment)
            ends = np.array([5, 5, alignment + 3], np.int32)
            layout = np.full(2 * alignment, -1, np.int32)
            layout[:5], layout[alignment : alignment + 3] = 0, 2
            operands, results = Operands("fp8_block", (len(layout),)), []
            for grouped, more in ((layout, {}), (ends, {"use_psum_layout": True})):
                results.append(np.full((len(layout), N), 7, ml_dtypes.bfloat16))
                deepgemm.m_grouped_fp8_gemm_nt_contiguous(operands.a, operands.b, results[-1], grouped, **more)
            with self.subTest(alignment=alignment):
                np.testing.assert_array_equal(*map(support.bits, results))

    def test_masked(self):
        counts = np.array([4, 0, 2], np.int32)
        there = np.arange(5) < counts[:, None]
        for of, gran, is_packed, recipe in RECIPES:
            operands = Operands(of, (GROUPS, 5), gran, is_packed)
            expected = np.einsum("gmk,gnk->gmn", operands.values, operands.weights)
            for kind in adapted.kinds(self):
                with self.subTest(weights=of, recipe=recipe, kind=kind):
                    d = to(kind, np.full((GROUPS, 5, N), 7, ml_dtypes.bfloat16))
                    deepgemm.m_grouped_fp8_gemm_nt_masked(*operands.given(kind), d, to(kind, counts), 2, **recipe)
                    self.assertLess(error(back(d)[there], expected[there]), support.BOUND["bf16"])
                    self.assertTrue((back(d)[~there] == 7).all())

    def test_a_scale_of_128_columns_of_a_row(self):
        """What packed scales of b mean where nothing else is said; and the same of fp4."""
        random, layout = np.random.default_rng(support.SEED), np.array([0, 2, 1, 1], np.int32)
        scales = np.exp2(random.integers(-9, -5, (GROUPS, N, K // 128))).astype(np.float32)
        for of in ("mxfp8", "mxfp4"):
            stored, _ = draw(random, of, GROUPS, N, K)
            wide = widened(of, stored, scales.repeat(4, axis=2))
            operands = Operands("fp8_block", (len(layout),), 128, True)
            expected = np.einsum("mk,mnk->mn", operands.values, wide[layout])
            for b_scales, recipe in ((packed(scales), {}), (scales, {"recipe_a": (1, 128), "recipe_b": (1, 128)})):
                d = np.empty((len(layout), N), ml_dtypes.bfloat16)
                deepgemm.m_grouped_fp8_fp4_gemm_nt_contiguous(operands.a, (stored, b_scales), d, layout, **recipe)
                with self.subTest(weights=of, recipe=recipe):
                    self.assertLess(error(d, expected), support.BOUND["bf16"])
        with self.assertRaisesRegex(heddle.InputError, "b\\[1\\]: expected powers of 2"):
            deepgemm.m_grouped_fp8_fp4_gemm_nt_contiguous(operands.a, (stored, 3 * scales), d, layout, recipe=(1, 1, 128))

    def test_bf16(self):
        layout, counts = np.array([1, -1, 0, 2, 2], np.int32), np.array([2, 0, 1], np.int32)
        weights = rows(GROUPS, N, K).astype(ml_dtypes.bfloat16)
        flat, blocks = (rows(*shape, K).astype(ml_dtypes.bfloat16) for shape in ((5,), (GROUPS, 2)))
        wide = weights.astype(np.float64)
        for kind in adapted.kinds(self):
            d = to(kind, np.full((5, N), 7, ml_dtypes.bfloat16))
            deepgemm.m_grouped_bf16_gemm_nt_contiguous(to(kind, flat), to(kind, weights), d, to(kind, layout))
            here = layout >= 0
            expected = np.einsum("mk,mnk->mn", flat[here].astype(np.float64), wide[layout[here]])
            self.assertLess(error(back(d)[here], expected), support.BOUND["bf16"])
            d = to(kind, np.full((GROUPS, 2, N), 7, ml_dtypes.bfloat16))
            deepgemm.m_grouped_bf16_gemm_nt_masked(to(kind, blocks), to(kind, weights), d, to(kind, counts), 1)
            there = np.arange(2) < counts[:, None]
            expected = np.einsum("gmk,gnk->gmn", blocks.astype(np.float64), wide)
            self.assertLess(error(back(d)[there], expected[there]), support.BOUND["bf16"])
            self.assertTrue((back(d)[~there] == 7).all())

    def test_two_products_are_the_runners(self):
        """GEMM 1, SwiGLU between them (with another exp), GEMM 2: what heddle.Experts computes."""
        random, wide, tokens = np.random.default_rng(support.SEED), 128, 6
        first, first_scales = draw(random, "fp8_block", GROUPS, 2 * wide, K)
        second, second_scales = draw(random, "fp8_block", GROUPS, K, wide)
        how = heddle.Quantisation(128, "f32")
        codes, scales = heddle.formats.quantise_fp8(rows(tokens, K), how)
        layout = np.array([0, 0, 1, 1, 1, 2], np.int32)
        gate_up = np.empty((tokens, 2 * wide), ml_dtypes.bfloat16)
        deepgemm.m_grouped_fp8_gemm_nt_contiguous((codes, scales), (first, first_scales), gate_up, layout)
        source = heddle.Source.of_fused_arrays(
            first, second, topk=1, kind="fp8_block", gate_up_scales=first_scales, down_scales=second_scales
        )
        experts = heddle.Experts(source.load(0, 1), heddle.ExpertOptions(quantisation=how))
        begins, counts = np.array([0, 2, 5], np.int32), np.array([2, 3, 1], np.int32)
        expected = experts.contiguous((codes, scales), begins, counts, out=np.empty((tokens, K), ml_dtypes.bfloat16))
        gate, up = np.split(gate_up.astype(np.float32), 2, axis=1)
        active = heddle.formats.quantise_fp8((gate / (1 + np.exp(-gate)) * up).astype(np.float32), how)
        out = np.empty((tokens, K), ml_dtypes.bfloat16)
        deepgemm.m_grouped_fp8_gemm_nt_contiguous(active, (second, second_scales), out, layout)
        self.assertLess(error(out, expected.astype(np.float64)), support.BOUND["fp8"])

    def test_refusals(self):
        operands = Operands("fp8_block", (4,))
        (codes, scales), (weights, weight_scales) = operands.a, operands.b
        d, layout = np.zeros((4, N), ml_dtypes.bfloat16), np.array([0, 1, 2, -1], np.int32)
        for change, words in (
            ({"a": codes}, "a: expected a pair of values and scales, got ndarray"),
            ({"a": (codes.astype(np.float32), scales)}, "a\\[0\\]: expected float8_e4m3fn \\[M, K\\]"),
            ({"a": (codes, scales[:, :1])}, "a\\[1\\]: expected float32 or int32 .four of them. \\[4, 2\\], got float32 \\[4, 1\\]"),
            ({"b": (weights, weight_scales[:, :1])}, "b\\[1\\]: expected float32 or int32 .four of them. \\[3, 2, 2\\]"),
            ({"b": (weights.astype(np.float32), weight_scales)}, "b\\[0\\]: expected float8_e4m3fn or int8"),
            ({"recipe": (1, 1, 128)}, "b\\[1\\]: expected float32 or int32 .four of them. \\[3, 192, 2\\]"),
            ({"recipe_a": (1, 128)}, "expected recipe, or recipe_a and recipe_b"),
            ({"d": d.astype(np.float32)}, "d: expected bfloat16 \\[4, 192\\], got float32"),
            ({"grouped_layout": layout + 1}, "row 2 is of group 3; it must be -1 to 2"),
            ({"grouped_layout": layout[:3]}, "grouped_layout: expected int32 \\[4\\]"),
            ({"grouped_layout": np.array([2, 1, 9], np.int32), "use_psum_layout": True}, "grouped_layout\\[1\\]: expected an end of 128"),
            ({"epilogue": 1}, "epilogue: expected None"),
        ):
            given = {"a": operands.a, "b": operands.b, "d": d, "grouped_layout": layout, **change}
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                deepgemm.m_grouped_fp8_gemm_nt_contiguous(**given)
        blocks = Operands("fp8_block", (GROUPS, 2))
        for masked_m, expected_m, words in (([2, 3, 0], 1, "masked_m: expected 0 to 2, got 0 to 3"), ([2, 2, 2], 0, "expected_m: expected at")):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                d = np.zeros((GROUPS, 2, N), ml_dtypes.bfloat16)
                deepgemm.m_grouped_fp8_gemm_nt_masked(blocks.a, blocks.b, d, np.array(masked_m, np.int32), expected_m)


class Layouts(unittest.TestCase):
    def test_columns(self):
        for kind in adapted.kinds(self):
            for shape in ((5, 3), (2, 5, 3)):
                scales = rows(*shape)
                laid = back(deepgemm.get_mn_major_tma_aligned_tensor(to(kind, scales)))
                np.testing.assert_array_equal(laid, scales)
                self.assertEqual(laid.strides[-2:], (4, 4 * 8))  # 5 rows, up to 8
        self.assertEqual((deepgemm.get_tma_aligned_size(5, 4), deepgemm.get_tma_aligned_size(5, 1)), (8, 16))

    def test_packed(self):
        powers = (2.0 ** np.random.default_rng(support.SEED).integers(-20, 20, (2, 5, 6))).astype(np.float32)
        for kind in adapted.kinds(self):
            laid = back(deepgemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(to(kind, powers)))
            self.assertEqual((laid.shape, laid.strides[1:]), ((2, 5, 2), (4, 32)))
            codes = np.ascontiguousarray(laid).view(np.uint8)
            np.testing.assert_array_equal(2.0 ** (codes[..., :6].astype(int) - 127), powers)
            self.assertTrue((codes[..., 6:] == 0).all())
        with self.assertRaisesRegex(heddle.InputError, "sf: expected powers of 2"):
            deepgemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(powers * 1.5)

    def test_required(self):
        transform = deepgemm.transform_sf_into_required_layout
        by_row, blocks = rows(130, 2), rows(2, 2, 2)
        np.testing.assert_array_equal(transform(by_row, 130, 256, (1, 128, 128), is_sfa=True), by_row)
        self.assertIs(transform(blocks, 130, 256, (1, 128, 128), 2, False), blocks)
        powers = np.exp2(np.random.default_rng(support.SEED).integers(-5, 5, (2, 130, 8))).astype(np.float32)
        laid = transform(powers, 130, 256, (1, 32), 2)
        self.assertEqual((laid.dtype, laid.shape), (np.int32, (2, 130, 2)))
        self.assertIs(transform(laid, 130, 256, (1, 32), 2), laid)
        repeated = transform(powers[:, :2], 130, 256, (128, 32), 2)
        np.testing.assert_array_equal(repeated[:, [0, 127, 128]], laid[:, [0, 0, 1]])
        for given, words in (
            ((by_row, 131, 256, (1, 128)), "sf: expected float32 or int32 .four of them. \\[131, 2\\], got float32 \\[130, 2\\]"),
            ((by_row, 130, 256, (1, 128, 128)), "is_sfa: expected with a recipe of three numbers"),
            ((powers, 130, 256, (1, 32), 2, None, True), "recipe: expected scales of 128 columns"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                transform(*given)


if __name__ == "__main__":
    unittest.main()
