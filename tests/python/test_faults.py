"""Ranks that do not come, refuse their input or die: exceptions that name them, and a reset after which the others go on."""

import subprocess
import sys
import threading
import unittest

import support

import heddle
import ml_dtypes
import numpy as np

SHAPE = heddle.LayerShape(hidden=128, intermediate=64, experts=4, topk=2)
SHORT = 0.3  # seconds of a deadline that is meant to pass


def tokens(count=2):
    ids = np.tile(np.array([0, 3], np.int32), (count, 1))
    return np.ones((count, 128), ml_dtypes.bfloat16), ids, np.full((count, 2), 0.5, np.float32)


class Faults(unittest.TestCase):
    def layer(self, group, way):
        return heddle.MoeLayer.create(group, heddle.Source.synthetic(SHAPE), heddle.LayerOptions(way=way, cap=4))

    def test_a_rank_that_does_not_come(self):
        for way in support.WAYS:
            with self.subTest(way=way):
                met = threading.Barrier(2, timeout=30)

                def main(group):
                    layer = self.layer(group, way)
                    group.deadline = SHORT
                    if group.rank == 1:
                        met.wait()  # until rank 0 has given up
                        return None
                    try:
                        layer.forward(*tokens(), step=heddle.Step(2))
                    except heddle.FaultError as fault:
                        return fault
                    finally:
                        met.wait()
                    return None

                fault, _ = heddle.run_threads(2, main)
                self.assertIsInstance(fault, heddle.FaultError)
                self.assertEqual((fault.rank, fault.peer), (0, 1))
                self.assertIn(way, fault.phase)
                self.assertNotEqual(fault.expected, fault.seen)
                self.assertIn(fault.word, str(fault))

    def test_a_refused_input_is_told_and_reset(self):
        refused = threading.Barrier(2, timeout=30)

        def main(group):
            layer = self.layer(group, "low_latency")
            hidden, ids, weights = tokens()
            if group.rank == 1:
                with self.assertRaisesRegex(heddle.InputError, "ids: expected int32"):
                    layer.forward(hidden, ids.astype(np.int64), weights, step=heddle.Step(2))
            else:
                with self.assertRaises(heddle.FaultError) as context:
                    layer.forward(hidden, ids, weights, step=heddle.Step(2))
                self.assertEqual((context.exception.rank, context.exception.phase), (1, "input check"))
            refused.wait()
            layer.workspace.reset()
            return layer.forward(hidden, ids, weights, step=heddle.Step(2))

        first, second = heddle.run_threads(2, main, deadline=20)
        np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))

    def test_going_on_without_a_dead_rank(self):
        gone = threading.Barrier(3, timeout=30)

        def main(group):
            layer = self.layer(group, "gather")
            group.deadline = SHORT
            gone.wait()
            if group.rank == 2:
                return None
            with self.assertRaises(heddle.FaultError):
                layer.forward(*tokens(), step=heddle.Step(2))
            group.deadline = 20
            layer.workspace.reset([True, True, False])
            self.assertEqual(group.live, [True, True, False])
            return layer.forward(*tokens(), step=heddle.Step(2))

        first, second, _ = heddle.run_threads(3, main)
        np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))

    def test_barriers(self):
        group = heddle.thread_group(2, deadline=SHORT)
        with self.assertRaisesRegex(heddle.FaultError, "the test's barrier") as context:
            group[0].barrier("the test's barrier")
        self.assertEqual((context.exception.rank, context.exception.peer), (0, 1))

    def test_a_process_that_dies(self):
        name = f"test.{id(self)}"
        program = f"import heddle, os; heddle.join({name!r}, 1, 2, deadline=20); os._exit(0)"
        process = subprocess.Popen([sys.executable, "-c", program])
        group = heddle.join(name, 0, 2, deadline=20)
        process.wait(timeout=30)
        group.deadline = SHORT
        with self.assertRaises(heddle.FaultError) as context:
            self.layer(group, "gather")
        self.assertEqual((context.exception.rank, context.exception.peer), (0, 1))

    def test_run_threads_raises_what_explains_the_others(self):
        def main(group):
            layer = self.layer(group, "gather")
            if group.rank == 1:
                raise ZeroDivisionError("on rank 1")
            group.deadline = SHORT
            layer.forward(*tokens(), step=heddle.Step(2))

        with self.assertRaisesRegex(ZeroDivisionError, "on rank 1"):
            heddle.run_threads(2, main)


if __name__ == "__main__":
    unittest.main()
