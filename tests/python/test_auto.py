"""A layer that chooses its way, and calls of more tokens than the cap."""

import tempfile
import unittest
from pathlib import Path

from support import bits, call, save

import heddle
import numpy as np


class Auto(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.saved = save(Path(cls.folder.name), "bf16")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def outputs(self, ranks=2, **options):
        return heddle.run_threads(ranks, lambda group: call(group, self.saved, heddle.LayerOptions(**options)))

    def test_a_call_goes_one_of_the_ways_and_says_why(self):
        saved, batch = self.saved, self.saved.batch

        def main(group):
            layer = heddle.MoeLayer.create(group, saved.source, heddle.LayerOptions(way="auto", cap=20))
            out = layer.forward(batch.hidden, batch.ids, batch.weights, step=heddle.Step(20))
            text, way = layer.explain(heddle.Step(20)), layer.report.way
            layer.workspace.close()
            return out, text, way

        (out, text, way), other = heddle.run_threads(2, main)
        self.assertEqual(way, other[2])
        self.assertIn(way, text)
        alone = heddle.run_threads(2, lambda group: self.alone(group, way))[0]
        np.testing.assert_array_equal(bits(out), bits(alone))

    def alone(self, group, way):
        batch = self.saved.batch
        layer = heddle.MoeLayer.create(group, self.saved.source, heddle.LayerOptions(way=way, cap=20))
        out = layer.forward(batch.hidden, batch.ids, batch.weights, step=heddle.Step(20))
        layer.workspace.close()
        return out

    def test_candidates(self):
        def way(group):
            batch, gone = self.saved.batch, []
            for one in ("elastic", "normal"):  # not both can be the fastest
                options = heddle.LayerOptions(way="auto", cap=20, candidates=(one,))
                layer = heddle.MoeLayer.create(group, self.saved.source, options)
                layer.forward(batch.hidden, batch.ids, batch.weights, step=heddle.Step(20))
                gone.append(layer.report.way)
                layer.workspace.close()
            return gone

        self.assertEqual(heddle.run_threads(2, way), [["elastic", "normal"]] * 2)

    def test_split_calls_have_the_bits_of_one(self):
        for way in ("gather", "low_latency", "mega"):
            with self.subTest(way=way):
                whole = self.outputs(way=way, cap=20)
                passes = self.outputs(way=way, cap=3, overflow="split")
                for one, other in zip(whole, passes, strict=True):
                    np.testing.assert_array_equal(bits(one), bits(other))

    def test_more_than_the_cap_is_an_error(self):
        with self.assertRaises(heddle.Error):
            self.outputs(way="low_latency", cap=3)

    def test_a_table_that_is_none(self):
        path = Path(self.folder.name) / "broken.json"
        path.write_text("{")
        with self.assertRaisesRegex(heddle.InputError, "broken.json"):
            self.outputs(ranks=1, way="auto", cap=20, tuning=str(path))


if __name__ == "__main__":
    unittest.main()
