"""Weight matrices as checkpoints store them: how each kind is widened, and how random ones are drawn.

A weight is row-major [N, K]; K is summed. `widen` is exact in float64 (the division of the packed nvfp4 form aside, which rounds
to float64).
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

import formats

E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
BLOCK = 128
KINDS = ("bf16", "fp8_block", "mxfp4", "nvfp4", "nvfp4_packed", "mxfp8")


@dataclass
class Weight:
    """codes: bf16 [N, K], e4m3 codes uint8 [N, K], or packed e2m1 uint8 [N, K/2]. scales: what the kind stores beside them."""

    kind: str
    codes: np.ndarray
    scales: np.ndarray = None
    tensor_scale: np.float32 = None
    _wide: np.ndarray = field(default=None, repr=False)

    def widen(self):
        """The matrix as float64 [N, K]."""
        if self._wide is None:
            self._wide = _WIDEN[self.kind](self)
        return self._wide


def _scales_as_f64(scales):
    """Scales kept as uint8 are ue8m0 bytes; other types are values."""
    return formats.decode_ue8m0(scales) if scales.dtype == np.uint8 else scales.astype(np.float64)


def _widen_bf16(weight):
    return weight.codes.astype(np.float64)


def _widen_fp8_block(weight):
    rows, columns = weight.codes.shape
    scales = _scales_as_f64(weight.scales)
    spread = np.repeat(np.repeat(scales, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]
    return formats.decode_e4m3(weight.codes) * spread


def _widen_mxfp4(weight):
    return formats.decode_e2m1(formats.unpack_e2m1(weight.codes)) * np.repeat(_scales_as_f64(weight.scales), 32, axis=1)


def _widen_nvfp4(weight):
    scales = np.repeat(formats.decode_e4m3(weight.scales), formats.NVFP4_GROUP, axis=1)
    values = formats.decode_e2m1(formats.unpack_e2m1(weight.codes)) * scales
    factor = np.float64(weight.tensor_scale)
    return values / factor if weight.kind == "nvfp4_packed" else values * factor


def _widen_mxfp8(weight):
    return formats.decode_e4m3(weight.codes) * np.repeat(_scales_as_f64(weight.scales), 32, axis=1)


_WIDEN = {
    "bf16": _widen_bf16,
    "fp8_block": _widen_fp8_block,
    "mxfp4": _widen_mxfp4,
    "nvfp4": _widen_nvfp4,
    "nvfp4_packed": _widen_nvfp4,
    "mxfp8": _widen_mxfp8,
}


def _random_e4m3(random, shape):
    """Mostly Gaussian codes with every finite code sprinkled in (subnormals and negative zero included)."""
    codes = formats.encode_e4m3(random.normal(0, 100, shape).astype(np.float32))
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    return np.where(random.random(shape) < 0.02, random.choice(finite, shape), codes)


def _random_exponents(random, shape, deviation, typical_code):
    """ue8m0 bytes that bring codes of a typical magnitude to about `deviation`, spread over eight binades."""
    middle = 127 + int(np.round(np.log2(deviation / typical_code)))
    return random.integers(middle - 6, middle + 2, shape).astype(np.uint8)


def random_weight(random, kind, rows, columns, deviation, block_scale="f32"):
    """A random weight [rows, columns] whose values have about the standard deviation given. block_scale: "f32" or "ue8m0"."""
    if kind == "bf16":
        return Weight(kind, random.normal(0, deviation, (rows, columns)).astype(ml_dtypes.bfloat16))
    if kind == "fp8_block":
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        if block_scale == "ue8m0":
            scales = _random_exponents(random, blocks, 2 * deviation, 100)
        else:
            scales = (deviation / 100 * np.exp(random.normal(0, 0.5, blocks))).astype(np.float32)
        return Weight(kind, _random_e4m3(random, (rows, columns)), scales)
    if kind == "mxfp8":
        return Weight(
            kind, _random_e4m3(random, (rows, columns)), _random_exponents(random, (rows, columns // 32), 2 * deviation, 100)
        )
    packed = formats.pack_e2m1(random.integers(0, 16, (rows, columns)))
    if kind == "mxfp4":
        scales = _random_exponents(random, (rows, columns // 32), 2 * deviation, 3)
        empty = random.random(scales.shape) < 0.02  # groups of zeros, whose scale byte may be anything but NaN
        packed.reshape(rows, -1, 16)[empty] = 0
        return Weight(kind, packed, np.where(empty, random.integers(0, 255, scales.shape), scales).astype(np.uint8))
    scales = formats.encode_e4m3(np.exp2(random.normal(3, 1, (rows, columns // 16))).astype(np.float32))
    tensor_scale = np.float32(deviation / 30 * random.uniform(0.8, 1.25))
    if kind == "nvfp4_packed":
        tensor_scale = np.float32(1) / tensor_scale
    return Weight(kind, packed, scales, tensor_scale)
