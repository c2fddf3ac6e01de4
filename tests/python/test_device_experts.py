"""Experts on a GPU with torch's tensors, alone and under vLLM's calls, against the host engine. Skipped without the CUDA part,
torch, or a GPU."""

import unittest
from types import SimpleNamespace

import adapted
import support
from stored import draw
from test_device import why_not

import heddle
import ml_dtypes
import numpy as np
import oracle
from adapted import to
from heddle import device
from heddle.adapters import vllm, vllm_base

try:
    import torch
except ImportError:
    torch = None

HIDDEN, WIDE, EXPERTS = 256, 128, 4
BOUND = {"bf16": 4e-3, "fp8_block": 1.5e-2, "mxfp4": 1.5e-2}  # docs/numerics.md
HOW = heddle.Quantisation(128, "f32")


def rows(*shape):
    return np.random.default_rng([support.SEED, *shape]).normal(size=(*shape, HIDDEN)).astype(ml_dtypes.bfloat16)


def factors(*shape):
    return np.random.default_rng([support.SEED, *shape]).uniform(0.1, 1, shape).astype(np.float32)


def cuda(array):
    return to("torch", np.ascontiguousarray(array)).cuda()


class Layer:
    def __init__(self, kind):
        random = np.random.default_rng(support.SEED)
        self.kind = kind
        self.w1, self.w1_scale = draw(random, kind, EXPERTS, 2 * WIDE, HIDDEN)
        self.w2, self.w2_scale = draw(random, kind, EXPERTS, HIDDEN, WIDE)
        source = heddle.Source.of_fused_arrays(
            self.w1, self.w2, topk=2, kind=kind, gate_up_scales=self.w1_scale, down_scales=self.w2_scale
        )
        self.weights = source.load(0, 1)


