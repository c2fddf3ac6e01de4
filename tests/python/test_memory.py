"""Nothing is copied, nothing is kept longer than needed nor let go too early, and other threads run meanwhile."""

import gc
import sys
import threading
import time
import unittest
import weakref

from support import address, bits

import heddle
import ml_dtypes
import numpy as np
from heddle import _core

SHAPE = heddle.LayerShape(hidden=128, intermediate=64, experts=4, topk=2)


def tokens(count=3):
    ids = np.tile(np.array([0, 3], np.int32), (count, 1))
    return np.ones((count, 128), ml_dtypes.bfloat16), ids, np.full((count, 2), 0.5, np.float32)


def layer_alone(way="low_latency", cap=4):
    group = heddle.thread_group(1)[0]
    return heddle.MoeLayer.create(group, heddle.Source.synthetic(SHAPE), heddle.LayerOptions(way=way, cap=cap))


class Memory(unittest.TestCase):
    def test_arrays_are_read_where_they_are(self):
        for array in tokens():
            self.assertEqual(_core.address_of(array), address(array))
            self.assertEqual(_core.address_of(array[1:]), address(array) + array.strides[0])

    def test_outputs_are_written_where_they_are_wanted(self):
        layer, out = layer_alone(), np.zeros((5, 128), ml_dtypes.bfloat16)
        result = layer.forward(*tokens(), out=out[1:4])
        self.assertTrue(np.shares_memory(result, out))
        np.testing.assert_array_equal(bits(out[1:4]), bits(layer.forward(*tokens())))
        self.assertEqual(np.abs(out[[0, 4]].astype(np.float32)).max(), 0)
        self.assertGreater(np.abs(out[1:4].astype(np.float32)).min(), 0)

    def test_no_references_stay(self):
        layer, arrays, out = layer_alone(), tokens(), np.empty((3, 128), ml_dtypes.bfloat16)
        watched = [*arrays, out]
        before = [sys.getrefcount(array) for array in watched]
        for _ in range(50):
            layer.forward(*arrays, out=out)
        with self.assertRaises(heddle.InputError):
            layer.forward(out, *arrays[1:], out=arrays[1])
        self.assertEqual([sys.getrefcount(array) for array in watched], before)

    def test_memory_does_not_grow(self):
        layer, arrays, out = layer_alone(), tokens(), np.empty((3, 128), ml_dtypes.bfloat16)
        for _ in range(200):
            layer.forward(*arrays, out=out)
        before = sys.getallocatedblocks()
        for _ in range(500):
            layer.forward(*arrays, out=out)
        self.assertLess(sys.getallocatedblocks() - before, 100)

    def test_a_layer_keeps_what_it_stands_on(self):
        layer = layer_alone()  # group, source and weights have no other holder
        gc.collect()
        self.assertGreater(np.abs(layer.forward(*tokens()).astype(np.float32)).max(), 0)
        core = layer._core
        del layer
        gc.collect()
        out = np.zeros((3, 128), ml_dtypes.bfloat16)
        core.forward(*tokens(), out, heddle.Step(3), "decode")
        self.assertGreater(np.abs(out.astype(np.float32)).max(), 0)

    def test_arrays_of_weights_live_as_long_as_their_source(self):
        arrays = [np.zeros(shape, ml_dtypes.bfloat16) for shape in ((1, 64, 128), (1, 64, 128), (1, 128, 64))]
        alive = [weakref.ref(array) for array in arrays]
        source = heddle.Source.of_arrays(*arrays, topk=1)
        weights = source.load(0, 1)
        del arrays, source
        gc.collect()
        self.assertTrue(all(reference() is not None for reference in alive))
        del weights
        gc.collect()
        self.assertEqual([reference() for reference in alive], [None] * 3)

    def test_other_threads_run_during_a_call(self):
        """A rank that waits for another one does not hold the interpreter."""
        counted, met = [0], threading.Event()

        def main(group):
            layer = heddle.MoeLayer.create(group, heddle.Source.synthetic(SHAPE), heddle.LayerOptions(cap=4))
            if group.rank == 1:
                for _ in range(20):
                    time.sleep(0.005)
                    counted[0] += 1
                met.set()
            out = layer.forward(*tokens(), step=heddle.Step(3))
            return met.is_set(), out

        (first, _), (second, _) = heddle.run_threads(2, main)
        self.assertTrue(first and second)
        self.assertEqual(counted[0], 20)

    def test_a_second_thread_is_refused(self):
        group = heddle.thread_group(2, deadline=20)
        refused, messages = threading.Event(), []

        def come():
            try:
                group[0].barrier()
            except heddle.InputError as error:
                messages.append(str(error))
                refused.set()

        threads = [threading.Thread(target=come) for _ in range(2)]
        for thread in threads:
            thread.start()
        self.assertTrue(refused.wait(20))  # one of them is inside, and waits for rank 1
        group[1].barrier()
        for thread in threads:
            thread.join()
        self.assertEqual(len(messages), 1)
        self.assertIn("another thread is inside a call of this rank", messages[0])


if __name__ == "__main__":
    unittest.main()
