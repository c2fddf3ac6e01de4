"""The layer's arithmetic: against plain loops, by hand where it is exact, and whether the bounds would notice a mistake."""

import one_thread  # noqa: F401, first: before NumPy

import dataclasses
import math
import unittest
from unittest import mock

import ml_dtypes
import numpy as np

import formats
import oracle
from layers import LayerSpec, random_batch, random_layer
from oracle import Batch, Expert, Layer, Options, Pairs
from weights import Weight, random_weight

SEED = 20260702
BOUND = {"fp8": 6e-3, "bf16": 4e-3}


def bf16(values):
    return np.asarray(values).astype(ml_dtypes.bfloat16)


def e4m3(code):
    return float(formats.decode_e4m3(np.uint8(code)))


def e2m1(weight, row, column):
    byte = int(weight.codes[row, column // 2])
    return formats.E2M1_VALUES[byte >> 4 if column % 2 else byte & 15]


def power(code):
    return 2.0 ** (int(code) - 127)


ELEMENT = {  # one element of each kind, by docs/numerics.md's table
    "bf16": lambda w, n, k: float(w.codes[n, k]),
    "fp8_block": lambda w, n, k: e4m3(w.codes[n, k]) * float(w.scales[n // 128, k // 128]),
    "mxfp4": lambda w, n, k: e2m1(w, n, k) * power(w.scales[n, k // 32]),
    "nvfp4": lambda w, n, k: e2m1(w, n, k) * e4m3(w.scales[n, k // 16]) * float(w.tensor_scale),
    "nvfp4_packed": lambda w, n, k: e2m1(w, n, k) * e4m3(w.scales[n, k // 16]) / float(w.tensor_scale),
    "mxfp8": lambda w, n, k: e4m3(w.codes[n, k]) * power(w.scales[n, k // 32]),
}


class Weights(unittest.TestCase):
    def test_every_kind_widens_element_by_element(self):
        random = np.random.default_rng(SEED)
        for kind, element in ELEMENT.items():
            weight = random_weight(random, kind, 192, 320, 0.1)
            wide = weight.widen()
            self.assertEqual(wide.shape, (192, 320))
            for row, column in zip(random.integers(0, 192, 500), random.integers(0, 320, 500)):
                self.assertEqual(wide[row, column], element(weight, row, column), f"{kind} [{row}, {column}]")
            self.assertTrue(0.03 < wide.std() < 0.3, f"{kind}: deviation {wide.std()}")

    def test_block_scales_may_be_powers_of_two(self):
        weight = random_weight(np.random.default_rng(SEED), "fp8_block", 130, 64, 0.1, "ue8m0")
        self.assertEqual((weight.scales.dtype, weight.scales.shape), (np.uint8, (2, 1)))
        self.assertEqual(weight.widen()[129, 5], e4m3(weight.codes[129, 5]) * power(weight.scales[1, 0]))

    def test_nan_scale_is_nan(self):
        weight = Weight("mxfp4", np.full((1, 16), 0x11, np.uint8), np.array([[255]], np.uint8))
        self.assertTrue(np.isnan(weight.widen()).all())


def pair_by_loops(expert, token, weight, group, clamp):
    """One pair with fp8 activations and ue8m0 scales, a value at a time."""

    def quantised(row):
        out = []
        for start in range(0, len(row), group):
            part = [np.float32(value) for value in row[start : start + group]]
            amax = max(max(abs(value) for value in part), np.float32(1e-10))
            scale = 2.0 ** math.ceil(math.log2(float(np.float32(amax / np.float32(448)))))
            out += [e4m3(formats.encode_e4m3(np.float32(value / np.float32(scale)))) * scale for value in part]
        return out

    def product(row, matrix):
        return [float(bf16(np.float32(math.fsum(a * b for a, b in zip(row, matrix[n]))))) for n in range(len(matrix))]

    read = quantised(token)
    gate, up = product(read, expert.gate.widen()), product(read, expert.up.widen())
    activated = []
    for g, u in zip(gate, up):
        g, u = min(g, clamp), max(-clamp, min(u, clamp))
        silu = np.float32(g) / (np.float32(1) + np.float32(math.exp(-g)))
        activated.append(silu * np.float32(u) * np.float32(weight))
    return product(quantised(activated), expert.down.widen())


class OnePair(unittest.TestCase):
    def test_matches_plain_loops(self):
        spec = LayerSpec("loops", "v4", "mxfp4", hidden=192, intermediate=64, experts=2)
        random = np.random.default_rng(SEED)
        layer = random_layer(random, spec)
        batch = random_batch(random, layer, 3, 2, absent=0)
        for group in (128, 32):
            results = oracle.pair_results(layer, batch, Options(group=group, clamp=2.0)).results
            for token in range(3):
                for choice in range(2):
                    expert = layer.experts[batch.ids[token, choice]]
                    row = batch.hidden[token].astype(float)
                    expected = pair_by_loops(expert, row, batch.weights[token, choice], group, 2.0)
                    np.testing.assert_allclose(results[token, choice], expected, rtol=2.0**-7, atol=1e-6)
                    self.assertLess(np.mean(results[token, choice] != expected), 0.02)

    def test_identity_expert_by_hand(self):
        """Gate 32, up x, down identity: silu(32) is 32 in f32, so the pair's result is 32 x w exactly."""
        width = 64
        gate = np.zeros((width, width))
        gate[:, 0] = 32.0
        identity = bf16(np.eye(width))
        expert = Expert(Weight("bf16", bf16(gate)), Weight("bf16", identity), Weight("bf16", identity))
        row = np.concatenate([[1.0], np.arange(1, width) % 16 - 8.0])
        for options in (Options(), Options(activation="bf16"), Options(group=32)):
            result = oracle.expert_rows(expert, row[None], options, np.float32([0.5]))
            np.testing.assert_array_equal(result[0], 16 * row)
        clamped = oracle.expert_rows(expert, row[None], Options(activation="bf16", clamp=4.0), np.float32([1.0]))
        silu = np.float32(4) / (np.float32(1) + np.float32(math.exp(-4)))
        np.testing.assert_array_equal(clamped[0], formats.round_to_bf16(silu * np.clip(row, -4, 4)))

    def test_clamp_keeps_nan_and_does_not_bound_the_gate_below(self):
        values = oracle.silu_and_multiply(np.array([np.nan, 1.0, -50.0, 50.0]), np.array([1.0, np.nan, 7.0, -7.0]), 2.0)
        self.assertTrue(np.isnan(values[:2]).all())
        self.assertLess(abs(values[2]), 1e-18)
        self.assertEqual(values[3], np.float32(2) / (np.float32(1) + np.float32(math.exp(-2))) * -2)

    def test_every_operation_of_the_activation_rounds_to_f32(self):
        """Under an f32 scale, 1.125 beside the clamp of 1.5 is a tie of e4m3 (336): a rounding left out decides it another way."""
        gates = np.array([float(gate) for gate in bf16(np.linspace(-6, 6, 97))])
        for up in (1.125, 1.5, -0.7109375):
            with self.subTest(up=up):
                e = np.array([np.float32(math.exp(-gate)) for gate in gates])
                wanted = gates.astype(np.float32) / (np.float32(1) + e) * np.float32(up)
                np.testing.assert_array_equal(oracle.silu_and_multiply(gates, np.full(gates.size, up), None), wanted)


def pairs_of(columns, weights=None, ids=None):
    """One token of width 1: a result a choice."""
    results = np.array(columns, float).reshape(1, -1, 1)
    count = results.shape[1]
    return Pairs(results, np.arange(count)[None] if ids is None else np.array([ids]), np.float32([weights or [1.0] * count]))


class Sums(unittest.TestCase):
    layer = Layer(1, 1, [None] * 4)

    def total(self, pairs, shared=None, **options):
        return float(oracle.finish(self.layer, pairs, shared, Options(**options))[0, 0])

    def test_slots_round_once(self):
        self.assertEqual(self.total(pairs_of([1, 2.0**-8, 2.0**-8, 0])), 1 + 2.0**-7)

    def test_ranks_round_twice(self):
        pairs = pairs_of([1, 2.0**-8, 2.0**-8, 0])
        self.assertEqual(self.total(pairs, sums="ranks", ranks=2), 1.0)  # rank 0: a tie down to 1; then 1 + 2^-8 ties down again
        self.assertEqual(self.total(pairs, sums="ranks", ranks=1), 1 + 2.0**-7)
        self.assertEqual(self.total(pairs, sums="ranks", ranks=4), 1 + 2.0**-7)  # three partial rows, summed in f32

    def test_order_is_choice_order_within_a_rank(self):
        large = 2.0**26
        self.assertEqual(self.total(pairs_of([large, 1, -large, 0])), 0.0)  # 1 is lost in f32 beside 2^26
        self.assertEqual(self.total(pairs_of([large, -large, 1, 0])), 1.0)
        self.assertEqual(self.total(pairs_of([large, 1, -large], ids=[0, 3, 1]), sums="ranks", ranks=2), 1.0)

    def test_weight_at_combine_rounds_once(self):
        weights = [1 + 2.0**-12, -1.0]
        value = 1 + 2.0**-7
        self.assertEqual(self.total(pairs_of([value, value], weights), weight_at="combine"), value * 2.0**-12)

    def test_absent_choices_add_nothing(self):
        pairs = pairs_of([0, 2], [np.nan, 0.5], ids=[-1, 1])
        for sums in ("slots", "ranks"):
            self.assertEqual(self.total(pairs, sums=sums, ranks=3, weight_at="combine"), 1.0)

    def test_shared_is_added_last_before_the_only_rounding(self):
        self.assertEqual(self.total(pairs_of([1, 2.0**-8, 0, 0]), np.array([[2.0**-8]])), 1 + 2.0**-7)
        self.assertEqual(self.total(pairs_of([1, 0, 2.0**-8, 0]), np.array([[2.0**-8]]), sums="ranks", ranks=2), 1 + 2.0**-7)

    def test_combine_wire_rounds_what_travels(self):
        pairs = pairs_of([17, 17, 0, 0])  # scale 2^-4: 17 travels as 272, a tie that goes down to 256; 34 as 272 at scale 2^-3
        self.assertEqual(self.total(pairs, combine_wire="fp8"), 32.0)
        three = pairs_of([17, 0, 17, 18])  # by rank: 17 (travels as 16) and 35 (280 at 2^-3, down to 32 or up to 36: 36)
        self.assertEqual(self.total(three, combine_wire="fp8", sums="ranks", ranks=2), 16 + 36.0)
        self.assertEqual(self.total(three, combine_wire="fp8"), 16 + 16 + 18.0)
        self.assertEqual(self.total(pairs_of([7, 7, 7, 0]), combine_wire="nvfp4"), 3 * 6 * 1.125)  # scale e4m3(7/6) = 1.125

    def test_contiguous_placement(self):
        self.assertEqual(oracle.home_of_experts(5, 8).tolist(), [0, 1, 3, 4, 6])
        self.assertEqual(oracle.home_of_experts(8, 3).tolist(), [0, 0, 0, 1, 1, 1, 2, 2])


class WholeLayer(unittest.TestCase):
    def setUp(self):
        self.random = np.random.default_rng(SEED)

    def make(self, kind="fp8_block", naming="hf", tokens=12, **fields):
        layer = random_layer(self.random, LayerSpec("whole", naming, kind, hidden=320, intermediate=192, experts=7, **fields))
        return layer, random_batch(self.random, layer, tokens, 3)

    def test_tokens_do_not_touch_each_other(self):
        layer, batch = self.make(shared="bf16", shared_gate=True)
        batch.hidden[3, 200], batch.hidden[5, 7] = np.inf, np.nan
        for options in (Options(), Options(activation="bf16"), Options(combine_wire="fp8", sums="ranks", ranks=3)):
            whole = oracle.layer_output(layer, batch, options)
            self.assertEqual(np.flatnonzero(np.isnan(whole).any(axis=1)).tolist(), [3, 5])
            self.assertTrue(np.isnan(whole[[3, 5]]).all())
            part = Batch(batch.hidden[6:9], batch.ids[6:9], batch.weights[6:9])
            np.testing.assert_array_equal(oracle.layer_output(layer, part, options), whole[6:9])

    def test_no_choice_leaves_zero_or_the_shared_expert(self):
        layer, batch = self.make()
        self.assertFalse(oracle.layer_output(layer, batch, Options())[1].any())
        layer, batch = self.make(shared="mxfp8")
        batch.ids[:] = -1
        shared = oracle.shared_result(layer, batch, Options())
        np.testing.assert_array_equal(oracle.layer_output(layer, batch, Options()), shared)

    def test_shared_gate_is_a_sigmoid(self):
        layer, batch = self.make(shared="bf16")
        batch.ids[:] = -1
        plain = oracle.layer_output(layer, batch, Options())
        layer.shared_gate = bf16(np.zeros((1, 320)))
        np.testing.assert_array_equal(oracle.layer_output(layer, batch, Options()), plain / 2)

    def test_power_of_two_weights_may_stand_at_either_place(self):
        layer, batch = self.make()
        batch.weights = np.exp2(self.random.integers(-2, 3, batch.weights.shape)).astype(np.float32)
        outputs = [oracle.layer_output(layer, batch, Options(weight_at=place)) for place in ("activation", "combine")]
        np.testing.assert_array_equal(*outputs)

    def test_one_rank_sums_as_slots_do(self):
        layer, batch = self.make()
        np.testing.assert_array_equal(*(oracle.layer_output(layer, batch, Options(sums=sums)) for sums in ("slots", "ranks")))

    def test_nvfp4_wire_is_read_before_the_quantisation(self):
        layer, batch = self.make()
        arrived = formats.over_wire(batch.hidden.astype(float), "nvfp4")
        expected = oracle.layer_output(layer, dataclasses.replace(batch, hidden=bf16(arrived)), Options())
        np.testing.assert_array_equal(oracle.layer_output(layer, batch, Options(wire="nvfp4")), expected)

    def test_fp8_wire_is_the_first_step_itself(self):
        layer, batch = self.make()
        for scale in ("ue8m0", "f32"):
            outputs = [oracle.layer_output(layer, batch, Options(wire=wire, scale=scale)) for wire in ("bf16", "fp8")]
            np.testing.assert_array_equal(*outputs)


def product_in_f32(left, right):
    return np.matmul(left.astype(np.float32), right.astype(np.float32).T).astype(np.float64)


class Discernment(unittest.TestCase):
    """An engine that sums in f32 passes the bounds with room; a plausible mistake does not."""

    @classmethod
    def setUpClass(cls):
        random = np.random.default_rng(SEED)
        cls.examples = []  # kind, layer, batch, {activation: (options, expected output)}
        for kind, naming in (("bf16", "hf"), ("fp8_block", "hf"), ("mxfp4", "v4"), ("nvfp4", "hf"), ("mxfp8", "hf")):
            layer = random_layer(random, LayerSpec(kind, naming, kind, hidden=640, intermediate=320, experts=6, shared=kind))
            batch = random_batch(random, layer, 24, 3)
            options = [Options(activation=activation, clamp=3.0) for activation in BOUND]
            cls.examples.append((kind, layer, batch, {o.activation: (o, oracle.layer_output(layer, batch, o)) for o in options}))

    def errors(self, activation, mistake):
        for kind, layer, batch, expected in self.examples:
            options, output = expected[activation]
            yield kind, oracle.relative_error(mistake(layer, batch, options), output)

    def test_f32_sums_pass_with_room(self):
        def engine(layer, batch, options):
            with mock.patch.object(oracle, "matmul", product_in_f32):
                return oracle.layer_output(layer, batch, options)

        for activation, bound in BOUND.items():
            for kind, error in self.errors(activation, engine):
                self.assertLess(error, bound / 4, f"{kind}, {activation}")

    def test_mistakes_miss_the_bounds(self):
        def changed(**fields):
            return lambda layer, batch, options: oracle.layer_output(layer, batch, dataclasses.replace(options, **fields))

        def gate_and_up_swapped(layer, batch, options):
            swapped = [Expert(expert.up, expert.gate, expert.down) for expert in layer.experts]
            return oracle.layer_output(dataclasses.replace(layer, experts=swapped), batch, options)

        def neighbour_expert(layer, batch, options):
            return oracle.layer_output(
                layer, dataclasses.replace(batch, ids=np.where(batch.ids > 0, batch.ids - 1, batch.ids)), options
            )

        def shared_forgotten(layer, batch, options):
            return oracle.layer_output(dataclasses.replace(layer, shared=None), batch, options)

        mistakes = {
            "clamp": changed(clamp=None),
            "wire": changed(wire="nvfp4"),
            "combine wire": changed(combine_wire="fp8"),
            "swapped": gate_and_up_swapped,
            "neighbour": neighbour_expert,
            "shared": shared_forgotten,
        }
        for activation, bound in BOUND.items():
            other = "bf16" if activation == "fp8" else "fp8"
            for name, mistake in (mistakes | {"activation": changed(activation=other)}).items():
                for kind, error in self.errors(activation, mistake):
                    self.assertGreater(error, 1.5 * bound, f"{name}: {kind}, {activation}")
        for name, mistake in {"weight_at": changed(weight_at="combine"), "scale": changed(scale="f32")}.items():
            for kind, error in self.errors("fp8", mistake):
                self.assertGreater(error, 1.5 * BOUND["fp8"], f"{name}: {kind}")


class RelativeError(unittest.TestCase):
    def test_counts_what_is_finite_and_compares_where_nan_stands(self):
        expected = np.array([[3.0, 4.0], [np.nan, np.inf]])
        self.assertEqual(oracle.relative_error(expected, expected), 0)
        self.assertAlmostEqual(oracle.relative_error(np.array([[3.0, 4.5], [np.nan, np.inf]]), expected), 0.1)
        for wrong in ([[np.nan, 4], [np.nan, np.inf]], [[3, 4], [0, np.inf]], [[3, 4], [np.inf, np.inf]], [[3, 4]]):
            self.assertEqual(oracle.relative_error(np.array(wrong, float), expected), np.inf)
        self.assertEqual(oracle.relative_error(np.array([1.0]), np.array([0.0])), np.inf)


if __name__ == "__main__":
    print(f"seed {SEED}")
    unittest.main()
