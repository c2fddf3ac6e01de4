"""SGLang's dispatcher and fused function: prompts and decode steps of two layers, as its forward pass calls them."""

import subprocess
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import adapted
import pinned
from adapted import EXPERTS, HIDDEN, TOPK, Batch, Layer, back, check, first_expert, routed_sums, to, tokens_of

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters import sglang
from heddle.adapters.sglang_base import DeepEPMode

LAYERS = [Layer(0), Layer(1)]
MOST = 16


def topk_output(kind, batch):
    _, ids, weights = batch.given(kind)
    return SimpleNamespace(topk_ids=ids, topk_weights=weights, router_logits=None)


def widened(taken):
    """Rows as float32, of an fp8 dispatch as well."""
    rows = back(taken.hidden_states).astype(np.float32)
    if taken.hidden_states_scale is None:
        return rows
    return rows * np.repeat(back(taken.hidden_states_scale), 128, axis=-1)


def runner(layer, taken, rank, ranks, kind):
    """What a grouped runner makes of a dispatch."""
    first, rows = first_expert(rank, ranks), widened(taken)
    if taken.format.is_deepep_normal():
        results = routed_sums(layer, first, rows, back(taken.topk_ids), back(taken.topk_weights))
        return sglang.DeepEPNormalCombineInput(to(kind, results), taken.topk_ids, taken.topk_weights)
    results = np.full(rows.shape, 7, ml_dtypes.bfloat16)
    for local, count in enumerate(back(taken.masked_m)):
        results[local, :count] = layer.expert(first + local, rows[local, :count])
    return sglang.DeepEPLLCombineInput(to(kind, results), taken.topk_ids, taken.topk_weights)


