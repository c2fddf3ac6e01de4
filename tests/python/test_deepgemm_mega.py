"""DeepGEMM's mega MoE: layers and steps of tokens that are written into one buffer, as its users call it."""

import unittest
import warnings

import adapted
import support
from adapted import EXPERTS, TOPK, Batch, back, to, tokens_of
from stored import draw, swiglu, widened
from test_deepgemm import packed
from test_device import why_not

import heddle
import ml_dtypes
import numpy as np
import oracle
from heddle.adapters import deepgemm

HIDDEN, WIDE, MOST = 128, 128, 16
KINDS = {"fp8xfp4": "mxfp4", "fp8xfp8": "mxfp8", "bf16xbf16": "bf16"}
GROUP = heddle.Quantisation(32, "ue8m0")


class Layer:
    """One layer's weights as DeepGEMM's users have them before the transform, and their values."""

    def __init__(self, number, mma_type):
        self.mma_type, kind = mma_type, KINDS[mma_type]
        random = np.random.default_rng([support.SEED, number])
        self.stored = draw(random, kind, EXPERTS, 2 * WIDE, HIDDEN), draw(random, kind, EXPERTS, HIDDEN, WIDE)
        self.values = [widened(kind, *stored) for stored in self.stored]

    def of_rank(self, kind, rank, ranks):
        here = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        given = []
        for values, scales in self.stored:
            values = values[here].view(np.int8) if self.mma_type == "fp8xfp4" else values[here]
            given.append(to(kind, values) if scales is None else (to(kind, values), to(kind, packed(scales[here]))))
        return deepgemm.transform_weights_for_mega_moe(*given)

    def rounded(self, rows):
        if self.mma_type == "bf16xbf16":
            return rows.astype(ml_dtypes.bfloat16).astype(np.float64)
        return heddle.formats.widen_fp8(*heddle.formats.quantise_fp8(rows.astype(np.float32), GROUP), GROUP).astype(np.float64)

    def expected(self, batch, clamp):
        """float64, rounded where docs/numerics.md says."""
        out, rows = np.zeros(batch.hidden.shape), self.rounded(batch.hidden)
        for token, choice in np.argwhere(batch.ids >= 0):
            expert = batch.ids[token, choice]
            gate_up = (self.values[0][expert] @ rows[token]).astype(ml_dtypes.bfloat16).astype(np.float64)
            active = self.rounded((swiglu(gate_up, clamp) * batch.weights[token, choice])[None])[0]
            out[token] += self.values[1][expert] @ active
        return out


def write(buffer, batch, kind):
    """Tokens into the first rows of the buffer."""
    tokens, (_, ids, weights) = len(batch.hidden), batch.given(kind)
    if buffer.x_sf is None:
        buffer.x[:tokens] = to(kind, batch.hidden)
    else:
        codes, scales = heddle.formats.quantise_fp8(batch.hidden.astype(np.float32), GROUP)
        buffer.x[:tokens] = to(kind, codes)
        buffer.x_sf[:tokens] = to(kind, np.ascontiguousarray(packed(scales)) if tokens else np.zeros((0, 1), np.int32))
    buffer.topk_idx[:tokens] = ids
    buffer.topk_weights[:tokens] = weights


def call(buffer, batch, weights, kind, **more):
    write(buffer, batch, kind)
    y = to(kind, np.full((len(batch.hidden), HIDDEN), 7, ml_dtypes.bfloat16))
    function = deepgemm.bf16_mega_moe if buffer.x_sf is None else deepgemm.fp8_fp4_mega_moe
    function(y, *weights, buffer, **more)
    return back(y)


def make(group, mma_type, kind):
    like = to(kind, np.zeros(0, np.float32))
    return deepgemm.SymmBuffer(group, EXPERTS, MOST, TOPK, HIDDEN, WIDE, mma_type=mma_type, like=like)


