"""Wrong arguments: an exception that says what was expected and what came."""

import unittest

import support
from support import bits

import heddle
import ml_dtypes
import numpy as np

SHAPE = heddle.LayerShape(hidden=128, intermediate=64, experts=4, topk=2)
OPTIONS = heddle.LayerOptions(cap=4)


def batch(tokens=3):
    hidden = np.ones((tokens, 128), ml_dtypes.bfloat16)
    ids = np.tile(np.array([0, 1], np.int32), (tokens, 1))
    return {"hidden": hidden, "ids": ids, "weights": np.full((tokens, 2), 0.5, np.float32)}


def every_second(array):
    return np.repeat(array, 2, axis=1)[:, ::2]


class OnGpu:
    """An array that claims to lie on a GPU, as far as it is looked at before anything is read."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        import ctypes

        return _capsule_on(2, self.array, ctypes)


def _capsule_on(device_type, array, ctypes):
    """A DLPack capsule of a float32 matrix with another device written into it."""

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]

    capsule = array.__dlpack__()
    of = ctypes.pythonapi.PyCapsule_GetPointer
    of.restype, of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    Tensor.from_address(of(capsule, b"dltensor")).device_type = device_type
    return capsule


# What is changed, the error, and the words that its message must have.
CALLS = [
    ("hidden", lambda a: a.astype(np.float32), heddle.InputError, ["hidden", "bfloat16 [tokens, 128]", "got float32 [3, 128]"]),
    ("hidden", lambda a: bits(a), heddle.InputError, ["hidden", "bfloat16", "got uint16"]),
    ("hidden", lambda a: a[:, :64].copy(), heddle.InputError, ["hidden", "[tokens, 128]", "got shape [3, 64]"]),
    ("hidden", lambda a: a[0], heddle.InputError, ["hidden", "[tokens, 128]", "got shape [128]"]),
    ("hidden", every_second, heddle.InputError, ["hidden", "C order", "strides [256, 2]", "contiguous"]),
    ("hidden", lambda a: np.asfortranarray(a), heddle.InputError, ["hidden", "strides [1, 3]"]),
    ("hidden", lambda a: a.tolist(), TypeError, ["hidden", "__dlpack__", "list"]),
    ("ids", lambda a: a.astype(np.int64), heddle.InputError, ["ids", "int32 [3, 2]", "got int64"]),
    ("ids", lambda a: a[:2], heddle.InputError, ["ids", "[3, 2]", "got shape [2, 2]"]),
    ("ids", lambda a: a + 3, heddle.InputError, ["4"]),  # there are experts 0 to 3
    ("ids", lambda a: a * 0, heddle.InputError, ["0"]),  # the same expert twice
    ("ids", lambda a: None, heddle.InputError, ["ids and weights", "both", "router"]),
    ("ids", lambda a: a.tolist(), TypeError, ["ids", "__dlpack__", "list"]),
    ("weights", lambda a: a.astype(np.float64), heddle.InputError, ["weights", "float32 [3, 2]", "got float64"]),
    ("weights", lambda a: a[:, :1].copy(), heddle.InputError, ["weights", "[3, 2]", "got shape [3, 1]"]),
    ("weights", lambda a: OnGpu(a), heddle.InputError, ["weights", "host memory", "CUDA device 0"]),
    ("out", lambda a: np.empty((3, 64), a.dtype), heddle.InputError, ["out", "[3, 128]", "got shape [3, 64]"]),
    ("out", lambda a: np.empty((3, 128), np.float16), heddle.InputError, ["out", "bfloat16", "got float16"]),
    ("step", lambda a: heddle.Step(2), heddle.InputError, ["2", "3"]),
    ("step", lambda a: heddle.Step(3, "training"), heddle.InputError, ["phase", "training", "decode, prefill"]),
    ("step", lambda a: heddle.Step("three"), TypeError, ["max_tokens", "three"]),
    ("phase", lambda a: "training", heddle.InputError, ["phase", "training"]),
]

# Fields of LayerOptions, and the words of the message.
OPTION_TABLE = [
    ({"way": "deepep"}, ["way", "deepep", "low_latency"]),
    ({"cap": 0}, ["cap", "0"]),
    ({"wire": "fp16"}, ["wire", "fp16", "nvfp4"]),
    ({"runner": "masked", "way": "gather"}, ["gather", "masked"]),
    ({"quantisation": heddle.Quantisation(64), "wire": "fp8"}, ["64"]),
    ({"way": "mega", "block_rows": 100}, ["100"]),
    ({"gather": "tensor_parallel", "way": "gather"}, ["tensor_parallel"]),
]


class Arguments(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.source = heddle.Source.synthetic(SHAPE)

    def layer(self, **options):
        group = heddle.thread_group(1, deadline=5)[0]
        return heddle.MoeLayer.create(group, self.source, heddle.LayerOptions(**({"cap": 4} | options)))

    def assert_says(self, context, words):
        for word in words:
            self.assertIn(word, str(context.exception))

    def test_calls(self):
        for name, change, error, words in CALLS:
            arguments = batch()
            arguments[name] = change(arguments.get(name, arguments["hidden"]))
            with self.subTest(name=name, words=words):
                layer = self.layer()
                with self.assertRaises(error) as context:
                    layer.forward(**arguments)
                self.assert_says(context, words)
                layer.workspace.reset()
                layer.forward(**batch())  # the layer still works

    def test_more_tokens_than_the_cap(self):
        with self.assertRaises(heddle.InputError) as context:
            self.layer().forward(**batch(5))
        self.assert_says(context, ["5", "4", "cap"])

    def test_read_only(self):
        arguments = batch()
        for array in arguments.values():
            array.flags.writeable = False
        layer = self.layer()
        layer.forward(**arguments)  # to be read
        with self.assertRaises(heddle.InputError) as context:
            layer.forward(**arguments, out=arguments["hidden"])
        self.assert_says(context, ["out", "writable", "read-only"])

    def test_options(self):
        for changed, words in OPTION_TABLE:
            with self.subTest(changed=changed), self.assertRaises(heddle.InputError) as context:
                self.layer(**changed)
            self.assert_says(context, words)
        with self.assertRaisesRegex(TypeError, "LayerOptions.workers cannot be 'two'"):
            self.layer(workers="two")

    def test_layers_and_ranks(self):
        group = heddle.thread_group(1)[0]
        of_two = self.source.load(0, 2)
        with self.assertRaisesRegex(heddle.InputError, "2 ranks.*1"):
            heddle.Workspace(group, [(of_two, OPTIONS)])
        with self.assertRaisesRegex(heddle.InputError, "at least one layer"):
            heddle.workspace_bytes([])
        with self.assertRaisesRegex(heddle.InputError, "rank 2 .* 2 ranks"):
            self.source.load(2, 2)
        with self.assertRaisesRegex(heddle.InputError, "nowhere.safetensors"):
            heddle.Source.open("nowhere.safetensors")
        with self.assertRaisesRegex(heddle.InputError, "no router|config.json"):
            heddle.Source.of_arrays(*weights_of_one(), topk=1).route(batch()["hidden"])

    def test_deadlines(self):
        for seconds in (0, -1, float("nan"), 1e9):
            with self.subTest(seconds=seconds), self.assertRaisesRegex(heddle.InputError, "deadline"):
                heddle.thread_group(1, deadline=seconds)

    def test_ranks_that_disagree(self):
        def main(group):
            with self.assertRaises(heddle.InputError) as context:
                heddle.MoeLayer.create(group, self.source, heddle.LayerOptions(cap=4 + group.rank))
            return str(context.exception)

        for message in heddle.run_threads(2, main, deadline=10):
            self.assertRegex(message, "rank 1 was created with cap=5, rank 0 with cap=4")


def weights_of_one():
    return [np.zeros(shape, ml_dtypes.bfloat16) for shape in ((1, 64, 128), (1, 64, 128), (1, 128, 64))]


if __name__ == "__main__":
    unittest.main()
