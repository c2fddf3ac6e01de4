"""A rank whose arguments are refused: the others hear of it at the deadline, all reset, and the next calls work."""

import unittest

import adapted
import test_deepep
import test_elastic_buffer
from adapted import EXPERTS, HIDDEN, Batch, Layer, check, to

import heddle
import ml_dtypes
import numpy as np
from heddle.adapters.deepep import Buffer, ElasticBuffer

LAYER, MOST = Layer(0), 16


def read_only(array):
    array.flags.writeable = False
    return array


class Faults(unittest.TestCase):
    def buffer_and_call(self, group, way, batch):
        if way == "elastic":
            buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST)
            return buffer, lambda: test_elastic_buffer.elastic(self, buffer, LAYER, batch, "numpy", True, None)
        buffer = Buffer(group)
        if way == "normal":
            return buffer, lambda: test_deepep.prefill(buffer, LAYER, batch, "numpy")[0]
        return buffer, lambda: test_deepep.decode(buffer, LAYER, batch, "numpy")

    def wrong(self, buffer, way, batch):
        x, ids, weights = batch.hidden.astype(np.float32), batch.ids, batch.weights
        with self.assertRaisesRegex(heddle.InputError, "x: expected bfloat16"):
            if way == "elastic":
                buffer.dispatch(x, ids, weights, num_experts=EXPERTS)
            elif way == "normal":
                buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=np.zeros(EXPERTS, np.int32))
            else:
                buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)

    def test_one_rank_is_refused(self):
        for way in ("normal", "low_latency", "elastic"):
            for first_call in (True, False):

                def main(group, way=way, first_call=first_call):
                    batch = Batch(group.rank, 4)
                    buffer, call = self.buffer_and_call(group, way, batch)
                    if not first_call:
                        call()
                    if group.rank == 0:
                        self.wrong(buffer, way, batch)
                    else:
                        with self.assertRaises(heddle.FaultError):
                            call()
                    buffer.reset()
                    for _ in range(3):
                        check(self, LAYER, batch, call())

                with self.subTest(way=way, first_call=first_call):
                    heddle.run_threads(2, main, deadline=1.5)

    def test_a_rank_that_goes(self):
        """The ranks that go on leave it out, and nobody chooses its experts."""

        def main(group):
            batch = Batch(group.rank, 4)
            batch.ids[batch.ids // 2 == 3] = -1  # rank 3's experts
            buffer, call = self.buffer_and_call(group, "low_latency", batch)
            check(self, LAYER, batch, call())
            if group.rank == 3:
                return
            with self.assertRaises(heddle.FaultError):
                call()
            buffer.reset([True, True, True, False])
            check(self, LAYER, batch, call())

        heddle.run_threads(4, main, deadline=1.5)

    def test_what_is_refused_before_anything_travels(self):
        """A rank may call again at once, while the others wait for it: nothing is reset."""
        bad_stats = (np.zeros(EXPERTS, np.int32), np.zeros(EXPERTS // 2, np.int64), read_only(np.zeros(EXPERTS // 2, np.int32)))
        words = "cumulative_local_expert_recv_stats: expected (int32|memory that can be written to)"

        def main(group):
            batch = Batch(group.rank, 4)
            buffer, elastic = Buffer(group), ElasticBuffer(group, num_max_tokens_per_rank=MOST)
            given = batch.hidden, batch.ids, batch.weights
            for bad in bad_stats if group.rank == 0 else ():
                with self.assertRaisesRegex(heddle.InputError, words):
                    buffer.low_latency_dispatch(*given[:2], MOST, EXPERTS, bad, use_fp8=False)
                with self.assertRaisesRegex(heddle.InputError, words):
                    elastic.dispatch(*given, bad, EXPERTS)
            for bad in (batch.hidden[:, 1:], (batch.hidden,) * 3) if group.rank == 0 else ():
                self.refused_bias(buffer, elastic, given, bad)
            if group.rank == 1:
                for _ in range(2):
                    self.refused_bias(buffer, elastic, given, None)
            check(self, LAYER, batch, test_deepep.prefill(buffer, LAYER, batch, "numpy")[0])

        heddle.run_threads(2, main, deadline=20)

    def refused_bias(self, buffer, elastic, given, bias):
        """Combines with what is refused, if it is, then without."""
        hidden, ids, weights = given
        experts = buffer.get_dispatch_layout(ids, EXPERTS)[2]
        rows, *_, handle, _ = buffer.dispatch(hidden, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=experts)
        results, *_, made, _ = elastic.dispatch(*given, None, EXPERTS)
        for one, x, of in ((buffer, rows, handle), (elastic, results, made)):
            if bias is not None:
                with self.assertRaisesRegex(heddle.InputError, "bias: expected"):
                    one.combine(x, of, bias=bias)
            one.combine(x, of)

    def test_no_tokens_in_any_form(self):
        """fp8 rows of a rank without tokens, every call."""

        kinds = list(adapted.kinds(self))

        def main(group):
            buffer, elastic = Buffer(group), ElasticBuffer(group, num_max_tokens_per_rank=MOST)
            tokens = 0 if group.rank == 1 else 3
            for kind in kinds:
                x = to(kind, np.ones((tokens, HIDDEN), ml_dtypes.float8_e4m3fn)), to(kind, np.ones((tokens, 1), np.float32))
                ids = to(kind, np.tile(np.array([[0, 7]], np.int64), (tokens, 1)))
                weights = to(kind, np.ones((tokens, 2), np.float32))
                experts = buffer.get_dispatch_layout(ids, EXPERTS)[2]
                taken = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=experts)
                outputs = [buffer.combine(self.zeros(kind, taken[0][0]), taken[4])[0]]
                for expand in (False, True):
                    taken = elastic.dispatch(x, ids, weights, num_experts=EXPERTS, do_expand=expand)
                    outputs.append(elastic.combine(self.zeros(kind, taken[0][0]), taken[3])[0])
                self.assertEqual({tuple(out.shape) for out in outputs}, {(tokens, HIDDEN)})

        heddle.run_threads(2, main, deadline=20)

    @staticmethod
    def zeros(kind, rows):
        return to(kind, np.zeros(tuple(rows.shape), ml_dtypes.bfloat16))


if __name__ == "__main__":
    unittest.main()
