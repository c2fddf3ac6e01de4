"""What a layer on GPUs does in Python before a call reaches the module: streams, outputs, refusals. Needs no GPU: the module's layer
and CuPy are stood in for."""

import sys
import types
import unittest
from contextlib import contextmanager
from unittest import mock

import heddle
import numpy as np
from heddle import device

CURRENT = 3  # the stream that is CuPy's current one


class Cupy(types.ModuleType):
    """As much of CuPy as is asked for; remembers on which stream each array was made."""

    def __init__(self):
        super().__init__("cupy")
        self.stream = CURRENT
        self.cuda = types.SimpleNamespace(
            get_current_stream=lambda: types.SimpleNamespace(ptr=self.stream), ExternalStream=self.external_stream
        )

    @contextmanager
    def external_stream(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def empty_like(self, array):
        return ndarray(self)


class ndarray:  # noqa: N801, as CuPy calls it
    __module__ = "cupy"

    def __init__(self, cupy):
        self.cupy, self.made_on = cupy, cupy.stream

    def __array_namespace__(self):
        return self.cupy

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream):
        assert stream == -1
        return self


class Core:
    """The module's layer: remembers what comes."""

    def __init__(self, error=None):
        self.calls, self.refused, self.error = [], [], error

    def forward(self, inputs, outputs, step, stream):
        self.calls.append((inputs, outputs, step, stream))
        if self.error is not None:
            raise self.error

    def begin(self, inputs, step, stream):
        self.calls.append((inputs, step, stream))

    def end(self, outputs, stream):
        self.calls.append((outputs, stream))

    def refuse(self, stream):
        self.refused.append(stream)


class Calls(unittest.TestCase):
    def setUp(self):
        self.cupy = Cupy()
        patched = mock.patch.dict(sys.modules, cupy=self.cupy)
        patched.start()
        self.addCleanup(patched.stop)
        self.arrays = [ndarray(self.cupy) for _ in range(3)]
        self.step = heddle.Step(4)

    def layer(self, error=None):
        layer = object.__new__(device.DeviceLayer)
        layer._core, layer._begun = Core(error), None
        return layer

    def test_outputs_are_of_the_stream_that_writes_them(self):
        layer = self.layer()
        for given, expected in ((None, CURRENT), (7, 7), (0, 0)):
            with self.subTest(stream=given):
                out = layer.forward(*self.arrays, step=self.step, stream=given)
                self.assertEqual((out.made_on, layer._core.calls[-1][3]), (expected, expected))
        outs = layer.forward(*([array, array] for array in self.arrays), step=self.step, stream=7)
        self.assertEqual([out.made_on for out in outs], [7, 7])
        self.assertEqual(self.cupy.stream, CURRENT)
        self.assertEqual(layer._core.refused, [])

    def test_outputs_of_experts_likewise(self):
        for given, expected in ((None, CURRENT), (7, 7)):
            _, out, stream = device.DeviceExperts._call(self.arrays[0], None, given)
            self.assertEqual((out.made_on, stream), (expected, expected))

    def test_outputs_that_are_given_stay(self):
        layer, out = self.layer(), ndarray(self.cupy)
        self.assertIs(layer.forward(*self.arrays, out, step=self.step, stream=7), out)
        self.assertEqual((layer._core.calls[0][1], out.made_on), ([out], CURRENT))

    def test_what_is_refused_before_the_call_is_told(self):
        hidden, ids, weights = self.arrays
        numpys = [np.zeros((4, 2), np.float32)] * 3
        for given, words, told in (
            (([hidden, hidden], [ids], [weights]), "different numbers of ranks", 7),
            (numpys, "ndarray: give out=", 7),
            ((*numpys, numpys[0]), "no current stream is known", None),
        ):
            layer = self.layer()
            with self.subTest(words=words):
                with self.assertRaisesRegex(heddle.InputError, words):
                    layer.forward(*given, step=self.step, stream=told)
                self.assertEqual((layer._core.refused, layer._core.calls), ([told or 0], []))
        layer = self.layer()
        with self.assertRaisesRegex(heddle.InputError, "no current stream is known"):
            layer.begin(*numpys, step=self.step)
        with self.assertRaisesRegex(heddle.InputError, "no current stream is known"):
            layer.end(numpys[0])
        self.assertEqual(layer._core.refused, [0, 0])

    def test_what_is_refused_in_the_call_is_not_told_twice(self):
        for error in (heddle.InputError("bad"), heddle.FaultError("gone")):
            layer = self.layer(error)
            with self.assertRaises(type(error)):
                layer.forward(*self.arrays, step=self.step)
            self.assertEqual(layer._core.refused, [])

    def test_what_is_in_host_memory_reaches_the_call(self):
        """There it is refused for where it is."""
        layer, arrays = self.layer(), [np.zeros((4, 2), np.float32)] * 4
        layer.forward(*arrays, step=self.step, stream=7)
        self.assertIs(layer._core.calls[0][0][0][0], arrays[0])

    def test_halves(self):
        layer = self.layer()
        layer.begin(*self.arrays, step=self.step)
        self.assertIsNotNone(layer._begun)  # inputs stay alive
        layer.end(out := ndarray(self.cupy), stream=9)
        self.assertEqual(layer._core.calls[1], ([out], 9))
        self.assertIsNone(layer._begun)


if __name__ == "__main__":
    unittest.main()
