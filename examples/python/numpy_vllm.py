"""vLLM's modular kernel with NumPy, four ranks as threads: prepare, the experts, finalize, rows once a rank and blocks by expert."""

from types import SimpleNamespace

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters.deepep import Buffer
from heddle.adapters.vllm import (  # instead of: vLLM's DeepEPHTPrepareAndFinalize, DeepGemmExperts and their batched forms
    HeddleBatchedExperts,
    HeddleBatchedPrepareAndFinalize,
    HeddleExperts,
    HeddlePrepareAndFinalize,
)

HIDDEN, WIDE, EXPERTS, TOPK, CAP, RANKS = 256, 128, 8, 2, 16, 4
LOCAL = EXPERTS // RANKS
MODEL, QUANT = SimpleNamespace(swiglu_limit=None), SimpleNamespace(quant_dtype=None)  # vLLM's FusedMoEConfig, FusedMoEQuantConfig

random = np.random.default_rng(7)
w1 = random.normal(0, 0.05, (EXPERTS, 2 * WIDE, HIDDEN)).astype(ml_dtypes.bfloat16)
w2 = random.normal(0, 0.05, (EXPERTS, HIDDEN, WIDE)).astype(ml_dtypes.bfloat16)


def batch(rank, tokens):
    random = np.random.default_rng([7, rank, tokens])
    hidden = random.normal(size=(tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
    ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int64)
    return hidden, ids, random.uniform(0.1, 1, (tokens, TOPK)).astype(np.float32)


def kernel(carrier, experts, first, hidden, ids, weights):
    """What vLLM's FusedMoEKernel does with the two."""
    here = slice(first, first + LOCAL)
    places = np.full(EXPERTS, -1, np.int32)
    places[here] = np.arange(LOCAL)
    rows, scales, meta, own_ids, own_weights = carrier.prepare(hidden, weights, ids, EXPERTS, places, False, QUANT, False)
    ids, weights = (ids, weights) if own_ids is None else (own_ids, own_weights)
    _, _, shape = experts.workspace_shapes(rows.shape[-2], 2 * WIDE, HIDDEN, TOPK, EXPERTS, LOCAL, meta, "silu")
    results = np.empty(shape, ml_dtypes.bfloat16)
    arguments = (results, rows, w1[here], w2[here], weights, ids, "silu", EXPERTS, places, scales, None, None, None, meta, False)
    experts.apply(*arguments)
    out = np.empty_like(hidden)
    carrier.finalize(out, results, weights, ids, False, experts.finalize_weight_and_reduce_impl())
    return out


def rank_main(group):
    buffer, first = Buffer(group), group.rank * LOCAL
    standard = HeddlePrepareAndFinalize(buffer, RANKS, 1, first), HeddleExperts(MODEL, QUANT)
    batched = HeddleBatchedPrepareAndFinalize(buffer, CAP, RANKS), HeddleBatchedExperts(MODEL, QUANT, CAP, RANKS)
    source = heddle.Source.of_fused_arrays(w1, w2, topk=TOPK)
    errors = []
    for pair, tokens in ((standard, 40 + group.rank), (batched, group.rank)):  # rank 0 has nothing to decode
        hidden, ids, weights = batch(group.rank, tokens)
        out = kernel(*pair, first, hidden, ids, weights).astype(np.float32)
        options = heddle.LayerOptions(cap=64, activation="bf16")
        expected = heddle.reference(source, hidden, ids.astype(np.int32), weights, options).astype(np.float32)
        errors.append(float(np.abs(out - expected).max(initial=0) / np.abs(expected).max(initial=1e-3)))
    return errors


errors = heddle.run_threads(RANKS, rank_main)
assert max(map(max, errors)) < 1e-2, errors
print(f"{RANKS} ranks, a prompt and a decode step: the largest difference is {max(map(max, errors)):.1e} of the largest output")
