"""The adapters' signatures against those of the packages that they stand in for: names, order and defaults."""

import inspect
import json
import unittest
from pathlib import Path

import heddle.adapters.deepep

DATA = Path(__file__).parent / "data"
REQUIRED = object()


def own(function):
    """(name, default) of what can be given by position; what only Heddle has must be optional and by name."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    by_position = [one for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    more = [one.name for one in parameters if one not in by_position and one.default is inspect.Parameter.empty]
    return [(one.name, REQUIRED if one.default is inspect.Parameter.empty else one.default) for one in by_position], more


class Signatures(unittest.TestCase):
    def assert_same(self, function, expected):
        """expected: (name,) or (name, default) each."""
        expected = [(name, default[0] if default else REQUIRED) for name, *default in expected]
        self.assertEqual(own(function), (expected, []))

    def test_deepep(self):
        names = json.loads((DATA / "deepep.json").read_text())["names"]
        for name, functions in names.items():
            for function, expected in functions.items():
                with self.subTest(name=name, function=function):
                    self.assert_same(getattr(getattr(heddle.adapters.deepep, name), function), expected)


if __name__ == "__main__":
    unittest.main()
