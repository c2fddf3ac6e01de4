"""Layers and exchanges on a GPU with CuPy's arrays, lent by DLPack. Skipped without the CUDA part, a GPU, or a CuPy that knows
bfloat16 (14 and newer, with ml_dtypes)."""

import unittest

import support
from test_exchange import EXPERTS, HIDDEN, TOPK, batch, expected

import heddle
import ml_dtypes
import numpy as np
import oracle
from heddle import device

try:
    import cupy
except ImportError:
    cupy = None

STEP = heddle.Step(16)


def why_not():
    if not device.is_built():
        return "this module was built without the CUDA part"
    if cupy is None:
        return "CuPy is not here"
    if not device.gpus_present():
        return "no GPU is here"
    try:
        cupy.asarray(np.zeros(2, ml_dtypes.bfloat16)).__dlpack__()
    except Exception as error:  # of several kinds, by version
        return f"CuPy {cupy.__version__} does not lend bfloat16: {error}"
    return ""


@unittest.skipIf(why_not(), why_not())
class Arrays(unittest.TestCase):
    def given(self):
        return [cupy.asarray(array) for array in batch(0)]

    def test_a_layer(self):
        """On the current stream, which is one of its own; out given, or made on that stream."""
        shape = heddle.LayerShape(hidden=HIDDEN, intermediate=64, experts=EXPERTS, topk=TOPK)
        source = heddle.Source.synthetic(shape, seed=support.SEED)
        options = heddle.LayerOptions(cap=16)
        weights = source.load(0, 1)
        layer = device.DeviceLayer(device.DeviceWorkspace([(weights, options)], deadline=5), weights, options)
        wanted = heddle.MoeLayer.create(heddle.thread_group(1)[0], source, options).forward(*batch(0)).astype(np.float64)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            hidden, ids, chosen = self.given()
            self.assertEqual(device.current_stream(hidden), stream.ptr)
            out = cupy.empty_like(hidden)
            self.assertIs(layer.forward(hidden, ids, chosen, out, step=STEP), out)
            new = layer.forward(hidden, ids, chosen, step=STEP)
            self.assertIsInstance(new, cupy.ndarray)
            stream.synchronize()
            layer.throw_if_failed()
            for one in (out, new):
                self.assertLess(oracle.relative_error(one.get(), wanted), 4e-3)

    def test_an_exchange(self):
        exchange = device.DeviceExchange(heddle.ExchangeOptions(hidden=HIDDEN, experts=EXPERTS, topk=TOPK, cap=16), deadline=5)
        arrived = exchange.dispatch(*self.given(), step=STEP)
        self.assertIsInstance(arrived.rows, cupy.ndarray)
        rows = arrived.bf16().astype(cupy.float32).reshape(EXPERTS, -1, HIDDEN)
        factors = cupy.arange(1, EXPERTS + 1, dtype=cupy.float32)[:, None] * arrived.row_weights.reshape(EXPERTS, -1)
        real = cupy.arange(rows.shape[1]) < arrived.counts[:, None]
        results = cupy.where(real[:, :, None], factors[:, :, None] * rows, 0).astype(ml_dtypes.bfloat16)
        out = exchange.combine(results.reshape(-1, HIDDEN))
        cupy.cuda.get_current_stream().synchronize()
        exchange.throw_if_failed()
        self.assertLess(oracle.relative_error(out.get(), expected(*batch(0))), 6e-3)

    def test_a_wrong_array(self):
        exchange = device.DeviceExchange(heddle.ExchangeOptions(hidden=HIDDEN, experts=EXPERTS, topk=TOPK, cap=16), deadline=5)
        hidden, ids, weights = self.given()
        with self.assertRaisesRegex(heddle.InputError, "ids: expected int32 .*got int64"):
            exchange.dispatch(hidden, ids.astype(cupy.int64), weights, step=STEP)


if __name__ == "__main__":
    unittest.main()
