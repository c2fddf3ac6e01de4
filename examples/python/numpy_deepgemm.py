"""DeepGEMM's calls with NumPy, four ranks as threads: a layer by mega MoE, and the same rows by grouped products on one rank."""

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters import deepgemm as deep_gemm  # instead of: import deep_gemm

HIDDEN, WIDE, EXPERTS, TOPK, CAP, RANKS = 256, 128, 8, 2, 16, 4
LOCAL = EXPERTS // RANKS
GROUP = heddle.Quantisation(32, "ue8m0")

random = np.random.default_rng(7)


def fp4(rows, columns):
    """Two values a byte, and powers of 2 of 32 values each."""
    values = random.integers(0, 256, (EXPERTS, rows, columns // 2), np.uint8).view(np.int8)
    scales = 2.0 ** random.integers(-7, -4, (EXPERTS, rows, columns // 32))
    return values, deep_gemm.transform_sf_into_required_layout(scales.astype(np.float32), rows, columns, (1, 32), EXPERTS)


l1, l2 = fp4(2 * WIDE, HIDDEN), fp4(HIDDEN, WIDE)


def batch(rank, tokens):
    random = np.random.default_rng([7, rank, tokens])
    rows = heddle.formats.quantise_fp8(random.normal(size=(tokens, HIDDEN)).astype(np.float32), GROUP)
    ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int64)
    return rows, ids, random.uniform(0.1, 1, (tokens, TOPK)).astype(np.float32)


def packed(scales):
    return deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales.astype(np.float32))


def by_products(rows, ids, weights):
    """Both products over all pairs of a token and an expert, and what stands between them in NumPy."""
    (codes, scales), pairs = rows, ids.reshape(-1).astype(np.int32)
    recipes = {"recipe_a": (1, 32), "recipe_b": (1, 32)}
    once_a_pair = codes.repeat(TOPK, axis=0), packed(scales.astype(np.float32).repeat(TOPK, axis=0))
    gate_up = np.empty((len(pairs), 2 * WIDE), ml_dtypes.bfloat16)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(once_a_pair, l1, gate_up, pairs, **recipes)
    gate, up = np.split(gate_up.astype(np.float32), 2, axis=1)
    active, active_scales = heddle.formats.quantise_fp8(gate / (1 + np.exp(-gate)) * up * weights.reshape(-1, 1), GROUP)
    results = np.empty((len(pairs), HIDDEN), ml_dtypes.bfloat16)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous((active, packed(active_scales)), l2, results, pairs, **recipes)
    return results.astype(np.float32).reshape(-1, TOPK, HIDDEN).sum(axis=1)


def rank_main(group):
    here = slice(group.rank * LOCAL, (group.rank + 1) * LOCAL)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(group, EXPERTS, CAP, TOPK, HIDDEN, WIDE)
    weights = deep_gemm.transform_weights_for_mega_moe(*((values[here], scales[here]) for values, scales in (l1, l2)))
    errors = []
    for tokens in (5 * group.rank, 3):  # rank 0 has nothing in the first step
        (codes, scales), ids, topk_weights = batch(group.rank, tokens)
        buffer.x[:tokens], buffer.x_sf[:tokens] = codes, packed(scales)
        buffer.topk_idx[:tokens], buffer.topk_weights[:tokens] = ids, topk_weights
        y = np.empty((tokens, HIDDEN), ml_dtypes.bfloat16)
        deep_gemm.fp8_fp4_mega_moe(y, *weights, buffer)
        expected = by_products((codes, scales), ids, topk_weights)
        errors.append(float(np.abs(y.astype(np.float32) - expected).max(initial=0) / np.abs(expected).max(initial=1e-3)))
    return errors


errors = heddle.run_threads(RANKS, rank_main)
assert max(map(max, errors)) < 1e-2, errors
print(f"{RANKS} ranks, two steps: mega MoE and grouped products differ by {max(map(max, errors)):.1e} of the largest output")
