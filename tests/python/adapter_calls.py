"""Calls of DeepEP's buffers, of vLLM's pairs and of SGLang's dispatcher that every place of tensors has: on one rank of a group, with arrays of a kind
(adapted.to), results against the reference. For threads, processes and GPUs alike."""

from types import SimpleNamespace

import support
import test_deepep
import test_elastic_buffer
import test_sglang
import test_vllm
from adapted import EXPERTS, HIDDEN, TOPK, Batch, back, check, first_expert, routed_sums, to, tokens_of
from stored import draw, swiglu, widened

import ml_dtypes
import numpy as np
import oracle
from heddle.adapters import sglang
from heddle.adapters.casts import quantised
from heddle.adapters.deepep import Buffer, ElasticBuffer

LAYERS, MOST = test_deepep.LAYERS, test_deepep.MOST


def prompts_and_decode_steps(test, group, kind):
    buffer = Buffer(group, low_latency_mode=True)
    for step, base in enumerate((9, 150)):
        for layer in LAYERS:
            batch = Batch(group.rank, tokens_of(group.rank, group.ranks, base), step)
            out, (recv_x, *_) = test_deepep.prefill(buffer, layer, batch, kind)
            test.assertEqual((type(recv_x), recv_x.device), (type(out), out.device))
            check(test, layer, batch, out)
        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
        for layer in LAYERS:
            batch = Batch(group.rank, tokens_of(group.rank, group.ranks, 3), step)
            check(test, layer, batch, test_deepep.decode(buffer, layer, batch, kind, hook=bool(step)))
    buffer.destroy()


def a_handle_and_a_bias(test, group, kind):
    """Other rows go where the first ones went, padded; a bias is added; weights come back."""
    buffer, layer = Buffer(group), LAYERS[0]
    batch, other = Batch(group.rank, 6 + group.rank), Batch(group.rank, 6 + group.rank, 1)
    out, (_, recv_ids, recv_weights, counts, handle) = test_deepep.prefill(buffer, layer, batch, kind, num_worst_tokens=40)
    check(test, layer, batch, out)
    test.assertEqual((counts, tuple(recv_ids.shape)), ([], (40, TOPK)))
    recv_x, *nothing, event = buffer.dispatch(to(kind, other.hidden), handle)
    test.assertEqual((nothing, tuple(recv_x.shape)), ([None] * 4, (40, HIDDEN)))
    first = first_expert(group.rank, group.ranks)
    results = to(kind, routed_sums(layer, first, back(recv_x), back(recv_ids), back(recv_weights)))
    bias = to(kind, np.ones(batch.hidden.shape, ml_dtypes.bfloat16))
    out, weights, _ = buffer.combine(results, handle, topk_weights=recv_weights, bias=bias)
    sent = SimpleNamespace(hidden=other.hidden, ids=batch.ids, weights=batch.weights)
    expected = np.asarray(layer.expected(sent), np.float64) + 1
    test.assertLess(oracle.relative_error(back(out), expected), 1e-2)
    np.testing.assert_array_equal(back(weights), np.where(batch.ids >= 0, batch.weights, 0))


