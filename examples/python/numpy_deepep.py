"""DeepEP's calls with NumPy, four ranks as threads: a prompt by dispatch and combine, a decode step by the low-latency pair."""

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters.deepep import Buffer  # instead of: from deep_ep import Buffer

HIDDEN, EXPERTS, TOPK, CAP, RANKS = 256, 8, 2, 16, 4


def batch(rank, tokens):
    random = np.random.default_rng([7, rank, tokens])
    hidden = random.normal(size=(tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
    ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int64)
    return hidden, ids, np.full((tokens, TOPK), 0.5, np.float32)


def factor(expert):
    """What an expert of this example multiplies by."""
    return expert + 1.0


def prompt(buffer, first, hidden, ids, weights):
    to_ranks, to_nodes, to_experts, is_there, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    rows, local_ids, local_weights, counts, handle, _ = buffer.dispatch(
        hidden, None, to_ranks, to_nodes, is_there, to_experts, topk_idx=ids, topk_weights=weights
    )
    factors = np.sum(np.where(local_ids >= 0, factor(first + local_ids) * local_weights, 0), axis=1, keepdims=True)
    out, _, _ = buffer.combine((rows.astype(np.float32) * factors).astype(rows.dtype), handle)
    return out


def decode(buffer, first, hidden, ids, weights):
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(hidden, ids, CAP, EXPERTS, use_fp8=False)
    factors = factor(first + np.arange(len(counts)))[:, None, None]
    results = (rows.astype(np.float32) * factors).astype(rows.dtype)
    out, _, _ = buffer.low_latency_combine(results, ids, weights, handle)
    return out


def rank_main(group):
    buffer, first = Buffer(group), group.rank * EXPERTS // RANKS
    errors = []
    for call, tokens in ((prompt, 40 + group.rank), (decode, group.rank)):  # rank 0 has nothing to decode
        hidden, ids, weights = batch(group.rank, tokens)
        out = call(buffer, first, hidden, ids, weights).astype(np.float32)
        expected = np.sum(factor(ids) * weights, axis=1, keepdims=True) * hidden.astype(np.float32)
        errors.append(float(np.abs(out - expected).max(initial=0) / np.abs(expected).max(initial=1)))
    return errors


errors = heddle.run_threads(RANKS, rank_main)
assert max(map(max, errors)) < 1e-2, errors
print(f"{RANKS} ranks, a prompt and a decode step: the largest difference is {max(map(max, errors)):.1e} of the largest output")
