"""DeepEP's calls over heddle.Exchange, in the order in which engines make them, against heddle.reference."""

import threading
import unittest

import adapted
import support
from adapted import EXPERTS, HIDDEN, TOPK, Batch, Layer, back, check, first_expert, routed_sums, to, tokens_of

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters.deepep import Buffer, Config, EventOverlap

LAYERS = [Layer(0), Layer(1)]
MOST = 16
RANKS = (1, 2, 4)


def prefill(buffer, layer, batch, kind, **more):
    """A layer of a prompt: layout, dispatch, experts, combine."""
    hidden, ids, weights = batch.given(kind)
    to_ranks, to_nodes, to_experts, is_there, event = buffer.get_dispatch_layout(ids, EXPERTS, async_finish=True)
    layout = {"num_tokens_per_rank": to_ranks, "num_tokens_per_rdma_rank": to_nodes, "num_tokens_per_expert": to_experts}
    config = Buffer.get_dispatch_config(buffer.group_size)
    recv_x, recv_ids, recv_weights, counts, handle, event = buffer.dispatch(
        hidden,
        topk_idx=ids,
        topk_weights=weights,
        is_token_in_rank=is_there,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
        config=config,
        **layout,
        **more,
    )
    event.current_stream_wait()
    first = first_expert(buffer.rank, buffer.group_size)
    results = routed_sums(layer, first, back(recv_x), back(recv_ids), back(recv_weights))
    out, _, event = buffer.combine(to(kind, results), handle, previous_event=Buffer.capture(), async_finish=True)
    event.current_stream_wait()
    return out, (recv_x, recv_ids, recv_weights, counts, handle)


def masked_experts(layer, first, rows, counts):
    """Blocks of rows through the local experts; what is nobody's is left to be anything."""
    results = np.full(rows.shape, 7, ml_dtypes.bfloat16)
    for local, count in enumerate(counts):
        results[local, :count] = layer.expert(first + local, rows[local, :count].astype(np.float32))
    return results


def decode(buffer, layer, batch, kind, *, hook=False, out=None, **cast):
    """A layer of a decode step, low latency."""
    hidden, ids, weights = batch.given(kind)
    cast = {"use_fp8": False, **cast}
    recv_x, counts, handle, event, receive = buffer.low_latency_dispatch(
        hidden, ids, MOST, EXPERTS, async_finish=not hook, return_recv_hook=hook, **cast
    )
    receive() if hook else event.current_stream_wait()
    first = first_expert(buffer.rank, buffer.group_size)
    results = masked_experts(layer, first, widened(recv_x, counts), back(counts))
    out, event, receive = buffer.low_latency_combine(
        to(kind, results), ids, weights, handle, async_finish=not hook, return_recv_hook=hook, out=out
    )
    receive() if hook else event.current_stream_wait()
    return out


def widened(recv_x, counts):
    """Rows as float32, of a pair as well."""
    if not isinstance(recv_x, tuple):
        return back(recv_x).astype(np.float32)
    codes, scales = (back(part) for part in recv_x)
    if scales.dtype == np.int32:
        scales = np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu)
    return codes.astype(np.float32) * np.repeat(scales.astype(np.float32), 128, axis=-1)


