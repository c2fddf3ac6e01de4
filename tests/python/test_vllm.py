"""vLLM's modular kernel over Heddle: the calls that it makes for several layers and steps, here and by its own sources."""

import subprocess
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import adapted
import pinned
from adapted import EXPERTS, HIDDEN, TOPK, Batch, Layer, back, check, first_expert, to, tokens_of
from stored import draw, swiglu, widened

import heddle
import ml_dtypes
import numpy as np
import oracle
import support
from heddle.adapters import vllm, vllm_base
from heddle.adapters.deepep import Buffer

LAYERS = [Layer(0), Layer(1)]
MOST = 16
PLAIN = SimpleNamespace(quant_dtype=None)
NO_MODEL = SimpleNamespace(swiglu_limit=None)


class Pair:
    """Prepare and finalize of one layer on one rank, its experts, and their weights as vLLM keeps them."""

    def __init__(self, buffer, layer, batched, kind, quant_config=PLAIN, **more):
        ranks, local = buffer.group_size, EXPERTS // buffer.group_size
        first = first_expert(buffer.rank, ranks)
        here = slice(first, first + local)
        self.kind, self.local = kind, local
        self.w1 = to(kind, np.concatenate([layer.gate[here], layer.up[here]], axis=1))
        self.w2 = to(kind, layer.down[here])
        places = np.full(EXPERTS, -1, np.int32)
        places[here] = np.arange(local)
        self.expert_map = to(kind, places)
        if batched:
            self.carrier = vllm.HeddleBatchedPrepareAndFinalize(buffer, MOST, ranks, **more)
            self.experts = vllm.HeddleBatchedExperts(NO_MODEL, quant_config, MOST, ranks)
        else:
            self.carrier = vllm.HeddlePrepareAndFinalize(buffer, ranks, 1, first)
            self.experts = vllm.HeddleExperts(NO_MODEL, quant_config)

    def call(self, hidden, ids, weights, on_input=False, is_async=False):
        """As vLLM's kernel does it."""
        carrier, experts = self.carrier, self.experts
        assert carrier.activation_format == experts.activation_format()
        given = hidden, weights, ids, EXPERTS, self.expert_map, on_input, experts.quant_config, experts.expects_unquantized_inputs
        rows, scales, meta, own_ids, own_weights = carrier.prepare_async(*given)() if is_async else carrier.prepare(*given)
        ids, weights = ids if own_ids is None else own_ids, weights if own_weights is None else own_weights
        results = self.run(rows, scales, meta, ids, weights, on_input)
        out = to(self.kind, np.full((len(hidden), HIDDEN), 7, ml_dtypes.bfloat16))
        last = out, results, weights, ids, on_input, experts.finalize_weight_and_reduce_impl()
        carrier.finalize_async(*last)() if is_async else carrier.finalize(*last)
        return out

    def run(self, rows, scales, meta, ids, weights, on_input):
        tokens = int(rows.shape[-2])
        if tokens == 0:
            return to(self.kind, np.zeros((0, HIDDEN), ml_dtypes.bfloat16))
        sizes = tokens, 2 * adapted.INTERMEDIATE, HIDDEN, int(ids.shape[1]), EXPERTS, self.local, meta, "silu"
        *workspaces, shape = self.experts.workspace_shapes(*sizes)
        results = to(self.kind, np.full(shape, 7, ml_dtypes.bfloat16))
        empty = [to(self.kind, np.zeros(of, ml_dtypes.bfloat16)) for of in workspaces]
        self.experts.apply(
            output=results,
            hidden_states=rows,
            w1=self.w1,
            w2=self.w2,
            topk_weights=weights,
            topk_ids=ids,
            activation="silu",
            global_num_experts=EXPERTS,
            expert_map=self.expert_map,
            a1q_scale=scales,
            a2_scale=self.experts.a2_scale,
            workspace13=empty[0],
            workspace2=empty[1],
            expert_tokens_meta=meta,
            apply_router_weight_on_input=on_input,
        )
        return results


