"""DeepEP's second form, ElasticBuffer, over heddle.Exchange of way elastic, against heddle.reference."""

import unittest

import adapted
from adapted import EXPERTS, HIDDEN, TOPK, Batch, Layer, back, check, first_expert, routed_sums, to, tokens_of

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters.deepep import ElasticBuffer

LAYERS = [Layer(0), Layer(1)]
MOST = 16
RANKS = (1, 2, 4)


def elastic(test, buffer, layer, batch, kind, expand, exact):
    hidden, ids, weights = batch.given(kind)
    ranks, stats = buffer.num_ranks, to(kind, np.zeros(EXPERTS // buffer.num_ranks, np.int32))
    recv_x, recv_ids, recv_weights, handle, event = buffer.dispatch(
        hidden,
        topk_idx=ids,
        topk_weights=weights,
        cumulative_local_expert_recv_stats=stats,
        num_experts=EXPERTS,
        expert_alignment=8,
        num_sms=buffer.get_theoretical_num_sms(EXPERTS, TOPK),
        do_cpu_sync=exact,
        do_expand=expand,
    )
    event.current_stream_wait()
    first, rows = first_expert(buffer.rank_idx, ranks), back(recv_x)
    counts = back(handle.num_unaligned_recv_tokens_per_expert)
    np.testing.assert_array_equal(back(stats), counts)
    sources = back(handle.psum_num_recv_tokens_per_scaleup_rank)
    test.assertEqual((len(sources), sources[-1]), (ranks, handle.num_recv_tokens))
    test.assertEqual(handle.num_recv_tokens_per_expert_list, [int(-(-count // 8) * 8) for count in counts])
    if exact is False:
        test.assertEqual(len(rows) >= ranks * MOST, True)
    ends = back(handle.psum_num_recv_tokens_per_expert)
    if not expand:
        test.assertEqual(ends.tolist(), np.cumsum(handle.num_recv_tokens_per_expert_list).tolist())
        results = routed_sums(layer, first, rows, back(recv_ids), back(recv_weights))
        return buffer.combine(to(kind, results), handle)[0]
    test.assertIsNone(recv_ids)
    results = np.full(rows.shape, 7, ml_dtypes.bfloat16)
    for local, (count, end) in enumerate(zip(counts, ends)):
        test.assertEqual((end - count) % 8, 0)
        mine = slice(end - count, end)
        outputs = layer.expert(first + local, rows[mine].astype(np.float32)) * back(recv_weights)[mine, None]
        results[mine] = outputs.astype(ml_dtypes.bfloat16)
    return buffer.combine(to(kind, results), handle)[0]


class Elastic(unittest.TestCase):
    def test_steps(self):
        """Both layouts with and without a count that is waited for, two layers, two steps."""
        for kind in adapted.kinds(self):
            for ranks in RANKS:
                for expand in (False, True):
                    for exact in (None, False):

                        def main(group, kind=kind, ranks=ranks, expand=expand, exact=exact):
                            buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
                            for step in range(2):
                                for layer in LAYERS:
                                    batch = Batch(group.rank, tokens_of(group.rank, ranks, 6), step)
                                    check(self, layer, batch, elastic(self, buffer, layer, batch, kind, expand, exact))

                        with self.subTest(kind=kind, ranks=ranks, expand=expand, exact=exact):
                            heddle.run_threads(ranks, main, deadline=20)

    def test_a_handle_is_used_again(self):
        def main(group):
            buffer, batch = ElasticBuffer(group, num_max_tokens_per_rank=MOST), Batch(group.rank, 6)
            hidden, ids, weights = batch.given("numpy")
            for expand in (False, True):
                sent = {"topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS, "do_expand": expand}
                recv_x, recv_ids, recv_weights, handle, _ = buffer.dispatch(hidden, **sent)
                with self.assertRaisesRegex(heddle.InputError, "under way"):
                    buffer.dispatch(hidden, handle=handle)
                _, home, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
                np.testing.assert_array_equal(home, np.where(ids >= 0, weights, 0))
                again, ids_again, nothing, same, _ = buffer.dispatch(hidden, handle=handle)
                self.assertIs(same, handle)
                self.assertIsNone(nothing)
                np.testing.assert_array_equal(again, recv_x)
                self.assertIsNone(ids_again) if expand else np.testing.assert_array_equal(ids_again, recv_ids)
                out, *_ = buffer.combine(again, handle, bias=hidden)
                copies = (ids >= 0).sum(axis=1) if expand else sum(((ids // 4 == r) & (ids >= 0)).any(axis=1) for r in range(2))
                expected = hidden.astype(np.float32) * (copies[:, None] + 1)
                np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2**-6)

        heddle.run_threads(2, main, deadline=20)

    def test_fp8_rows_and_their_scales(self):
        def main(group):
            buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST)
            random = np.random.default_rng([5, group.rank])
            codes = random.normal(size=(3, HIDDEN)).astype(ml_dtypes.float8_e4m3fn)
            scales = random.integers(0, 2**31, (3, 1)).astype(np.int32)
            ids = np.tile(np.array([[0, 7]], np.int64), (3, 1))
            (got, columns), _, _, handle, _ = buffer.dispatch(
                (codes, scales), ids, num_experts=EXPERTS, do_expand=True, use_tma_aligned_col_major_sf=True
            )
            buffer.combine(np.zeros(got.shape, ml_dtypes.bfloat16), handle)
            return codes, scales, got, columns

        results = heddle.run_threads(2, main, deadline=20)
        for _, _, got, columns in results:
            np.testing.assert_array_equal(got.view(np.uint8), np.concatenate([sent.view(np.uint8) for sent, *_ in results]))
            np.testing.assert_array_equal(columns, np.concatenate([sent for _, sent, *_ in results]))
            self.assertEqual(columns.strides, (4, 32))  # six rows, columns of eight

    def test_helpers_and_wrong_arguments(self):
        group = heddle.thread_group(1)[0]
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=2)
        self.assertGreater(ElasticBuffer.get_buffer_size_hint(group, MOST, HIDDEN, TOPK), MOST * HIDDEN * 2)
        self.assertEqual((buffer.get_theoretical_num_sms(EXPERTS, TOPK), buffer.get_theoretical_num_qps(0)), (0, 0))
        self.assertEqual(buffer.get_logical_domain_size(), (1, 1))
        buffer.barrier()
        hidden, ids, weights = Batch(0, 4).given("numpy")
        for arguments, words in (
            ({"topk_idx": ids, "num_experts": EXPERTS}, "at most num_max_tokens_per_rank = 2 tokens, got 4"),
            ({"topk_idx": ids}, "expected topk_idx and num_experts, or a handle"),
            ({"topk_idx": ids, "num_experts": EXPERTS, "num_max_tokens_per_rank": 4, "topk_weights": weights[:2]}, r"topk_weights: expected float32 \[4, 3\], got float32 \[2, 3\]"),
            ({"topk_idx": ids, "num_experts": EXPERTS, "num_max_tokens_per_rank": 4, "expert_alignment": -1}, "expert_alignment: expected at least 1, got -1"),
        ):  # fmt: skip
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                buffer.dispatch(hidden, **arguments)
            buffer.reset()
        recv_x, *_, handle, _ = buffer.dispatch(hidden, ids, num_experts=EXPERTS, num_max_tokens_per_rank=4)
        with self.assertRaisesRegex(heddle.InputError, r"x: expected bfloat16 \[4, 128\], got bfloat16 \[2, 128\]"):
            buffer.combine(recv_x[:2], handle)
        buffer.combine(recv_x, handle)
        with self.assertRaisesRegex(heddle.InputError, "its handle has"):
            buffer.dispatch(hidden, handle=handle, num_experts=4)
        with self.assertRaisesRegex(heddle.InputError, "no do_cpu_sync beside it"):
            buffer.dispatch(hidden, handle=handle, do_cpu_sync=True)


if __name__ == "__main__":
    unittest.main()