class Dispatcher(unittest.TestCase):
    def dispatcher(self, group, **more):
        self.addCleanup(sglang.forget_buffer, group)
        settings = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "num_max_dispatch_tokens_per_rank": MOST, **more}
        return sglang.DeepEPDispatcher(group, TOPK, **settings)

    def test_a_prompt_and_decode_steps(self):
        for kind in adapted.kinds(self):
            for ranks in (1, 2, 4):

                def main(group, kind=kind, ranks=ranks):
                    forward = SimpleNamespace(prompt=True)
                    layers = [
                        (layer, self.dispatcher(group, num_local_experts=EXPERTS // ranks, is_extend_in_batch=lambda: forward.prompt))
                        for layer in LAYERS
                    ]
                    self.assertIs(layers[0][1].buffer, layers[1][1].buffer)
                    for step, base in enumerate((20, 3, 4)):
                        forward.prompt = step == 0
                        for layer, dispatcher in layers:
                            batch = Batch(group.rank, tokens_of(group.rank, ranks, base), step)
                            taken = dispatcher.dispatch(batch.given(kind)[0], topk_output(kind, batch))
                            self.assertEqual(taken.format.is_deepep_normal(), forward.prompt)
                            check(self, layer, batch, dispatcher.combine(runner(layer, taken, group.rank, ranks, kind)))

                with self.subTest(kind=kind, ranks=ranks):
                    heddle.run_threads(ranks, main, deadline=20)

    def test_fp8(self):
        def main(group):
            for mode in (DeepEPMode.NORMAL, DeepEPMode.LOW_LATENCY):
                dispatcher, batch = self.dispatcher(group, deepep_mode=mode, output_dtype="fp8"), Batch(group.rank, 5)
                taken = dispatcher.dispatch(batch.hidden, topk_output("numpy", batch))
                self.assertEqual(taken.hidden_states.dtype, ml_dtypes.float8_e4m3fn)
                self.assertEqual(taken.hidden_states_scale.shape, (*taken.hidden_states.shape[:-1], 1))
                out = dispatcher.combine(runner(LAYERS[0], taken, group.rank, 2, "numpy")).astype(np.float64)
                expected = np.asarray(LAYERS[0].expected(batch), np.float64)
                self.assertLess(np.linalg.norm(out - expected) / np.linalg.norm(expected), 6e-2)

        heddle.run_threads(2, main, deadline=20)

    def test_halves_and_hooks(self):
        group = heddle.thread_group(1)[0]
        dispatcher, batch = self.dispatcher(group, deepep_mode=DeepEPMode.LOW_LATENCY), Batch(0, 4)
        given = batch.hidden, topk_output("numpy", batch)
        with self.assertRaisesRegex(heddle.InputError, "dispatch: expected after dispatch_a, got it after combine"):
            dispatcher.dispatch_b()
        dispatcher.dispatch_a(*given)
        with self.assertRaisesRegex(heddle.InputError, "dispatch_a: expected after combine, got it after dispatch_a"):
            dispatcher.dispatch_a(*given)
        taken = dispatcher.dispatch_b()
        self.assertEqual(taken.expected_m, (4 * TOPK + EXPERTS) // EXPERTS)
        results = runner(LAYERS[0], taken, 0, 1, "numpy")
        with self.assertRaisesRegex(heddle.InputError, "expected deepep_ll, as was dispatched, got deepep_normal"):
            dispatcher.combine(sglang.DeepEPNormalCombineInput(*results))
        dispatcher.combine_a(results)
        check(self, LAYERS[0], batch, dispatcher.combine_b())

        seen = []
        between = dispatcher.register_deepep_dispatch_hook(lambda of: seen.append("between"))
        dispatcher.register_pre_dispatch_hook(lambda of, hidden, choice: seen.append("before"))
        last = dispatcher.register_post_combine_hook(lambda of, out: out + out)
        dispatcher.register_pre_combine_hook(lambda of, combined: seen.append("home"))
        dispatcher.register_post_dispatch_hook(lambda of, taken: seen.append("after"))
        doubled = dispatcher.combine(runner(LAYERS[0], dispatcher.dispatch(*given), 0, 1, "numpy"))
        self.assertEqual(seen, ["before", "between", "after", "home"])
        last.remove()
        between.remove()
        plain = dispatcher.combine(runner(LAYERS[0], dispatcher.dispatch(*given), 0, 1, "numpy"))
        np.testing.assert_array_equal(doubled, plain + plain)
        self.assertEqual(seen.count("between"), 1)

    def test_a_fault_and_a_reset(self):
        """A rank that stays away from a combine: all of the group's dispatchers begin anew."""

        def main(group):
            forward = SimpleNamespace(prompt=True)
            settings = {"is_extend_in_batch": lambda: forward.prompt}
            dispatchers = [self.dispatcher(group, **settings) for _ in range(2)]
            batch = Batch(group.rank, 5)
            given = batch.hidden, topk_output("numpy", batch)
            for prompt in (True, False):
                forward.prompt = prompt
                taken = [dispatcher.dispatch(*given) for dispatcher in dispatchers]
                results = [runner(LAYERS[0], one, group.rank, 2, "numpy") for one in taken]
                if group.rank == 0:
                    with self.assertRaises(heddle.FaultError):
                        dispatchers[0].combine(results[0])
                dispatchers[0].reset()
                for layer, dispatcher in zip(LAYERS, dispatchers):
                    again = runner(layer, dispatcher.dispatch(*given), group.rank, 2, "numpy")
                    check(self, layer, batch, dispatcher.combine(again))

        heddle.run_threads(2, main, deadline=1.5)

    def test_wrong_arguments(self):
        group = heddle.thread_group(1)[0]
        for settings, words in (
            ({"num_local_experts": 3}, "num_local_experts: expected 8 / 1 of the ranks, got 3"),
            ({"hidden_size": None}, "expected num_experts and hidden_size, got 8 and None"),
            ({"output_dtype": "fp4"}, "output_dtype: expected bf16 or fp8, got fp4"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                self.dispatcher(group, **settings)
        dispatcher, batch = self.dispatcher(group), Batch(0, 4)
        choice = topk_output("numpy", batch)
        with self.assertRaisesRegex(heddle.InputError, "expected SGLang to be loaded"):
            dispatcher.dispatch(batch.hidden, choice)
        with self.assertRaisesRegex(heddle.InputError, r"topk_ids: expected \[3, 3\], got \[4, 3\]"):
            dispatcher.dispatch(batch.hidden[:3], choice)
        with self.assertRaisesRegex(heddle.InputError, r"hidden_states: expected bfloat16 \[tokens, 128\], got bfloat16 \[4, 64\]"):
            dispatcher.dispatch(batch.hidden[:, :64], choice)
        dispatcher.is_extend_in_batch = lambda: False
        long = Batch(0, MOST + 1)
        with self.assertRaisesRegex(heddle.InputError, "at most num_max_dispatch_tokens_per_rank = 16 tokens, got 17"):
            dispatcher.dispatch(long.hidden, topk_output("numpy", long))
        taken = dispatcher.dispatch(batch.hidden, choice)  # the dispatcher still works
        with self.assertRaisesRegex(heddle.InputError, r"x: expected bfloat16 \[8, 16, 128\]"):
            dispatcher.combine(sglang.DeepEPLLCombineInput(batch.hidden, taken.topk_ids, taken.topk_weights))
        check(self, LAYERS[0], batch, dispatcher.combine(runner(LAYERS[0], taken, 0, 1, "numpy")))


class Fused(unittest.TestCase):
    def test_two_layers(self):
        for kind in adapted.kinds(self):
            for ranks in (1, 2, 4):

                def main(group, kind=kind, ranks=ranks):
                    dispatcher = sglang.StandardDispatcher(SimpleNamespace())
                    config = SimpleNamespace(activation="silu", is_gated=True, swiglu_limit=None)
                    for layer in LAYERS:
                        options = heddle.LayerOptions(cap=MOST, way="mega", activation="bf16")
                        info = sglang.HeddleMoeQuantInfo(heddle.MoeLayer.create(group, layer.source, options))
                        for step, base in enumerate((9, 3)):
                            batch = Batch(group.rank, tokens_of(group.rank, ranks, base), step)
                            taken = dispatcher.dispatch(batch.given(kind)[0], topk_output(kind, batch))
                            self.assertTrue(taken.format.is_standard())
                            check(self, layer, batch, dispatcher.combine(sglang.fused_experts(taken, info, config)))

                with self.subTest(kind=kind, ranks=ranks):
                    heddle.run_threads(ranks, main, deadline=20)

    def test_what_a_layer_does_not_do(self):
        layer = heddle.MoeLayer.create(heddle.thread_group(1)[0], LAYERS[0].source, heddle.LayerOptions(cap=MOST))
        batch, info = Batch(0, 3), sglang.HeddleMoeQuantInfo(layer, heddle.Step(3))
        taken = sglang.StandardDispatchOutput(batch.hidden, None, topk_output("numpy", batch))
        for config, words in (
            ({"activation": "gelu"}, "runner_config.activation: expected silu, got gelu"),
            ({"no_combine": True}, "runner_config.no_combine: expected False, got True"),
            ({"swiglu_limit": 7.0}, "runner_config.swiglu_limit: expected the layer's clamp, None, got 7.0"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                sglang.fused_experts(taken, info, SimpleNamespace(**config))
        taken.topk_output.topk_ids = taken.topk_output.topk_ids[:, :2]
        with self.assertRaisesRegex(heddle.InputError, r"topk_ids: expected int64 or int32 \[3, 3\], got int64 \[3, 2\]"):
            sglang.fused_experts(taken, info)


# SGLang's own base.py under its own name, with nothing else of SGLang, and the dispatcher on top of it.
UNDER_SGLANG = """
import importlib.util, sys, types
name = "sglang.srt.layers.moe.token_dispatcher.base"
parts = name.split(".")
for end in range(1, len(parts)):
    sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
base = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
attention = sys.modules["sglang.srt.layers.dp_attention"] = types.ModuleType("sglang.srt.layers.dp_attention")
attention.get_is_extend_in_batch = lambda: False

import heddle, torch
from heddle.adapters import sglang
assert issubclass(sglang.DeepEPDispatcher, base.BaseDispatcher) and not sglang.DeepEPDispatcher.__abstractmethods__
dispatcher = sglang.DeepEPDispatcher(heddle.thread_group(1)[0], 1, num_experts=2, hidden_size=64)
hook = dispatcher.register_post_combine_hook(lambda of, out: out * 2)
choice = types.SimpleNamespace(topk_ids=torch.zeros(3, 1, dtype=torch.int64), topk_weights=torch.ones(3, 1))
hidden = torch.ones(3, 64, dtype=torch.bfloat16)
taken = dispatcher.dispatch(hidden_states=hidden, topk_output=choice)
assert isinstance(taken, base.DispatchOutput) and base.DispatchOutputChecker.format_is_deepep_ll(taken)
given = sglang.DeepEPLLCombineInput(taken.hidden_states, taken.topk_ids, taken.topk_weights)
assert base.CombineInputChecker.format_is_deepep_ll(given)
assert torch.equal(dispatcher.combine(combine_input=given), hidden * 2)
"""


@unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
class UnderSGLang(unittest.TestCase):
    def test_its_base_class(self):
        base = pinned.package("sglang") / "sglang/srt/layers/moe/token_dispatcher/base.py"
        path = [str(Path(heddle.__file__).parent.parent)]
        command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{UNDER_SGLANG}", str(base)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
