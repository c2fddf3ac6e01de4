"""Weights as engines keep them, drawn from the seed, and their values."""

import ml_dtypes
import numpy as np

KINDS = ("bf16", "fp8_block", "mxfp8", "mxfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def draw(random, kind, experts, rows, columns):
    """Values as stored, and scales; None for bf16."""
    if kind == "bf16":
        return random.normal(0, 0.1, (experts, rows, columns)).astype(ml_dtypes.bfloat16), None
    if kind == "mxfp4":
        values = random.integers(0, 256, (experts, rows, columns // 2), np.uint8)
    else:
        values = random.normal(0, 60, (experts, rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    if kind == "fp8_block":
        return values, random.uniform(5e-4, 4e-3, (experts, -(-rows // 128), -(-columns // 128))).astype(np.float32)
    low = -10 if kind == "mxfp8" else -6
    return values, (2.0 ** random.integers(low, low + 3, (experts, rows, columns // 32))).astype(ml_dtypes.float8_e8m0fnu)


def widened(kind, values, scales):
    """float64 [experts, rows, columns]."""
    if kind == "bf16":
        return values.astype(np.float64)
    if kind == "mxfp4":
        wide = E2M1[np.stack([values & 15, values >> 4], axis=-1)].reshape(*values.shape[:2], -1)
    else:
        wide = values.astype(np.float64)
    scales = scales.astype(np.float64)
    if kind == "fp8_block":
        scales = scales.repeat(128, axis=1)[:, : wide.shape[1]].repeat(128, axis=2)[:, :, : wide.shape[2]]
        return wide * scales
    return wide * scales.repeat(32, axis=2)


def swiglu(gate_up, clamp=None):
    gate, up = np.split(gate_up, 2, axis=-1)
    if clamp is not None:
        gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    return gate / (1 + np.exp(-gate)) * up
