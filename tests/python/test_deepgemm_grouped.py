"""DeepGEMM's grouped products of a GPU's tensors, with weights that were loaded before: against the same calls on the host engine.
On a GPU; and, to see that calls hand on what they are given, with a stand-in for the GPU's part that computes on the host."""

import unittest
from types import SimpleNamespace
from unittest import mock

import adapted
import support
from adapted import to
from test_deepgemm import GROUPS, K, N, Operands, error, rows
from test_device import why_not

import heddle
import ml_dtypes
import numpy as np
from heddle import _core, device
from heddle.adapters import deepgemm, deepgemm_grouped

torch = adapted.torch
BOUND = {"bf16": 4e-3, "fp8_block": 1.5e-2, "mxfp4": 1.5e-2, "mxfp8": 1.5e-2}  # docs/numerics.md
RECIPES = (
    ("fp8_block", 128, False, {}),
    ("fp8_block", 128, True, {"recipe_a": (1, 128), "recipe_b": (128, 128)}),
    ("fp8_block", 32, True, {"recipe_a": (1, 32), "recipe_b": (128, 128)}),
    ("mxfp4", 128, False, {"recipe_a": (1, 128), "recipe_b": (1, 32)}),
    ("mxfp4", 32, True, {"recipe": (1, 1, 32)}),
    ("mxfp8", 32, True, {"recipe": (1, 1, 32)}),
    ("mxfp8", 128, False, {"recipe_a": (1, 128), "recipe_b": (1, 32)}),
)
LAYOUT = np.array([2, 2, 0, -1, 1, 0, -1, 2] * 20, np.int32)  # no order is asked for
COUNTS = np.array([40, 0, 21], np.int32)


def full(*shape):
    return np.full(shape, 7, ml_dtypes.bfloat16)


def bf16_operands(*shape):
    return rows(*shape, K).astype(ml_dtypes.bfloat16), rows(GROUPS, N, K).astype(ml_dtypes.bfloat16)


def load(operands, recipe, lend=lambda array: array, **more):
    given = {"recipe_b": recipe["recipe_b"]} if "recipe_b" in recipe else recipe
    return deepgemm.load_grouped_weights(tuple(map(lend, operands.b)), **given, **more)