class Mega(unittest.TestCase):
    def check(self, layer, batch, out, clamp=None):
        self.assertEqual(out.shape, batch.hidden.shape)
        if len(out):
            bound = support.BOUND["bf16" if layer.mma_type == "bf16xbf16" else "fp8"]
            self.assertLess(oracle.relative_error(out, layer.expected(batch, clamp)), bound)

    def test_layers_and_steps(self):
        for mma_type in KINDS:
            layers = [Layer(0, mma_type), Layer(1, mma_type)]
            for kind in adapted.kinds(self):
                for ranks in (1, 2, 4):

                    def main(group, layers=layers, mma_type=mma_type, kind=kind, ranks=ranks):
                        buffer = make(group, mma_type, kind)
                        weights = [layer.of_rank(kind, group.rank, ranks) for layer in layers]
                        for step, base in enumerate((9, 1, 12)):
                            batch = Batch(group.rank, tokens_of(group.rank, ranks, base), step)
                            for layer, own in zip(layers, weights):
                                self.check(layer, batch, call(buffer, batch, own, kind))

                    with self.subTest(mma_type=mma_type, kind=kind, ranks=ranks):
                        heddle.run_threads(ranks, main, deadline=20)

    def test_clamps_and_counts(self):
        layer = Layer(0, "fp8xfp4")

        def main(group):
            buffer, weights = make(group, "fp8xfp4", "numpy"), layer.of_rank("numpy", group.rank, group.ranks)
            batches = [Batch(rank, tokens_of(rank, group.ranks, 6)) for rank in range(group.ranks)]
            stats = np.zeros(EXPERTS // group.ranks, np.int32)
            for clamp in (None, 0.5, None):
                out = call(
                    buffer, batches[group.rank], weights, "numpy", activation_clamp=clamp, cumulative_local_expert_recv_stats=stats
                )
                self.check(layer, batches[group.rank], out, clamp)
            chosen = np.concatenate([batch.ids[batch.ids >= 0] for batch in batches])
            counts = np.bincount(chosen, minlength=EXPERTS).reshape(group.ranks, -1)[group.rank]
            np.testing.assert_array_equal(stats, 3 * counts)

        for ranks in (1, 4):
            heddle.run_threads(ranks, main, deadline=20)

    def test_scales_make_a_layer(self):
        """The same values with other scales are other weights."""
        group, layer = heddle.thread_group(1)[0], Layer(0, "fp8xfp4")
        buffer, batch = make(group, "fp8xfp4", "numpy"), Batch(0, 5)
        (first, scales), (second, second_scales) = layer.stored
        first, second, doubled = first.view(np.int8), second.view(np.int8), (2 * scales.astype(np.float32)).astype(scales.dtype)
        for of_first in (scales, doubled):
            weights = deepgemm.transform_weights_for_mega_moe((first, packed(of_first)), (second, packed(second_scales)))
            layer.values[0] = widened("mxfp4", layer.stored[0][0], of_first)
            self.check(layer, batch, call(buffer, batch, weights, "numpy"))

    def test_rows_keep_their_values(self):
        """Scales that are larger than a group needs."""
        group = heddle.thread_group(1)[0]
        layer, buffer, batch = Layer(0, "fp8xfp4"), make(group, "fp8xfp4", "numpy"), Batch(0, 5)
        weights = layer.of_rank("numpy", 0, 1)
        expected = call(buffer, batch, weights, "numpy")
        codes, scales = heddle.formats.quantise_fp8(batch.hidden.astype(np.float32), GROUP)
        wide = heddle.formats.widen_fp8(codes, scales, GROUP)
        larger = (scales.astype(np.float32) * 4).astype(scales.dtype)
        smaller = (wide.reshape(5, -1, 32) / larger.astype(np.float32)[:, :, None]).reshape(5, -1).astype(ml_dtypes.float8_e4m3fn)
        kept = heddle.formats.widen_fp8(smaller, larger, GROUP)
        buffer.x[:5], buffer.x_sf[:5] = smaller, packed(larger)
        out = np.empty((5, HIDDEN), ml_dtypes.bfloat16)
        deepgemm.fp8_fp4_mega_moe(out, *weights, buffer)
        same = (kept == wide).all(axis=1) & (batch.ids >= 0).any(axis=1)
        self.assertTrue(same.any())
        np.testing.assert_array_equal(support.bits(out[same]), support.bits(expected[same]))

    @unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
    def test_rows_on_a_gpu_are_those_of_the_host(self):
        """torch's way to widen them, in host memory."""
        group = heddle.thread_group(1)[0]
        for mma_type in ("fp8xfp4", "bf16xbf16"):
            buffer, batch = make(group, mma_type, "torch"), Batch(0, 6)
            write(buffer, batch, "torch")
            for tokens in (6, 1, 0):
                given, expected = (tuple(map(back, buffer._tokens_on_gpu(tokens))), buffer._tokens(tokens))
                for one, other in zip(given, expected, strict=True):
                    self.assertEqual(one.dtype, other.dtype)
                    np.testing.assert_array_equal(one, other)

    def test_a_fault_and_a_reset(self):
        layer = Layer(0, "bf16xbf16")

        def main(group):
            buffer, batch = make(group, "bf16xbf16", "numpy"), Batch(group.rank, 4)
            weights = layer.of_rank("numpy", group.rank, 2)
            for is_first in (True, False):
                if group.rank == 0:
                    with self.assertRaises(heddle.FaultError):
                        call(buffer, batch, weights, "numpy")
                buffer.reset()
                self.check(layer, batch, call(buffer, batch, weights, "numpy"))
            again = deepgemm.SymmBuffer(group, EXPERTS, MOST, TOPK, HIDDEN, WIDE, mma_type="bf16xbf16", base=buffer, like=buffer.x)
            buffer.destroy()
            self.check(layer, batch, call(again, batch, weights, "numpy"))

        heddle.run_threads(2, main, deadline=1.5)

    def test_refusals(self):
        group = heddle.thread_group(1)[0]
        layer, batch = Layer(0, "fp8xfp4"), Batch(0, 4)
        buffer, weights = make(group, "fp8xfp4", "numpy"), layer.of_rank("numpy", 0, 1)
        write(buffer, batch, "numpy")
        y, plain = np.zeros((4, HIDDEN), ml_dtypes.bfloat16), Layer(0, "bf16xbf16").of_rank("numpy", 0, 1)
        for change, words in (
            ({"y": y.astype(np.float32)}, "y: expected bfloat16 \\[tokens, 128\\]"),
            ({"y": np.zeros((MOST + 1, HIDDEN), y.dtype)}, "y: expected at most num_max_tokens_per_rank = 16 tokens, got 17"),
            ({"l1_weights": layer.stored[0]}, "expected what transform_weights_for_mega_moe returned"),
            ({"l1_weights": plain[0]}, "l1_weights: expected mxfp4 \\[8, 256, 64\\], got bf16 \\[8, 256, 128\\]"),
            ({"l2_weights": weights[0]}, "l2_weights: expected mxfp4 \\[8, 128, 64\\], got mxfp4 \\[8, 256, 64\\]"),
            ({"shared_l1_weights": weights[0]}, "shared_l1_weights: expected None, got MegaWeights"),
            ({"activation": "situ"}, "activation: expected swiglu, got situ"),
            ({"activation_alpha": 1.7}, "activation_alpha, activation_beta: expected 1 and 0, got 1.7 and 0.0"),
            ({"recipe": (1, 1, 128)}, "expected recipe \\(1, 1, 32\\)"),
            ({"cumulative_local_expert_recv_stats": np.zeros(3, np.int32)}, "recv_stats: expected int32 \\[8\\], got int32 \\[3\\]"),
        ):
            given = {"y": y, "l1_weights": weights[0], "l2_weights": weights[1], "sym_buffer": buffer, **change}
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                deepgemm.fp8_fp4_mega_moe(**given)
        large, stats = deepgemm.SymmBuffer(group, EXPERTS, 65536, TOPK, HIDDEN, WIDE, like=y), np.zeros(EXPERTS, np.int32)
        with self.assertRaisesRegex(heddle.InputError, "at most 1000 experts and 65535 tokens a rank, got 8 and 65536"):
            deepgemm.fp8_fp4_mega_moe(y, *weights, large, cumulative_local_expert_recv_stats=stats)
        buffer.topk_idx[0, 0] = EXPERTS
        with self.assertRaisesRegex(heddle.InputError, "topk_idx: expected -1 to 7"):
            deepgemm.fp8_fp4_mega_moe(y, *weights, buffer)
        with self.assertRaisesRegex(heddle.InputError, "sym_buffer: expected mma_type bf16xbf16, got fp8xfp4"):
            deepgemm.bf16_mega_moe(y, *plain, buffer)
        sizes = EXPERTS, MOST, TOPK, HIDDEN, WIDE
        for more, words in (
            ({"num_shared_experts": 1}, "num_shared_experts: expected 0, got 1"),
            ({"mma_type": "nvfp4"}, "mma_type: expected fp8xfp4 or fp8xfp8 or bf16xbf16, got nvfp4"),
            ({"use_fp8_dispatch": False}, "use_fp8_dispatch: expected True with mma_type fp8xfp4, got False"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                deepgemm.get_symm_buffer_for_mega_moe(group, *sizes, **more)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.assertEqual(deepgemm.get_symm_buffer_for_mega_moe(group, *sizes, use_fp8_dispatch=True).mma_type, "fp8xfp4")
        self.assertEqual([one.category for one in seen], [DeprecationWarning])


# Two processes as torchrun starts them, each with its experts and its tokens, against the reference over all experts.
LAUNCHED = """
import heddle, torch
from heddle.adapters import deepgemm
torch.distributed.init_process_group("gloo")
group = torch.distributed.group.WORLD
torch.manual_seed(7)
w1, w2 = ((0.1 * torch.randn(4, rows, 128)).bfloat16() for rows in (256, 128))
here = slice(2 * group.rank(), 2 * group.rank() + 2)
buffer = deepgemm.get_symm_buffer_for_mega_moe(group, 4, 8, 2, 128, 128, mma_type="bf16xbf16")
weights = deepgemm.transform_weights_for_mega_moe(w1[here], w2[here])
x, ids = torch.randn(3 + group.rank(), 128).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, -1], [2, 1]])[: 3 + group.rank()]
buffer.x[: len(x)].copy_(x)
buffer.topk_idx[: len(x)].copy_(ids)
buffer.topk_weights[: len(x)].fill_(0.5)
y = torch.empty_like(x)
deepgemm.bf16_mega_moe(y, *weights, buffer)
source = heddle.Source.of_fused_arrays(w1, w2, topk=2)
options = heddle.LayerOptions(cap=8, way="mega")
expected = heddle.reference(source, x, ids.int(), torch.full(ids.shape, 0.5), options)
assert (y.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()
torch.distributed.destroy_process_group()
"""


class Launched(unittest.TestCase):
    @unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
    def test_a_process_group_of_torch(self):
        support.launch_text(LAUNCHED, 2)


@unittest.skipIf(why_not(), why_not())
class OnGpu(unittest.TestCase):
    def test_against_the_host_engine(self):
        """Two layers on one GPU, with other tokens every step, and in a graph."""
        torch = adapted.torch
        group = heddle.thread_group(1)[0]
        for mma_type, bound in (("fp8xfp4", 1.5e-2), ("bf16xbf16", 4e-3)):
            layers, host = [Layer(0, mma_type), Layer(1, mma_type)], make(group, mma_type, "torch")
            sizes = EXPERTS, MOST, TOPK, HIDDEN, WIDE
            buffer = deepgemm.SymmBuffer(group, *sizes, mma_type=mma_type, like=torch.empty(0, device="cuda"))
            function = deepgemm.bf16_mega_moe if buffer.x_sf is None else deepgemm.fp8_fp4_mega_moe
            weights = [layer.of_rank("torch", 0, 1) for layer in layers]
            for step, tokens in enumerate((9, 0, MOST)):
                batch = Batch(0, tokens, step)
                for own in weights:
                    expected = call(host, batch, own, "torch").astype(np.float64)
                    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                        if getattr(host, name) is not None:
                            getattr(buffer, name).copy_(getattr(host, name))
                    y = torch.full((tokens, HIDDEN), 7.0, dtype=torch.bfloat16, device="cuda")
                    function(y, *own, buffer)
                    torch.cuda.synchronize()
                    if tokens:
                        self.assertLess(oracle.relative_error(y.float().cpu().numpy(), expected), bound)
            graph, again = torch.cuda.CUDAGraph(), torch.empty_like(y)
            with torch.cuda.graph(graph):
                function(again, *weights[1], buffer)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(again, y))
            with self.assertRaisesRegex(heddle.InputError, "expected None: rows of experts are not counted on a GPU"):
                function(y, *weights[0], buffer, cumulative_local_expert_recv_stats=torch.zeros(EXPERTS, dtype=torch.int32))


if __name__ == "__main__":
    unittest.main()