class Steps(unittest.TestCase):
    def test_layers_and_steps(self):
        for kind in adapted.kinds(self):
            for ranks in (1, 2, 4):
                for batched in (False, True):

                    def main(group, kind=kind, ranks=ranks, batched=batched):
                        buffer = Buffer(group)
                        pairs = [(layer, Pair(buffer, layer, batched, kind)) for layer in LAYERS]
                        for step, base in enumerate((9, 3, 1, 12)):
                            for layer, pair in pairs:
                                batch = Batch(group.rank, tokens_of(group.rank, ranks, base), step)
                                check(self, layer, batch, pair.call(*batch.given(kind), is_async=step % 2 == 1))

                    with self.subTest(kind=kind, ranks=ranks, batched=batched):
                        heddle.run_threads(ranks, main, deadline=20)

    def test_a_rank_that_receives_nothing(self):
        """All choices are of rank 0: the others' experts are not called in the standard format."""

        def main(group):
            for batched in (False, True):
                pair, batch = Pair(Buffer(group), LAYERS[0], batched, "numpy"), Batch(group.rank, 5)
                batch.ids = np.tile(np.array([[0, 2, -1]], np.int32), (5, 1))
                check(self, LAYERS[0], batch, pair.call(*batch.given("numpy")))

        heddle.run_threads(2, main, deadline=20)

    def test_weights_on_the_input(self):
        def main(group):
            for batched in (False, True):
                pair, batch = Pair(Buffer(group), LAYERS[0], batched, "numpy"), Batch(group.rank, 6)
                hidden, ids, weights = (given[:, :1] if given.shape[1] == TOPK else given for given in batch.given("numpy"))
                out = pair.call(hidden, np.ascontiguousarray(ids), np.ascontiguousarray(weights), on_input=True)
                scaled = (hidden.astype(np.float32) * weights.astype(ml_dtypes.bfloat16).astype(np.float32)).astype(hidden.dtype)
                expected = np.zeros(hidden.shape)
                for token, expert in enumerate(ids[:, 0]):
                    if expert >= 0:
                        expected[token] = LAYERS[0].expert(expert, scaled[token : token + 1].astype(np.float32))[0]
                self.assertLess(oracle.relative_error(out, expected), adapted.BOUND)
                with self.assertRaisesRegex(heddle.InputError, "apply_router_weight_on_input: expected 1 choice a token, got 3"):
                    pair.call(*batch.given("numpy"), on_input=True)

        heddle.run_threads(2, main, deadline=20)

    def test_moved_experts(self):
        """Ids of the model, experts where a map says."""
        places = np.roll(np.arange(EXPERTS), 3)  # expert e lies at places[e]
        moved = Layer(0)
        for name in ("gate", "up", "down"):
            setattr(moved, name, getattr(LAYERS[0], name)[np.argsort(places)])

        def main(group):
            pair = Pair(Buffer(group), moved, True, "numpy", global_to_physical=places)
            batch = Batch(group.rank, 5)
            check(self, LAYERS[0], batch, pair.call(*batch.given("numpy")))

        heddle.run_threads(2, main, deadline=20)

    def test_after_a_fault(self):
        def main(group):
            for batched in (False, True):
                buffer, batch = Buffer(group), Batch(group.rank, 4)
                pair, given = Pair(buffer, LAYERS[0], batched, "numpy"), batch.given("numpy")
                check(self, LAYERS[0], batch, pair.call(*given))
                if group.rank == 0:
                    with self.assertRaises(heddle.FaultError):
                        pair.call(*given)
                buffer.reset()
                with self.assertRaisesRegex(heddle.InputError, "finalize: expected after prepare"):
                    pair.carrier.finalize(given[0], given[0], given[2], given[1], False, pair.experts.finalize_weight_and_reduce_impl())
                check(self, LAYERS[0], batch, pair.call(*given))

        heddle.run_threads(2, main, deadline=1.5)