class DeepEP(unittest.TestCase):
    def on_ranks(self, ranks, rank_main):
        return heddle.run_threads(ranks, rank_main, deadline=20)

    def test_prefill_and_decode(self):
        """Two layers of a prompt, the switch, two steps of two layers, and a longer prompt again."""
        for kind in adapted.kinds(self):
            for ranks in RANKS:

                def main(group, kind=kind, ranks=ranks):
                    buffer = Buffer(group, low_latency_mode=True)
                    for step, base in enumerate((9, 5, 150)):
                        for layer in LAYERS:
                            batch = Batch(group.rank, tokens_of(group.rank, ranks, base), step)
                            check(self, layer, batch, prefill(buffer, layer, batch, kind)[0])
                        buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
                        for layer in LAYERS:
                            batch = Batch(group.rank, tokens_of(group.rank, ranks, 3), step)
                            check(self, layer, batch, decode(buffer, layer, batch, kind, hook=bool(step)))
                    buffer.destroy()

                with self.subTest(kind=kind, ranks=ranks):
                    self.on_ranks(ranks, main)

    def test_layout(self):
        ids = np.array([[0, 1, -1], [7, 2, 3], [-1, -1, -1]], np.int64)

        def main(group):
            return Buffer(group).get_dispatch_layout(ids, EXPERTS)

        for to_ranks, to_nodes, to_experts, is_there, event in self.on_ranks(2, main):
            np.testing.assert_array_equal(to_ranks, [2, 1])
            self.assertIsNone(to_nodes)
            np.testing.assert_array_equal(to_experts, [1, 1, 1, 1, 0, 0, 0, 1])
            np.testing.assert_array_equal(is_there, [[True, False], [True, True], [False, False]])
            self.assertEqual((to_ranks.dtype, to_experts.dtype, is_there.dtype), (np.int32, np.int32, np.bool_))
            self.assertIsInstance(event, EventOverlap)

    def test_what_arrives(self):
        """Rows by rank and token, as they were sent; local numbers; counts aligned up; padding to num_worst_tokens."""

        def main(group):
            batch = Batch(group.rank, 6 + group.rank)
            buffer = Buffer(group)
            plain = prefill(buffer, LAYERS[0], batch, "numpy", expert_alignment=4)
            out, padded = prefill(buffer, LAYERS[0], batch, "numpy", num_worst_tokens=40)
            check(self, LAYERS[0], batch, out)
            return plain[1], padded

        batches = [Batch(rank, 6 + rank) for rank in range(2)]
        for rank, (plain, padded) in enumerate(self.on_ranks(2, main)):
            recv_x, recv_ids, recv_weights, counts, _ = plain
            first = first_expert(rank, 2)
            mine = [(batch.ids >= first) & (batch.ids < first + 4) for batch in batches]
            there = [here.any(axis=1) for here in mine]
            np.testing.assert_array_equal(recv_x, np.concatenate([b.hidden[t] for b, t in zip(batches, there)]))
            local = np.concatenate([np.where(m, b.ids - first, -1)[t] for b, m, t in zip(batches, mine, there)])
            np.testing.assert_array_equal(recv_ids, local)
            np.testing.assert_array_equal(
                recv_weights, np.concatenate([np.where(m, b.weights, 0)[t] for b, m, t in zip(batches, mine, there)])
            )
            self.assertEqual(counts, [-(-int((local == expert).sum()) // 4) * 4 for expert in range(4)])
            self.assertEqual((padded[0].shape, padded[1].shape, padded[3]), ((40, HIDDEN), (40, TOPK), []))
            np.testing.assert_array_equal(padded[0][: len(local)], recv_x)
            self.assertTrue((padded[1][len(local) :] == -1).all())

    def test_rows_in_fp8_cross_as_they_are(self):
        kinds = list(adapted.kinds(self))

        def main(group):
            buffer, tokens = Buffer(group), 5 + group.rank
            random = np.random.default_rng([3, group.rank])
            codes = random.normal(size=(tokens, HIDDEN)).astype(ml_dtypes.float8_e4m3fn)
            scales = random.uniform(1e-3, 1, (tokens, 1)).astype(np.float32)
            ids = np.tile(np.arange(EXPERTS, dtype=np.int64)[None, ::3], (tokens, 1))  # an expert of each of two ranks
            layout = buffer.get_dispatch_layout(ids, EXPERTS)
            arguments = {"num_tokens_per_expert": layout[2], "topk_idx": ids, "topk_weights": np.ones(ids.shape, np.float32)}
            received = {}
            for kind in kinds:
                recv_x, *_, handle, _ = buffer.dispatch((to(kind, codes), to(kind, scales)), **arguments)
                received[kind] = [back(part) for part in recv_x]
                buffer.combine(np.zeros((len(received[kind][0]), HIDDEN), ml_dtypes.bfloat16), handle)
            return codes, scales, received

        results = self.on_ranks(2, main)
        for *_, received in results:
            for codes, scales in received.values():
                np.testing.assert_array_equal(codes.view(np.uint8), np.concatenate([sent.view(np.uint8) for sent, *_ in results]))
                np.testing.assert_array_equal(scales, np.concatenate([sent for _, sent, _ in results]))

    def test_a_handle_is_used_again(self):
        """As training does it: backwards, combine becomes a dispatch and dispatch a combine."""

        def main(group):
            buffer, batch = Buffer(group), Batch(group.rank, tokens_of(group.rank, 2, 6))
            _, (recv_x, *_, handle) = prefill(buffer, LAYERS[0], batch, "numpy")
            doubled = (batch.hidden.astype(np.float32) * 2).astype(ml_dtypes.bfloat16)
            again, *nothing, event = buffer.dispatch(doubled, handle=handle)
            self.assertEqual(nothing, [None] * 4)
            np.testing.assert_array_equal(again.astype(np.float32), recv_x.astype(np.float32) * 2)
            out, weights, _ = buffer.combine(again, handle, bias=(doubled, doubled))
            copies = sum(((batch.ids // 4 == rank) & (batch.ids >= 0)).any(axis=1) for rank in range(2))[:, None]
            np.testing.assert_array_equal(out, (doubled.astype(np.float32) * (copies + 2)).astype(ml_dtypes.bfloat16))
            self.assertIsNone(weights)

        self.on_ranks(2, main)

    def test_weights_come_back(self):
        def main(group):
            buffer, batch = Buffer(group), Batch(group.rank, 5)
            hidden, ids, weights = batch.given("numpy")
            experts = buffer.get_dispatch_layout(ids, EXPERTS)[2]
            sent = {"num_tokens_per_expert": experts, "topk_idx": ids, "topk_weights": weights}
            recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(hidden, **sent)
            with self.assertRaisesRegex(heddle.InputError, "topk_weights: not supported"):
                buffer.combine(recv_x, handle, topk_weights=recv_weights + 1)
            _, home, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
            np.testing.assert_array_equal(home, np.where(ids >= 0, weights, 0))

        self.on_ranks(2, main)

    def test_low_latency_casts(self):
        for hidden, cast, kind, scale in (
            (HIDDEN, {}, np.float32, (1,)),
            (HIDDEN, {"round_scale": True}, np.float32, (1,)),
            (512, {"round_scale": True, "use_ue8m0": True}, np.int32, (1,)),
            (512, {}, np.float32, (4,)),
        ):

            def main(group, hidden=hidden, cast=cast):
                x = np.random.default_rng(group.rank).normal(size=(3, hidden)).astype(ml_dtypes.bfloat16)
                ids = np.tile(np.arange(EXPERTS, dtype=np.int64)[None, ::3], (3, 1))
                buffer = Buffer(group)
                stats = np.zeros(4, np.int32)
                recv_x, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, stats, **cast)
                np.testing.assert_array_equal(stats, counts)
                codes, scales = recv_x
                values = widened(recv_x, counts).astype(ml_dtypes.bfloat16)
                weights = np.full(ids.shape, 1 / 3, np.float32)
                given = buffer.get_next_low_latency_combine_buffer(handle)
                given[:] = values
                out, _, hook = buffer.low_latency_combine(given, ids, weights, handle, zero_copy=True)
                self.assertIsNone(hook)
                self.assertLess(np.abs(out.astype(np.float32) - x.astype(np.float32)).max(), 0.3)
                return codes, scales

            with self.subTest(hidden=hidden, cast=cast):
                for codes, scales in self.on_ranks(2, main):
                    self.assertEqual((codes.dtype, codes.shape), (ml_dtypes.float8_e4m3fn, (4, 2 * MOST, hidden)))
                    self.assertEqual((scales.dtype, scales.shape), (kind, (4, 2 * MOST, *scale)))
                    self.assertEqual(scales.strides[1:], (4, 4 * 2 * MOST))  # neighbouring rows beside each other
                    if cast and kind == np.float32:
                        real = scales[scales > 0]
                        np.testing.assert_array_equal(np.frexp(real)[0], np.full(real.shape, 0.5))

    def test_two_halves_of_a_batch(self):
        """The second half is dispatched before the first comes home; a third one is refused."""

        def main(group):
            buffer, batches = Buffer(group), [Batch(group.rank, 4, half) for half in range(2)]
            taken = []
            for batch in batches:
                hidden, ids, _ = batch.given("numpy")
                taken.append(buffer.low_latency_dispatch(hidden, ids, MOST, EXPERTS, use_fp8=False))
            with self.assertRaisesRegex(heddle.InputError, "2 dispatches of way low_latency have no combine yet"):
                buffer.low_latency_dispatch(hidden, ids, MOST, EXPERTS, use_fp8=False)
            first = first_expert(group.rank, group.ranks)
            for batch, (rows, counts, handle, *_) in zip(batches, taken):
                results = masked_experts(LAYERS[0], first, widened(rows, counts), counts)
                _, ids, weights = batch.given("numpy")
                out = np.empty(batch.hidden.shape, ml_dtypes.bfloat16)
                result, *_ = buffer.low_latency_combine(results, ids, weights, handle, out=out)
                self.assertIs(result, out)
                check(self, LAYERS[0], batch, out)
            buffer.low_latency_dispatch(hidden, ids, MOST, EXPERTS, use_fp8=False)
            buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)  # without a combine
            check(self, LAYERS[1], batches[1], decode(buffer, LAYERS[1], batches[1], "numpy"))

        self.on_ranks(2, main)

    def test_helpers(self):
        group = heddle.thread_group(1)[0]
        hint = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, 4, EXPERTS)
        self.assertGreater(hint, EXPERTS // 4 * 4 * MOST * HIDDEN * 2)
        Buffer.set_num_sms(24)
        self.assertEqual(Buffer.get_combine_config(8).num_sms, 24)
        Buffer.set_num_sms(20)
        self.assertEqual(Config(12).get_nvl_buffer_size_hint(256, 2), 0)
        event = Buffer.capture()
        event.register_hook_after_wait(lambda: 5)
        self.assertEqual([event.wait(), event.wait()], [5, None])
        for call, words in (
            (lambda: Buffer(group, enable_shrink=True), "enable_shrink: not supported"),
            (lambda: Buffer(None), "expected group"),
            (lambda: Buffer.set_num_sms(3), "even number, got 3"),
            (lambda: Buffer(group).low_latency_update_mask_buffer(1), "low_latency_update_mask_buffer: not supported"),
            (lambda: Buffer(group).get_comm_stream(), "get_comm_stream: not supported"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                call()

    def test_wrong_arguments(self):
        buffer = Buffer(heddle.thread_group(1)[0])
        hidden, ids, weights = Batch(0, 4).given("numpy")
        experts = buffer.get_dispatch_layout(ids, EXPERTS)[2]
        sent = {"x": hidden, "topk_idx": ids, "topk_weights": weights, "num_tokens_per_expert": experts}
        low = {"x": hidden, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}
        table = [
            (buffer.dispatch, sent, {"x": hidden.astype(np.float32)}, r"x: expected bfloat16 \[tokens, hidden\], got float32 \[4, 128\]"),
            (buffer.dispatch, sent, {"topk_idx": ids[:3]}, r"topk_idx: expected int64 or int32 \[4, topk\], got int64 \[3, 3\]"),
            (buffer.dispatch, sent, {"topk_idx": ids + 4}, "topk_idx: expected -1 to 7, got 3 to 11"),
            (buffer.dispatch, sent, {"topk_weights": weights.astype(np.float64)}, r"topk_weights: expected float32 \[4, 3\], got float64"),
            (buffer.dispatch, sent, {"topk_weights": None}, "expected topk_idx, topk_weights and the layout"),
            (buffer.dispatch, sent, {"num_tokens_per_rank": np.array([9], np.int32)}, r"num_tokens_per_rank: topk_idx says \[4\], got \[9\]"),
            (buffer.dispatch, sent, {"x": (hidden, hidden)}, r"x\[0\]: expected float8_e4m3fn"),
            (buffer.dispatch, sent, {"expert_alignment": 0}, "expert_alignment: expected at least 1, got 0"),
            (buffer.low_latency_dispatch, low, {"num_max_dispatch_tokens_per_rank": 3}, "at most num_max_dispatch_tokens_per_rank = 3 tokens, got 4"),
            (buffer.low_latency_dispatch, low, {"use_ue8m0": True}, "use_ue8m0: expected use_fp8=True and round_scale=True"),
            (buffer.low_latency_dispatch, low, {"use_ue8m0": True, "round_scale": True}, "multiple of 512 columns for these scales, got 128"),
        ]  # fmt: skip
        for call, right, wrong, words in table:
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                call(**{**right, **wrong})
            buffer.reset()
        with self.assertRaisesRegex(TypeError, "x: expected a NumPy array or a torch tensor, got list"):
            buffer.dispatch(**{**sent, "x": hidden.tolist()})
        self.wrong_combines(buffer, sent, low)

    def wrong_combines(self, buffer, sent, low):
        recv_x, *_, handle, _ = buffer.dispatch(**sent)
        with self.assertRaisesRegex(heddle.InputError, r"x: expected bfloat16 \[4, 128\], got bfloat16 \[2, 128\]"):
            buffer.combine(recv_x[:2], handle)
        with self.assertRaisesRegex(heddle.InputError, "under way: combine comes before"):
            buffer.dispatch(sent["x"], handle=handle)
        buffer.combine(recv_x, handle)
        with self.assertRaisesRegex(heddle.InputError, "its round trip is over"):
            buffer.combine(recv_x, handle)
        rows, _, handle, *_ = buffer.low_latency_dispatch(**low, use_fp8=False)
        with self.assertRaisesRegex(heddle.InputError, "topk_idx: expected the choices that were dispatched"):
            buffer.low_latency_combine(rows, sent["topk_idx"][::-1], sent["topk_weights"], handle)
        with self.assertRaisesRegex(heddle.InputError, r"x: expected bfloat16 \[8, 16, 128\], got bfloat16 \[7, 16, 128\]"):
            buffer.low_latency_combine(rows[1:], sent["topk_idx"], sent["topk_weights"], handle)
        with self.assertRaisesRegex(heddle.InputError, "use_logfmt: not supported"):
            buffer.low_latency_combine(rows, sent["topk_idx"], sent["topk_weights"], handle, use_logfmt=True)
        buffer.low_latency_combine(rows, sent["topk_idx"], sent["topk_weights"], handle)

    @unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
    def test_memory_of_a_gpu(self):
        buffer = Buffer(heddle.thread_group(1)[0])
        elsewhere = adapted.torch.empty((4, HIDDEN), dtype=adapted.torch.bfloat16, device="meta")
        with self.assertRaisesRegex(heddle.InputError, "x: expected host memory, got meta: .*docs/adapters.md says"):
            buffer.low_latency_dispatch(elsewhere, Batch(0, 4).ids, MOST, EXPERTS)


# Two processes as torchrun starts them; every expert gives back what it gets.
LAUNCHED = """
import torch
from heddle.adapters.deepep import Buffer, ElasticBuffer
torch.distributed.init_process_group("gloo")
group = torch.distributed.group.WORLD
x = torch.full((3, 64), float(group.rank() + 1), dtype=torch.bfloat16)
ids, weights = torch.tensor([[0, 3]] * 3), torch.full((3, 2), 0.5)
buffer = Buffer(group)
rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False)
assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle)[0], x)
elastic = ElasticBuffer(group, num_max_tokens_per_rank=4)
rows, _, _, handle, _ = elastic.dispatch(x, ids, weights, num_experts=4, do_expand=True)
assert torch.equal(elastic.combine(rows, handle)[0], 2 * x)
torch.distributed.destroy_process_group()
"""


class Groups(unittest.TestCase):
    @unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
    def test_a_process_group_of_torch(self):
        support.launch_text(LAUNCHED, 2)

    def test_a_communicator(self):
        """As mpi4py's, of two threads."""
        told, meeting, seen = [], threading.Barrier(2, timeout=30), {}

        class Communicator:
            def __init__(self, rank):
                self.rank = rank

            def Get_rank(self):
                return self.rank

            def Get_size(self):
                return 2

            def bcast(self, name):
                if self.rank == 0:
                    told.append(name)
                meeting.wait()
                return told[0]

        def main(rank):
            seen[rank] = Buffer(None, comm=Communicator(rank)).rank

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(seen, {0: 0, 1: 1})


if __name__ == "__main__":
    unittest.main()