def rows_in_fp8_cross_as_they_are(test, group, kind):
    """To every rank, each with its scales."""
    random = np.random.default_rng([support.SEED, group.rank])
    codes = random.integers(0, 0x7E, (5, HIDDEN)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = random.random((5, 2)).astype(np.float32)
    ids = np.tile(np.arange(0, EXPERTS, EXPERTS // group.ranks, dtype=np.int64), (5, 1))
    given = to(kind, ids), to(kind, np.ones(ids.shape, np.float32))
    buffer = Buffer(group)
    _, _, to_experts, _, _ = buffer.get_dispatch_layout(given[0], EXPERTS)
    (values, factors), *_, handle, _ = buffer.dispatch(
        (to(kind, codes), to(kind, scales)), num_tokens_per_expert=to_experts, topk_idx=given[0], topk_weights=given[1]
    )
    here = slice(5 * group.rank, 5 * group.rank + 5)
    test.assertEqual(tuple(values.shape), (5 * group.ranks, HIDDEN))
    np.testing.assert_array_equal(back(values)[here].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(back(factors)[here], scales)
    buffer.combine(to(kind, np.zeros((5 * group.ranks, HIDDEN), ml_dtypes.bfloat16)), handle)


def casts_of_low_latency(test, group, kind):
    for hidden, cast, groups in (
        (HIDDEN, {}, 1),
        (HIDDEN, {"round_scale": True}, 1),
        (512, {"round_scale": True, "use_ue8m0": True}, 1),
        (512, {}, 4),
    ):
        x = np.random.default_rng(group.rank).normal(size=(3, hidden)).astype(ml_dtypes.bfloat16)
        ids = np.tile(np.arange(EXPERTS, dtype=np.int64)[None, ::3], (3, 1))
        buffer, local = Buffer(group), EXPERTS // group.ranks
        stats = to(kind, np.ones(local, np.int32))
        recv_x, counts, handle, *_ = buffer.low_latency_dispatch(to(kind, x), to(kind, ids), MOST, EXPERTS, stats, **cast)
        np.testing.assert_array_equal(back(stats), back(counts) + 1)
        codes, scales = recv_x
        test.assertEqual(tuple(codes.shape), (local, group.ranks * MOST, hidden))
        test.assertEqual(tuple(scales.shape), (local, group.ranks * MOST, groups))
        test.assertEqual(back(scales).strides[1:], (4, 4 * group.ranks * MOST))  # neighbouring rows beside each other
        real = np.arange(group.ranks * MOST) < back(counts)[:, None]
        values = np.where(real[:, :, None], test_deepep.widened(recv_x, counts), 7).astype(ml_dtypes.bfloat16)
        weights = to(kind, np.full(ids.shape, 1 / 3, np.float32))
        out, *_ = buffer.low_latency_combine(to(kind, values), to(kind, ids), weights, handle)
        test.assertLess(np.abs(back(out).astype(np.float32) - x.astype(np.float32)).max(), 0.3)


def steps_of_elastic_buffer(test, group, kind):
    """Both layouts with and without a count that is waited for, and once more by the handle, with a bias and weights."""
    for expand in (False, True):
        for exact in (None, False):
            buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
            for step in range(2):
                batch = Batch(group.rank, tokens_of(group.rank, group.ranks, 6), step)
                out = test_elastic_buffer.elastic(test, buffer, LAYERS[step], batch, kind, expand, exact)
                check(test, LAYERS[step], batch, out)
        hidden, ids, weights = batch.given(kind)
        sent = {"topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS, "do_expand": expand}
        recv_x, _, recv_weights, handle, _ = buffer.dispatch(hidden, **sent)
        _, home, _ = buffer.combine(recv_x, handle, topk_weights=None if expand else recv_weights)
        if not expand:
            np.testing.assert_array_equal(back(home), np.where(batch.ids >= 0, batch.weights, 0))
        again, *_, same, _ = buffer.dispatch(hidden, handle=handle)
        test.assertIs(same, handle)
        np.testing.assert_array_equal(support.bits(back(again)), support.bits(back(recv_x)))
        buffer.combine(again, handle, bias=hidden)


def steps_of_vllm(test, group, kind):
    for batched in (False, True):
        buffer = Buffer(group)
        pairs = [(layer, test_vllm.Pair(buffer, layer, batched, kind)) for layer in LAYERS]
        for step, base in enumerate((9, 3, 12)):
            for layer, pair in pairs:
                batch = Batch(group.rank, tokens_of(group.rank, group.ranks, base), step)
                check(test, layer, batch, pair.call(*batch.given(kind), is_async=step % 2 == 1))


def weights_on_the_input_and_moved_experts(test, group, kind):
    pair, batch = test_vllm.Pair(Buffer(group), LAYERS[0], True, kind), Batch(group.rank, 6)
    given = [to(kind, np.ascontiguousarray(of[:, :1])) for of in (batch.ids.astype(np.int64), batch.weights)]
    out = back(pair.call(to(kind, batch.hidden), *given, on_input=True))
    factors = batch.weights[:, :1].astype(ml_dtypes.bfloat16).astype(np.float32)
    scaled = (batch.hidden.astype(np.float32) * factors).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = np.zeros(batch.hidden.shape)
    for token, expert in enumerate(batch.ids[:, 0]):
        if expert >= 0:
            expected[token] = LAYERS[0].expert(expert, scaled[token : token + 1])[0]
    test.assertLess(oracle.relative_error(out, expected), 1e-2)
    places = np.roll(np.arange(EXPERTS), 3)  # expert e lies at places[e]
    moved = test_deepep.Layer(0)
    for name in ("gate", "up", "down"):
        setattr(moved, name, getattr(LAYERS[0], name)[np.argsort(places)])
    pair = test_vllm.Pair(Buffer(group), moved, True, kind, global_to_physical=to(kind, places))
    check(test, LAYERS[0], batch, pair.call(*batch.given(kind)))


def blocks_of_vllm(test, group, kind):
    """fp8 weights in blocks, rows quantised before they travel, on their way, and where they arrive."""
    random, wide, local = np.random.default_rng(support.SEED), 128, EXPERTS // group.ranks
    first, first_scales = draw(random, "fp8_block", EXPERTS, 2 * wide, HIDDEN)
    second, second_scales = draw(random, "fp8_block", EXPERTS, HIDDEN, wide)
    matrices = widened("fp8_block", first, first_scales), widened("fp8_block", second, second_scales)
    quant = {"quant_dtype": np.dtype(ml_dtypes.float8_e4m3fn), "block_shape": [128, 128]}
    here = slice(group.rank * local, (group.rank + 1) * local)
    scales = {"w1_scale": to(kind, first_scales[here]), "w2_scale": to(kind, second_scales[here])}
    batch = Batch(group.rank, 6)
    expected = np.zeros(batch.hidden.shape)
    for token, choice in np.argwhere(batch.ids >= 0):
        expert, row = batch.ids[token, choice], batch.hidden[token].astype(np.float64)
        result = matrices[1][expert] @ swiglu(matrices[0][expert] @ row)
        expected[token] += batch.weights[token, choice] * result
    for batched, fp8_dispatch in ((False, False), (True, False), (True, True)):
        more = {"use_fp8_dispatch": fp8_dispatch} if batched else {}
        pair = test_vllm.Pair(Buffer(group), LAYERS[0], batched, kind, SimpleNamespace(**quant, **scales), **more)
        pair.w1, pair.w2 = to(kind, first[here]), to(kind, second[here])
        out = back(pair.call(*batch.given(kind)))
        test.assertLess(oracle.relative_error(out, expected), 0.1)  # rows and activations are rounded to fp8


def steps_of_sglang(test, group, kind):
    """A prompt and a decode step of two layers, of bfloat16 and of fp8 rows."""
    is_prompt = {}
    for output_dtype, bound in ((None, 1e-2), ("fp8", 6e-2)):
        settings = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "num_max_dispatch_tokens_per_rank": MOST}
        more = {"is_extend_in_batch": lambda: is_prompt[group.rank], "output_dtype": output_dtype or "bf16"}
        dispatchers = [sglang.DeepEPDispatcher(group, TOPK, **settings, **more) for _ in LAYERS]
        for step, base in enumerate((20, 3)):
            is_prompt[group.rank] = step == 0
            for layer, dispatcher in zip(LAYERS, dispatchers):
                batch = Batch(group.rank, tokens_of(group.rank, group.ranks, base), step)
                taken = dispatcher.dispatch(to(kind, batch.hidden), test_sglang.topk_output(kind, batch))
                out = back(dispatcher.combine(test_sglang.runner(layer, taken, group.rank, group.ranks, kind)))
                if len(out):
                    test.assertLess(oracle.relative_error(out, np.asarray(layer.expected(batch), np.float64)), bound)
    sglang.forget_buffer(group)


def rows_quantised_before_they_travel(test, group, kind):
    """The bits of the library's own."""
    rows = np.random.default_rng(support.SEED).normal(size=(3, 2, 256)).astype(ml_dtypes.bfloat16)
    rows[0, 0, :128] = 0
    rows[1] *= 1e4
    for one, other in zip(quantised(rows, "rows"), quantised(to(kind, rows), "rows"), strict=True):
        test.assertEqual(back(other).dtype, one.dtype)
        np.testing.assert_array_equal(one.view(np.uint8), np.ascontiguousarray(back(other)).view(np.uint8))


CALLS = (
    prompts_and_decode_steps,
    a_handle_and_a_bias,
    rows_in_fp8_cross_as_they_are,
    casts_of_low_latency,
    steps_of_elastic_buffer,
    steps_of_vllm,
    weights_on_the_input_and_moved_experts,
    blocks_of_vllm,
    steps_of_sglang,
    rows_quantised_before_they_travel,
)
"""Each with (test, group, kind); collective."""