class Standard(vllm_base.FusedMoEExpertsModular):
    """Experts as vLLM's own are: every id names an expert, the map says which are here."""

    layer, first = None, 0

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, *_, **__):
        assert topk_ids.min() >= 0
        local = expert_map[topk_ids]
        output[...] = adapted.routed_sums(self.layer, self.first, hidden_states, local, topk_weights)


class Batched(Standard):
    def apply(self, output, hidden_states, expert_tokens_meta, **_):
        for local, count in enumerate(expert_tokens_meta.expert_num_tokens):
            output[local, :count] = self.layer.expert(self.first + local, hidden_states[local, :count].astype(np.float32))


class Alone(vllm_base.FusedMoEPrepareAndFinalizeModular):
    """Prepare and finalize of a rank that has all experts."""

    def __init__(self, activation_format):
        self.activation_format = activation_format

    def prepare(self, a1, *_):
        return a1, None, None, None, None

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl):
        weight_and_reduce_impl.apply(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)


class OthersHalves(unittest.TestCase):
    def test_experts_of_vllms_kind(self):
        def main(group):
            for batched, kind in ((False, Standard), (True, Batched)):
                pair = Pair(Buffer(group), LAYERS[0], batched, "numpy")
                theirs = kind(NO_MODEL, PLAIN)
                theirs.layer, theirs.first = LAYERS[0], first_expert(group.rank, 2)
                for name in ("activation_format", "workspace_shapes", "finalize_weight_and_reduce_impl"):
                    setattr(theirs, name, getattr(pair.experts, name))
                pair.experts = theirs
                batch = Batch(group.rank, 6)
                check(self, LAYERS[0], batch, pair.call(*batch.given("numpy")))

        heddle.run_threads(2, main, deadline=20)

    def test_a_prepare_of_anothers(self):
        pair, batch = Pair(Buffer(heddle.thread_group(1)[0]), LAYERS[0], False, "numpy"), Batch(0, 6)
        pair.carrier = Alone(pair.experts.activation_format())
        check(self, LAYERS[0], batch, pair.call(*batch.given("numpy")))


class Blocks(unittest.TestCase):
    """fp8 weights in blocks of 128, as vLLM loads DeepSeek's."""

    def test_fp8(self):
        random, wide = np.random.default_rng(support.SEED), 128
        first, first_scales = draw(random, "fp8_block", EXPERTS, 2 * wide, HIDDEN)
        second, second_scales = draw(random, "fp8_block", EXPERTS, HIDDEN, wide)
        matrices = widened("fp8_block", first, first_scales), widened("fp8_block", second, second_scales)
        quant = {"quant_dtype": np.dtype(ml_dtypes.float8_e4m3fn), "block_shape": [128, 128]}
        for kind in adapted.kinds(self):
            for batched, fp8_dispatch in ((False, False), (True, False), (True, True)):

                def main(group, kind=kind, batched=batched, fp8_dispatch=fp8_dispatch):
                    local = EXPERTS // group.ranks
                    here = slice(group.rank * local, (group.rank + 1) * local)
                    scales = {"w1_scale": to(kind, first_scales[here]), "w2_scale": to(kind, second_scales[here])}
                    more = {"use_fp8_dispatch": fp8_dispatch} if batched else {}
                    pair = Pair(Buffer(group), LAYERS[0], batched, kind, SimpleNamespace(**quant, **scales), **more)
                    pair.w1, pair.w2 = to(kind, first[here]), to(kind, second[here])
                    batch = Batch(group.rank, 6)
                    expected = np.zeros(batch.hidden.shape)
                    for token, choice in np.argwhere(batch.ids >= 0):
                        expert, row = batch.ids[token, choice], batch.hidden[token].astype(np.float64)
                        result = matrices[1][expert] @ swiglu(matrices[0][expert] @ row)
                        expected[token] += batch.weights[token, choice] * result
                    out = back(pair.call(*batch.given(kind)))
                    self.assertLess(oracle.relative_error(out, expected), 0.1)  # rows and activations are rounded to fp8

                with self.subTest(kind=kind, batched=batched, fp8_dispatch=fp8_dispatch):
                    heddle.run_threads(2, main, deadline=20)