class Calls:
    """`lend` makes a tensor, where the weights are."""

    def rows_of(self, operands):
        """Scales with neighbouring rows beside each other, as DeepGEMM's casts leave them."""
        values, scales = operands.a
        if scales.dtype == np.float32:
            scales = deepgemm.get_mn_major_tma_aligned_tensor(scales)
        return self.lend(values), self.lend(scales)

    def assert_like(self, kind, got, expected, written):
        """Rows of `expected` that are not written are 7 in both."""
        wide = got.float().cpu().numpy().astype(np.float64)
        self.assertLess(error(wide[written], expected[written].astype(np.float64)), BOUND[kind])
        np.testing.assert_array_equal(wide[~written], expected[~written].astype(np.float64))

    def test_contiguous(self):
        for kind, columns, is_packed, recipe in RECIPES:
            operands = Operands(kind, LAYOUT.shape, columns, is_packed)
            weights = load(operands, recipe)
            for zero in (True, False):
                with self.subTest(kind=kind, recipe=recipe, zero=zero):
                    expected, d = full(len(LAYOUT), N), self.lend(full(len(LAYOUT), N))
                    more = {**recipe, "ensure_zero_padding": zero}
                    deepgemm.m_grouped_fp8_gemm_nt_contiguous(operands.a, operands.b, expected, LAYOUT, **more)
                    deepgemm.m_grouped_fp8_gemm_nt_contiguous(self.rows_of(operands), weights, d, self.lend(LAYOUT), **more)
                    self.assert_like(kind, d, expected, LAYOUT >= 0)

    def test_ends_of_groups(self):
        self.addCleanup(deepgemm.set_mk_alignment_for_contiguous_layout, 128)
        for alignment in (128, 48):
            deepgemm.set_mk_alignment_for_contiguous_layout(alignment)
            ends, count = np.array([45, 45, alignment + 33], np.int32), 2 * alignment
            operands, expected, d = Operands("fp8_block", (count,)), full(count, N), self.lend(full(count, N))
            given = {"use_psum_layout": True, "ensure_zero_padding": False}
            deepgemm.m_grouped_fp8_gemm_nt_contiguous(operands.a, operands.b, expected, ends, **given)
            deepgemm.m_grouped_fp8_gemm_nt_contiguous(self.rows_of(operands), load(operands, {}), d, self.lend(ends), **given)
            with self.subTest(alignment=alignment):
                place = np.arange(count)
                self.assert_like("fp8_block", d, expected, (place < 45) | ((place >= alignment) & (place < alignment + 33)))

    def test_masked(self):
        written = np.arange(50) < COUNTS[:, None]
        for kind, columns, is_packed, recipe in RECIPES:
            operands = Operands(kind, (GROUPS, 50), columns, is_packed)
            expected, d = full(GROUPS, 50, N), self.lend(full(GROUPS, 50, N))
            deepgemm.m_grouped_fp8_gemm_nt_masked(operands.a, operands.b, expected, COUNTS, 30, **recipe)
            weights = load(operands, recipe, most_rows=0)
            deepgemm.m_grouped_fp8_gemm_nt_masked(self.rows_of(operands), weights, d, self.lend(COUNTS), 30, **recipe)
            with self.subTest(kind=kind, recipe=recipe):
                self.assert_like(kind, d, expected, written)

    def test_bf16(self):
        (flat, b), (blocks, _) = bf16_operands(len(LAYOUT)), bf16_operands(GROUPS, 50)
        weights = deepgemm.load_grouped_weights(b)
        expected, d = full(len(LAYOUT), N), self.lend(full(len(LAYOUT), N))
        deepgemm.m_grouped_bf16_gemm_nt_contiguous(flat, b, expected, LAYOUT)
        deepgemm.m_grouped_bf16_gemm_nt_contiguous(self.lend(flat), weights, d, self.lend(LAYOUT))
        self.assert_like("bf16", d, expected, LAYOUT >= 0)
        expected, d = full(GROUPS, 50, N), self.lend(full(GROUPS, 50, N))
        deepgemm.m_grouped_bf16_gemm_nt_masked(blocks, b, expected, COUNTS, 30)
        deepgemm.m_grouped_bf16_gemm_nt_masked(self.lend(blocks), weights, d, self.lend(COUNTS), 30)
        self.assert_like("bf16", d, expected, np.arange(50) < COUNTS[:, None])

    def test_refusals(self):
        operands = Operands("fp8_block", LAYOUT.shape)
        weights, d, layout = load(operands, {}), self.lend(full(len(LAYOUT), N)), self.lend(LAYOUT)
        values, scales = self.rows_of(operands)
        product = deepgemm.m_grouped_fp8_gemm_nt_contiguous
        for act, words in (
            (lambda: product(values, weights, d, layout), "a: expected a pair of values and scales"),
            (lambda: product((scales, scales), weights, d, layout), "a\\[0\\]: expected float8_e4m3fn rows, got torch.float32"),
            (lambda: product((values, scales), weights, d, layout, epilogue=1), "epilogue: expected None"),
            (lambda: product((values, scales), weights, d, layout, recipe=(128, 1, 128)), "a: expected a scale of a row"),
            (lambda: deepgemm.m_grouped_fp8_gemm_nt_masked((values, scales), weights, d, layout, 0), "expected_m: expected at least 1"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                act()


class OnHost:
    """_core.RankGroupedProduct's calls, by the host engine."""

    def __init__(self, kind, weights, weight_scales, gpu, most_rows):
        self.weights = kind, weights, weight_scales
        self.groups = len(weights)

    def throw_if_failed(self):
        pass

    def contiguous(self, values, scales, how, groups, zeroes, out, expected_rows, stream):
        assert stream == 7
        if self.weights[0] == "mxfp8":
            assert values.dtype == torch.bfloat16
            values = values.to(torch.float8_e4m3fn).view(torch.uint8)
        if scales is not None:
            assert scales.is_contiguous() and (how.scale == "f32" or scales.shape[-1] % 4 == 0)
            scales = scales[..., : -(-values.shape[-1] // how.group)].contiguous()
        _core.grouped_product_into(values, scales, how, *self.weights, groups, out)
        if zeroes:
            out[groups < 0] = 0

    def ended(self, values, scales, how, ends, alignment, zeroes, out, expected_rows, stream):
        assert alignment == deepgemm.get_mk_alignment_for_contiguous_layout()
        groups = torch.from_numpy(deepgemm._groups_of_ends(ends, len(values)))
        self.contiguous(values, scales, how, groups, zeroes, out, expected_rows, stream)

    def masked(self, values, scales, how, counts, out, expected_rows, stream):
        assert expected_rows == 30
        place, group = torch.arange(values.shape[1]), torch.arange(self.groups, dtype=torch.int32)[:, None]
        groups = torch.where(place < counts[:, None], group, -1).reshape(-1)
        flat = [None if part is None else part.flatten(0, 1) for part in (values, scales, out)]
        self.contiguous(flat[0], flat[1], how, groups, False, flat[2], expected_rows, stream)


@unittest.skipIf(torch is None, "torch is not here")
class OnStandIn(Calls, unittest.TestCase):
    def setUp(self):
        for name, stand_in in (
            ("_core", SimpleNamespace(RankGroupedProduct=OnHost)),
            ("is_on_gpu", lambda array: isinstance(array, torch.Tensor)),
            ("current_stream", lambda array: 7),
            ("lend", lambda array: array),
            ("need_cuda_part", lambda: None),
        ):
            patch = mock.patch.object(deepgemm_grouped, name, stand_in)
            patch.start()
            self.addCleanup(patch.stop)

    def lend(self, array):
        return to("torch", array)


class Loose(unittest.TestCase):
    def test_a_gpus_tensors_without_loaded_weights(self):
        there = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        for act in (
            lambda: deepgemm.m_grouped_fp8_gemm_nt_contiguous((there, there), (there, there), there, there),
            lambda: deepgemm.m_grouped_bf16_gemm_nt_masked(there, there, there, there, 1),
        ):
            with self.assertRaisesRegex(heddle.InputError, "b: expected what load_grouped_weights returned"):
                act()

    @unittest.skipIf(device.is_built(), "the CUDA part is here")
    def test_without_the_cuda_part(self):
        with self.assertRaisesRegex(heddle.Error, "built without the CUDA part"):
            deepgemm.load_grouped_weights(bf16_operands(1)[1])


@unittest.skipIf(why_not(), why_not())
class OnGpu(Calls, unittest.TestCase):
    def lend(self, array):
        return to("torch", array).cuda()

    def test_weights_of_a_gpu_and_a_graph(self):
        operands = Operands("fp8_block", (GROUPS, 50))
        here, there = load(operands, {}), load(operands, {}, self.lend)
        self.assertGreaterEqual(here.weight_bytes, GROUPS * N * K)
        a, counts = self.rows_of(operands), self.lend(COUNTS)
        expected, d = self.lend(full(GROUPS, 50, N)), self.lend(full(GROUPS, 50, N))
        deepgemm.m_grouped_fp8_gemm_nt_masked(a, here, expected, counts, 30)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            deepgemm.m_grouped_fp8_gemm_nt_masked(a, there, d, counts, 30)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(d, expected))
        counts.copy_(self.lend(np.array([1, 50, 0], np.int32)))
        d.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(d[0, :1], expected[0, :1]) and (d[0, 1:] == 7).all() and (d[2] == 7).all())
        self.assertFalse((d[1] == 7).all(dim=-1).any())

    def test_counts_and_sizes_that_do_not_fit(self):
        operands = Operands("fp8_block", (GROUPS, 50))
        weights, d = load(operands, {}, most_rows=100), self.lend(full(GROUPS, 50, N))
        a = self.rows_of(operands)
        deepgemm.m_grouped_fp8_gemm_nt_masked(a, weights, d, self.lend(np.array([1, 51, 0], np.int32)), 30)
        torch.cuda.synchronize()
        with self.assertRaisesRegex(heddle.Error, "found 51 rows for group 1"):
            weights.throw_if_failed()
        flat, layout = (a[0].flatten(0, 1), a[1].flatten(0, 1)), self.lend(np.zeros(150, np.int32))
        with self.assertRaisesRegex(heddle.InputError, "150 rows; the options allow 0 to 100"):
            deepgemm.m_grouped_fp8_gemm_nt_contiguous(flat, weights, d.flatten(0, 1), layout)
        with self.assertRaisesRegex(heddle.InputError, "a: expected a tensor of GPU 0"):
            deepgemm.m_grouped_fp8_gemm_nt_masked(operands.a, weights, d, self.lend(COUNTS), 30)
        with self.assertRaisesRegex(heddle.InputError, "scales: expected float32 \\[3, 50, 2\\]"):
            deepgemm.m_grouped_fp8_gemm_nt_masked((a[0], a[1][..., :1]), weights, d, self.lend(COUNTS), 30)


if __name__ == "__main__":
    unittest.main()
