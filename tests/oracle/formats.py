"""The number formats and group rules of docs/numerics.md, in NumPy.

Values are held as float64 arrays that a format can represent exactly, so that nothing rounds unless a function here says so.
"""

import ml_dtypes
import numpy as np

E4M3_MAX = 448.0
E2M1_MAX = 6.0
SMALLEST_AMAX = np.float32(1e-10)
SMALLEST_NVFP4_SCALE = 2.0**-9
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
# The midpoint above each magnitude, and whether a value exactly on it goes up (to the even code).
E2M1_MIDPOINTS = (E2M1_MAGNITUDES[:-1] + E2M1_MAGNITUDES[1:]) / 2
NVFP4_GROUP = 16


def round_to_bf16(values):
    """Rounds once, to nearest even, whatever the precision of the input. Returns float64."""
    values = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.maximum(np.frexp(values)[1] - 8, -133)  # the weight of the last of 8 significant bits
        rounded = np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)
        largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
        return np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)


def round_to_f32(values):
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float32).astype(np.float64)


def encode_e4m3(values):
    """f32 values to e4m3 codes (uint8): nearest even, saturated to 448, every NaN to 0x7F."""
    values = np.asarray(values, np.float32)
    codes = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def decode_e4m3(codes):
    return np.asarray(codes, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def encode_e2m1(values):
    """f32 values to e2m1 codes 0..15 (uint8), ties to the even code, saturated to 6. NaN has no code here and is refused."""
    values = np.asarray(values, np.float64)
    if np.isnan(values).any():
        raise ValueError("e2m1 has no NaN")
    magnitude = np.abs(values)
    below = np.searchsorted(E2M1_MIDPOINTS, magnitude, side="left")  # a value on midpoint i gets code i
    on_midpoint = np.isin(magnitude, E2M1_MIDPOINTS)
    code = below + (on_midpoint & (below % 2 == 1))
    return (code + 8 * np.signbit(values)).astype(np.uint8)


def decode_e2m1(codes):
    return E2M1_VALUES[np.asarray(codes, np.uint8)]


def pack_e2m1(codes):
    """Codes [..., K] to bytes [..., K/2], the even index in the low nibble."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed):
    packed = np.asarray(packed).view(np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def decode_ue8m0(codes):
    codes = np.asarray(codes, np.uint8)
    return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127))


def next_power_of_two(scales):
    """The smallest power of two not below each positive normal f32."""
    bits = np.asarray(scales, np.float32).view(np.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).astype(np.uint32).view(np.float32)


def _in_groups(values, group):
    """[rows, K] to f32 [rows, groups, group]; absent values of the last group are zeros and never matter."""
    rows, width = values.shape
    groups = -(-width // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :width] = values
    return padded.reshape(rows, groups, group)


def _largest_magnitude(grouped):
    """[rows, groups, group] to f32 [rows, groups]: NaN ignored, at least 1e-10, infinity kept."""
    magnitude = np.where(np.isnan(grouped), np.float32(0), np.abs(grouped))
    return np.maximum(magnitude.max(axis=-1, initial=0), SMALLEST_AMAX)


def quantise_e4m3(values, group=128, scale_format="ue8m0"):
    """Group quantisation of f32 rows [rows, K]. Returns codes uint8 [rows, K] and f32 scales [rows, ceil(K / group)]."""
    values = np.asarray(values, np.float64)
    grouped = _in_groups(values, group)
    amax = _largest_magnitude(grouped)
    with np.errstate(invalid="ignore"):
        scales = amax / np.float32(E4M3_MAX)
        if scale_format == "ue8m0":
            scales = next_power_of_two(scales)
        scales = np.where(np.isinf(amax), np.float32(np.nan), scales)
        codes = encode_e4m3(grouped / scales[..., None])
    return codes.reshape(len(values), -1)[:, : values.shape[1]], scales


def widen_e4m3(codes, scales, group=128):
    """The values that codes and scales of quantise_e4m3 stand for, exactly, as float64."""
    return decode_e4m3(codes) * np.repeat(scales.astype(np.float64), group, axis=1)[:, : codes.shape[1]]


def quantise_nvfp4(values):
    """Rows [rows, K] to e2m1 codes [rows, K] and e4m3 scale codes [rows, ceil(K / 16)], with a global scale of 1."""
    values = np.asarray(values, np.float64)
    grouped = _in_groups(values, NVFP4_GROUP)
    amax = _largest_magnitude(grouped)
    with np.errstate(invalid="ignore"):
        scales = np.maximum(decode_e4m3(encode_e4m3(amax / np.float32(E2M1_MAX))), SMALLEST_NVFP4_SCALE).astype(np.float32)
        codes = encode_e2m1(grouped / scales[..., None])
    scale_codes = np.where(np.isinf(amax), np.uint8(0x7F), encode_e4m3(scales))
    return codes.reshape(len(values), -1)[:, : values.shape[1]], scale_codes


def widen_nvfp4(codes, scale_codes):
    scales = np.repeat(decode_e4m3(scale_codes), NVFP4_GROUP, axis=1)[:, : codes.shape[1]]
    return decode_e2m1(codes) * scales


def over_wire(values, wire, group=128, scale_format="ue8m0"):
    """What a receiver reads when bf16 rows [rows, K] travel as `wire`: "bf16", "fp8" or "nvfp4"."""
    if wire == "bf16":
        return values
    if wire == "fp8":
        return widen_e4m3(*quantise_e4m3(values, group, scale_format), group)
    if wire == "nvfp4":
        return widen_nvfp4(*quantise_nvfp4(values))
    raise ValueError(f"no such wire: {wire}")