@unittest.skipIf(why_not(), why_not())
class OnGpu(unittest.TestCase):
    def assert_close(self, kind, out, expected):
        self.assertLess(oracle.relative_error(out.float().cpu().numpy(), expected.astype(np.float64)), BOUND[kind])

    def test_runners(self):
        counts, begins = np.array([60, 0, 17, 1], np.int32), np.arange(EXPERTS, dtype=np.int32) * 64
        given, weights = rows(EXPERTS, 64), factors(EXPERTS, 64)
        flat = given.reshape(-1, HIDDEN)
        ids = np.argsort(np.random.default_rng(support.SEED).random((50, EXPERTS)), axis=1)[:, :2].astype(np.int32)
        ids[::7, 1] = -1
        for kind in BOUND:
            layer, options = Layer(kind), heddle.ExpertOptions(quantisation=HOW, weight_at="combine" if kind == "bf16" else "activation")
            host = heddle.Experts(layer.weights, options)
            experts = device.DeviceExperts(layer.weights, options, most_rows=EXPERTS * 64, most_tokens=50, topk=2)
            self.assertGreater(experts.weight_bytes, 0)
            with self.subTest(kind=kind, runner="masked"):
                out = torch.zeros(EXPERTS, 64, HIDDEN, dtype=torch.bfloat16, device="cuda")
                experts.masked(cuda(given), cuda(counts), cuda(weights), out)
                self.assert_close(kind, out, host.masked(given, counts, weights, np.zeros_like(given)))
            with self.subTest(kind=kind, runner="contiguous"):
                out = torch.zeros(EXPERTS * 64, HIDDEN, dtype=torch.bfloat16, device="cuda")
                experts.contiguous(cuda(flat), cuda(begins), cuda(counts), cuda(weights.reshape(-1)), out)
                self.assert_close(kind, out, host.contiguous(flat, begins, counts, weights.reshape(-1), np.zeros_like(flat)))
            with self.subTest(kind=kind, runner="routed"):
                out = experts.routed(cuda(flat[:50]), cuda(ids), cuda(factors(50, 2)))
                self.assert_close(kind, out, host.routed(flat[:50], ids, factors(50, 2)))
            torch.cuda.synchronize()
            experts.throw_if_failed()

    def test_fp8_rows_and_a_graph(self):
        layer, options = Layer("fp8_block"), heddle.ExpertOptions(quantisation=HOW)
        experts = device.DeviceExperts(layer.weights, options, most_rows=EXPERTS * 8)
        given, counts = rows(EXPERTS, 8), np.array([8, 2, 0, 3], np.int32)
        codes, scales = heddle.formats.quantise_fp8(given.reshape(-1, HIDDEN).astype(np.float32), HOW)
        fp8 = cuda(codes.reshape(given.shape)), cuda(scales.reshape(EXPERTS, 8, -1))
        plain, taken, found = cuda(given), torch.zeros_like(cuda(given)), cuda(counts)
        expected = experts.masked(plain, found, out=torch.zeros_like(plain))
        experts.masked(fp8, found, out=taken)
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(taken, expected))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            experts.masked(fp8, found, out=taken)
        taken.zero_()
        found.copy_(cuda(np.array([1, 2, 0, 3], np.int32)))
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(taken[1:], expected[1:]) and torch.equal(taken[0, :1], expected[0, :1]))
        self.assertEqual(taken[0, 1:].abs().max().item(), 0)

    def test_vllm(self):
        """The same calls with arrays of both kinds."""
        for kind in ("bf16", "fp8_block"):
            layer, is_fp8 = Layer(kind), kind == "fp8_block"
            quant = {"quant_dtype": torch.float8_e4m3fn if is_fp8 else None, "block_shape": [128, 128]}
            ids, weights = np.array([[0, 3], [1, 5], [7, -1], [2, 0]]), factors(4, 2)
            places = np.array([0, 1, 2, 3, -1, -1, -1, -1], np.int32)
            standard, batched = rows(4), rows(EXPERTS, 6)
            meta = vllm_base.ExpertTokensMetadata(np.array([6, 0, 2, 1], np.int32), None)
            results = []
            for lend in (lambda array: array, cuda):
                scales = {"w1_scale": lend(layer.w1_scale), "w2_scale": lend(layer.w2_scale)} if is_fp8 else {}
                config = SimpleNamespace(**quant, **scales)
                w1, w2 = lend(layer.w1), lend(layer.w2)
                counts = SimpleNamespace(expert_num_tokens=lend(meta.expert_num_tokens))
                common = lend(weights), lend(ids), "silu", 8, lend(places), None, None, None, None, counts, False
                outs = []
                for given, make in ((standard, vllm.HeddleExperts), (batched, vllm.HeddleBatchedExperts)):
                    experts = make(SimpleNamespace(swiglu_limit=None), config, *((6, 1) if given is batched else ()))
                    out = lend(np.zeros_like(given))
                    experts.apply(out, lend(given), w1, w2, *common)
                    outs.append(out)
                results.append(outs)
            torch.cuda.synchronize()
            for expected, out in zip(*results):
                with self.subTest(kind=kind, shape=out.shape):
                    self.assert_close(kind, out, expected)

    def test_wrong_tensors(self):
        experts = device.DeviceExperts(Layer("bf16").weights, most_rows=8, most_tokens=2, topk=2)
        given, ids, weights = cuda(rows(4)), cuda(np.zeros((4, 2), np.int32)), cuda(factors(4, 2))
        with self.assertRaisesRegex(heddle.InputError, "rows: expected bfloat16 .*, in CUDA device 0; got .* host memory"):
            experts.routed(given.cpu(), ids, weights, torch.empty_like(given), stream=0)
        with self.assertRaisesRegex(heddle.InputError, "routed runner: 4 tokens; the options allow 0 to 2"):
            experts.routed(given, ids, weights)
        with self.assertRaisesRegex(heddle.InputError, "out: expected memory for the results of fp8 rows"):
            experts.masked((given, given), ids)


if __name__ == "__main__":
    unittest.main()