class Refusals(unittest.TestCase):
    def test_wrong_arguments(self):
        group = heddle.thread_group(1)[0]
        buffer = Buffer(group)
        for make, words in (
            (lambda: vllm.HeddlePrepareAndFinalize(buffer, 2, 1, 0), "num_dispatchers: expected the 1 ranks of the buffer, got 2"),
            (lambda: vllm.HeddleExperts(NO_MODEL, SimpleNamespace(w1_bias=1)), "quant_config.w1_bias: expected None"),
            (lambda: vllm.HeddleExperts(NO_MODEL, SimpleNamespace(quant_dtype="nvfp4")), "got nvfp4 in"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                make()
        batch = Batch(0, 4)
        hidden, ids, weights = batch.given("numpy")
        for batched in (False, True):
            pair = Pair(buffer, LAYERS[0], batched, "numpy")
            for given, words in (
                ((hidden.astype(np.float32), ids, weights), "a1: expected bfloat16"),
                ((hidden, ids[:3], weights), r"topk_ids: expected int64 or int32 \[4, topk\], got int64 \[3, 3\]"),
                ((hidden, ids, weights.astype(np.float64)), "topk_weights: expected float32"),
                ((hidden, ids + EXPERTS, weights), "topk_idx: expected -1 to 7"),
            ):
                with self.subTest(batched=batched, words=words), self.assertRaisesRegex(heddle.InputError, words):
                    pair.call(*given)
            for name, value, words in (
                ("activation", "gelu", "activation: expected silu, got gelu"),
                ("topk_ids", np.full((2, 1), EXPERTS), "topk_ids: expected -1 to 7, got 8"),
                ("expert_tokens_meta", None, "expert_tokens_meta: expected the rows of each expert, got None"),
            ):
                if (name == "topk_ids" and batched) or (name == "expert_tokens_meta" and not batched):
                    continue
                with self.subTest(batched=batched, words=words), self.assertRaisesRegex(heddle.InputError, words):
                    self.apply(pair, batched, **{name: value})
        with self.assertRaisesRegex(heddle.InputError, "use_fp8_dispatch: expected experts that take fp8 rows"):
            Pair(buffer, LAYERS[0], True, "numpy", use_fp8_dispatch=True).call(hidden, ids, weights)

    @staticmethod
    def apply(pair, batched, **given):
        rows = np.zeros((EXPERTS, 2, HIDDEN) if batched else (2, HIDDEN), ml_dtypes.bfloat16)
        meta = vllm_base.ExpertTokensMetadata(np.zeros(EXPERTS, np.int32), None)
        usual = {
            "topk_weights": np.ones((2, 1), np.float32),
            "topk_ids": np.zeros((2, 1), np.int64),
            "activation": "silu",
            "expert_tokens_meta": meta,
        }
        arguments = {**usual, **given}
        pair.experts.apply(
            np.zeros_like(rows),
            rows,
            pair.w1,
            pair.w2,
            arguments["topk_weights"],
            arguments["topk_ids"],
            arguments["activation"],
            EXPERTS,
            pair.expert_map,
            None,
            None,
            None,
            None,
            arguments["expert_tokens_meta"],
            False,
        )


@unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
class UnderVllm(unittest.TestCase):
    def test_its_kernel(self):
        """FusedMoEKernel of vLLM's own sources drives both pairs, with nothing else of vLLM."""
        folder = pinned.package("vllm") / "vllm/model_executor/layers/fused_moe"
        here = Path(__file__).parent
        path = [str(here), str(Path(heddle.__file__).parent.parent)]
        program = f"import sys; sys.path[:0] = {path}; import under_vllm; under_vllm.main(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
