"""Every format against a brute-force search for the nearest code, and the group rules by hand."""

import one_thread  # noqa: F401, first: before NumPy

import unittest

import ml_dtypes
import numpy as np

import formats

SEED = 20260701


def e4m3_by_definition(code):
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1_by_definition(code):
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


def nearest_code(value, positive_values):
    """The index of the nearest of ascending values; the even index on a tie; the last beyond the end."""
    distance = np.abs(np.asarray(positive_values) - abs(value))
    candidates = np.flatnonzero(distance == distance.min())
    return int(candidates[0] if len(candidates) == 1 else candidates[candidates % 2 == 0][0])


def probes(positive_values, random):
    """All values, the midpoints, their f32 neighbours on both sides, values beyond the end, random ones; and all negated."""
    values = np.asarray(positive_values)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.03, values[-1:] * 1.2, [1e5]]).astype(
        np.float32
    )
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    scattered = np.exp(random.uniform(np.log(values[1] / 8), np.log(values[-1] * 2), 2000)).astype(np.float32)
    points = np.concatenate([points, scattered])
    return np.concatenate([points, -points])


class Codes(unittest.TestCase):
    def setUp(self):
        self.random = np.random.default_rng(SEED)

    def test_e4m3_decodes_every_code(self):
        expected = np.array([e4m3_by_definition(code) for code in range(256)])
        actual = formats.decode_e4m3(np.arange(256, dtype=np.uint8))
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(np.signbit(actual[:127]), False)
        self.assertTrue(np.signbit(actual[0x80]))

    def test_e4m3_encodes_to_the_nearest_code(self):
        positive = [e4m3_by_definition(code) for code in range(127)]
        for value in probes(positive, self.random):
            expected = nearest_code(float(value), positive) | (0x80 if np.signbit(value) else 0)
            self.assertEqual(int(formats.encode_e4m3(value)), expected, f"value {value!r}")

    def test_e4m3_saturates_and_keeps_nan(self):
        values = np.array([np.inf, -np.inf, 464.0, 465.0, np.nan, -np.nan, -0.0], np.float32)
        self.assertEqual(formats.encode_e4m3(values).tolist(), [0x7E, 0xFE, 0x7E, 0x7E, 0x7F, 0x7F, 0x80])

    def test_e2m1_decodes_every_code(self):
        np.testing.assert_array_equal(formats.decode_e2m1(np.arange(16)), [e2m1_by_definition(code) for code in range(16)])
        np.testing.assert_array_equal(
            formats.decode_e2m1(np.arange(16)), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        )

    def test_e2m1_encodes_to_the_nearest_code(self):
        positive = [e2m1_by_definition(code) for code in range(8)]
        values = probes(positive, self.random)
        expected = [nearest_code(float(value), positive) | (8 if np.signbit(value) else 0) for value in values]
        self.assertEqual(formats.encode_e2m1(values).tolist(), expected)
        with self.assertRaises(ValueError):
            formats.encode_e2m1(np.array([np.nan]))

    def test_e2m1_packs_the_even_index_low(self):
        codes = np.array([[1, 2, 15, 0]], np.uint8)
        self.assertEqual(formats.pack_e2m1(codes).tolist(), [[0x21, 0x0F]])
        np.testing.assert_array_equal(formats.unpack_e2m1(formats.pack_e2m1(codes)), codes)
        np.testing.assert_array_equal(formats.unpack_e2m1(np.array([[0x21, 0xF0]], np.uint8).view(np.int8)), [[1, 2, 0, 15]])

    def test_ue8m0_decodes_every_code(self):
        values = formats.decode_ue8m0(np.arange(256))
        self.assertTrue(np.isnan(values[255]))
        np.testing.assert_array_equal(np.log2(values[:255]), np.arange(-127, 128))

    def test_bf16_rounds_to_nearest_even(self):
        bits = self.random.integers(0, 2**32, 20000, dtype=np.uint32)
        ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
        with np.errstate(invalid="ignore", over="ignore"):
            for values in (bits.view(np.float32), ties.view(np.float32)):
                expected = values.astype(ml_dtypes.bfloat16).astype(np.float64)
                np.testing.assert_array_equal(formats.round_to_bf16(values), expected)
        for value in (0.0, -0.0, np.inf, -np.inf):
            rounded = formats.round_to_bf16(value)
            self.assertEqual((float(rounded), np.signbit(rounded)), (value, np.signbit(value)))

    def test_bf16_rounds_once_from_float64(self):
        above_tie = 1 + 2.0**-8 + 2.0**-40  # through f32 this would become the tie, and go down to 1
        self.assertEqual(float(formats.round_to_bf16(above_tie)), 1 + 2.0**-7)


class Groups(unittest.TestCase):
    def setUp(self):
        self.random = np.random.default_rng(SEED)

    def test_next_power_of_two(self):
        values = np.array([1.0, 1.0000001, 1.5, 2.0, 3.0, 2.0**-40, np.nextafter(np.float32(4), np.float32(0))], np.float32)
        self.assertEqual(formats.next_power_of_two(values).tolist(), [1, 2, 2, 2, 4, 2.0**-40, 4])

    def test_ue8m0_scale_by_hand(self):
        row = np.zeros((1, 128), np.float32)
        row[0, :4] = [448 * 4, -1.0, 17 * 4, 0.001]
        codes, scales = formats.quantise_e4m3(row)
        self.assertEqual(scales.tolist(), [[4.0]])
        # 17 is a tie of 16 and 18, and goes to 16; 0.001 / 4 is below half the smallest value.
        np.testing.assert_array_equal(formats.widen_e4m3(codes, scales)[0, :4], [1792, -1, 64, 0])
        row[0, 0] = np.nextafter(np.float32(448 * 4), np.float32(np.inf))
        self.assertEqual(formats.quantise_e4m3(row)[1].tolist(), [[8.0]])

    def test_f32_scale_by_hand(self):
        row = np.full((1, 64), 3.0, np.float32)
        row[0, 1] = -1.5
        codes, scales = formats.quantise_e4m3(row, 32, "f32")
        self.assertEqual(scales.tolist(), [[np.float32(3) / np.float32(448)] * 2])
        np.testing.assert_array_equal(formats.decode_e4m3(codes)[0, :3], [448, -224, 448])

    def test_short_last_group_has_its_own_scale(self):
        row = np.ones((1, 2880), np.float32)
        row[0, 2816:] = 2.0**-20
        codes, scales = formats.quantise_e4m3(row)
        self.assertEqual((codes.shape, scales.shape), ((1, 2880), (1, 23)))
        self.assertEqual(scales[0, 21], 2.0**-8)
        self.assertEqual(scales[0, 22], 2.0**-28)
        np.testing.assert_array_equal(formats.widen_e4m3(codes, scales), row)

    def test_zero_group_uses_the_least_amax(self):
        codes, scales = formats.quantise_e4m3(np.zeros((1, 128)))
        self.assertEqual(scales[0, 0], formats.next_power_of_two(np.float32(1e-10) / np.float32(448)))
        self.assertFalse(codes.any())
        tiny = formats.quantise_e4m3(np.full((1, 128), 1e-30))
        self.assertEqual(tiny[1][0, 0], scales[0, 0])

    def test_nan_marks_its_own_element(self):
        row = np.ones((1, 256), np.float32)
        row[0, 5] = np.nan
        for scale_format in ("ue8m0", "f32"):
            codes, scales = formats.quantise_e4m3(row, 128, scale_format)
            self.assertEqual(np.flatnonzero(codes[0] == 0x7F).tolist(), [5])
            self.assertEqual(scales[0, 0], scales[0, 1])

    def test_infinity_makes_the_groups_scale_nan(self):
        for scale_format in ("ue8m0", "f32"):
            row = np.ones((2, 256), np.float32)
            row[0, 130] = -np.inf
            widened = formats.widen_e4m3(*formats.quantise_e4m3(row, 128, scale_format))
            self.assertTrue(np.isnan(widened[0, 128:]).all())
            self.assertTrue(np.isfinite(widened[0, :128]).all() and np.isfinite(widened[1]).all())

    def test_codes_are_nearest_whatever_the_group(self):
        positive = np.array([e4m3_by_definition(code) for code in range(127)])
        for group in (32, 128):
            for scale_format in ("ue8m0", "f32"):
                rows = (self.random.normal(0, 1, (3, 192)) * np.exp(self.random.normal(0, 6, (3, 1)))).astype(np.float32)
                codes, scales = formats.quantise_e4m3(rows, group, scale_format)
                self.assertEqual(scales.shape, (3, -(-192 // group)))
                for row in range(3):
                    for column in range(192):
                        quotient = rows[row, column] / scales[row, column // group]
                        self.assertLessEqual(abs(quotient), 448.0001)
                        expected = nearest_code(float(quotient), positive) | (0x80 if np.signbit(quotient) else 0)
                        self.assertEqual(codes[row, column], expected)

    def test_values_that_fit_travel_exactly(self):
        codes = self.random.integers(0, 0x7F, (4, 256)).astype(np.uint8) | (
            self.random.integers(0, 2, (4, 256)).astype(np.uint8) << 7
        )
        codes[:, ::128] = 0x7E  # 448: the scale is then the one chosen here
        values = formats.decode_e4m3(codes) * 2.0**-5
        np.testing.assert_array_equal(formats.over_wire(values, "fp8"), values)

    def test_nvfp4_by_hand(self):
        row = np.zeros((1, 32), np.float32)
        row[0, :5] = [12.0, -5.0, 7.0, 1.0, 0.4]  # scale 2: 6, -2.5 (tie, down to 2), 3.5 (tie, up to 4), 0.5, 0.2
        codes, scales = formats.quantise_nvfp4(row)
        self.assertEqual(formats.decode_e4m3(scales).tolist(), [[2.0, 2.0**-9]])
        np.testing.assert_array_equal(formats.widen_nvfp4(codes, scales)[0, :5], [12, -4, 8, 1, 0])

    def test_nvfp4_scale_saturates_and_marks_infinity(self):
        row = np.zeros((1, 48), np.float32)
        row[0, 0], row[0, 16], row[0, 40] = 1e6, np.inf, 1.0
        codes, scales = formats.quantise_nvfp4(row)
        widened = formats.widen_nvfp4(codes, scales)
        self.assertEqual(widened[0, 0], 448 * 6)
        self.assertTrue(np.isnan(widened[0, 16:32]).all() and np.isfinite(widened[0, 32:]).all())

    def test_nvfp4_rows_widen_to_bf16_values(self):
        row = self.random.normal(0, 1, (4, 320)).astype(np.float32)
        widened = formats.over_wire(row, "nvfp4")
        np.testing.assert_array_equal(formats.round_to_bf16(widened), widened)


if __name__ == "__main__":
    print(f"seed {SEED}")
    unittest.main()
