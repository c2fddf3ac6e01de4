"""Routers, formats, plans and budgets through Python, and the package's types."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from support import HERE, SEED, save

import formats
import heddle
import heddle.device
import numpy as np
from heddle import _core


class Formats(unittest.TestCase):
    def test_quantisation_is_the_oracles(self):
        rows = np.random.default_rng(SEED).normal(size=(5, 200)).astype(np.float32)
        for group in (128, 32):
            for scale in ("ue8m0", "f32"):
                with self.subTest(group=group, scale=scale):
                    how = heddle.Quantisation(group, scale)
                    codes, scales = heddle.formats.quantise_fp8(rows, how)
                    expected_codes, expected_scales = formats.quantise_e4m3(rows, group, scale)
                    np.testing.assert_array_equal(codes.view(np.uint8), np.asarray(expected_codes).view(np.uint8))
                    np.testing.assert_array_equal(scales.astype(np.float64), np.asarray(expected_scales).astype(np.float64))
                    widened = heddle.formats.widen_fp8(codes, scales, how)
                    exact = formats.widen_e4m3(expected_codes, expected_scales, group)
                    np.testing.assert_array_equal(widened, exact.astype(np.float32))

    def test_refusals(self):
        with self.assertRaisesRegex(heddle.InputError, "rows: expected float32"):
            heddle.formats.quantise_fp8(np.zeros((2, 64)))
        with self.assertRaisesRegex(heddle.InputError, "48"):
            heddle.formats.quantise_fp8(np.zeros((2, 64), np.float32), heddle.Quantisation(48))


class Router(unittest.TestCase):
    def test_choices_are_the_oracles(self):
        with tempfile.TemporaryDirectory() as folder:
            router = {"score": "softmax", "topk": 3, "renormalise": True}
            saved = save(Path(folder), router=router)
            source = heddle.Source.open(saved.path)
            self.assertTrue(source.has_router)
            self.assertEqual(source.router.topk, 3)
            ids, weights = source.route(saved.batch.hidden)
            self.assertEqual((ids.shape, ids.dtype, weights.dtype), ((20, 3), np.int32, np.float32))
            np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
            logits = saved.batch.hidden.astype(np.float64) @ saved.layer.router.weight.astype(np.float64).T
            np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :3])

    def test_no_router_inside(self):
        """Ids of one's own go through a layer whose router is none or cannot be followed; without ids the reason is told."""
        unknown = {"score": "softmax", "topk": 2}, {"scoring_func": "tanh", "num_experts_per_tok": 2}
        for (router, extra), words in ((unknown, "scoring_func is 'tanh'"), ((None, {}), "no router")):
            with self.subTest(words=words), tempfile.TemporaryDirectory() as folder:
                saved = save(Path(folder), router=router, extra=extra)
                layer = heddle.MoeLayer.create(heddle.thread_group(1)[0], saved.source, heddle.LayerOptions(cap=20))
                layer.forward(saved.batch.hidden, saved.batch.ids, saved.batch.weights)
                self.assertEqual([part.shape for part in layer.routing], [(0, 2), (0, 2)])
                with self.assertRaisesRegex(heddle.InputError, words):
                    layer.forward(saved.batch.hidden)
                with self.assertRaisesRegex(heddle.InputError, words):
                    saved.source.route(saved.batch.hidden)


class Plans(unittest.TestCase):
    def test_a_plan_is_the_commands(self):
        request = heddle.PlanRequest.of_preset("deepseek-v3", ranks=8, tokens=64)
        sections = {section.name: section for section in heddle.plan(request)}
        pairs = {quantity.name: quantity for quantity in sections["load"].quantities}["pairs"]
        self.assertEqual((pairs.value, pairs.unit), (4096, "count"))
        self.assertIn("deepseek-v3", [preset.name for preset in heddle.presets()])

    def test_budget(self):
        budget = heddle.TokenBudget(decode_graphs=[8, 64], speculative_rows=3, prefill_chunk=1001, data_parallel_groups=2)
        bound = heddle.token_bound(budget)
        self.assertEqual((bound.decode, bound.prefill, bound.cap), (192, 501, 501))
        heddle.check_cap(budget, 501)
        with self.assertRaisesRegex(heddle.InputError, "501.*500"):
            heddle.check_cap(budget, 500)
        with self.assertRaisesRegex(heddle.InputError, "-1 is no bound"):
            heddle.token_bound(heddle.TokenBudget(prefill_chunk=-1))
        request = heddle.PlanRequest.of_preset("deepseek-v3", ranks=8, tokens=1)
        self.assertTrue(heddle.budget_plan(budget, request))

    def test_refusals(self):
        with self.assertRaisesRegex(heddle.InputError, "deepseek-v3"):
            heddle.preset("deepseek-v9")
        with self.assertRaisesRegex(heddle.InputError, "h200"):
            heddle.plan(heddle.PlanRequest.of_preset("deepseek-v3", ranks=8, tokens=64, machine="abacus"))


def members(tree):
    """Of a stub: classes with the names in them, and functions."""
    named = {}
    for part in tree.body:
        if isinstance(part, ast.ClassDef):
            named[part.name] = {member.name for member in part.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(part, ast.FunctionDef):
            named[part.name] = set()
    return named


def documented():
    """Classes and functions that people use, by name, and what of classes takes arguments."""
    public = {name: getattr(heddle, name) for name in heddle.__all__}
    for module in (heddle.device, heddle.formats):
        told = getattr(module, "__all__", ())
        mine = {
            name: value for name, value in vars(module).items() if name in told or getattr(value, "__module__", "") == module.__name__
        }
        public |= {f"{module.__name__.partition('.')[2]}.{name}": value for name, value in mine.items() if not name.startswith("_")}
    for name, value in public.items():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and value.__module__ != "heddle._core":
            yield name, value
            for member, method in vars(value).items():
                method = getattr(method, "__func__", method)
                takes = inspect.isfunction(method) and len(inspect.signature(method).parameters) > 1
                if takes and not member.startswith("_"):
                    yield f"{name}.{member}", method


class Types(unittest.TestCase):
    def test_the_stub_has_what_the_module_has(self):
        stub = (Path(heddle.__file__).parent / "_core.pyi").read_text()
        host, device = stub.split("# With the CUDA part only.")
        named = members(ast.parse(host + device if hasattr(_core, "DeviceContext") else host))
        there = {name: value for name, value in vars(_core).items() if not name.startswith("_") and callable(value)}
        self.assertEqual(set(there), set(named))
        for name, value in there.items():
            if inspect.isclass(value):
                self.assertEqual({member for member in vars(value) if not member.startswith("_")}, named[name] - {"__init__"}, name)

    def test_everything_public_says_what_it_is(self):
        """In words of its own, not a dataclass's or a base class's; what takes arrays names each and an element type."""
        for name, value in documented():
            with self.subTest(name=name):
                doc = value.__doc__ or ""
                self.assertGreater(len(doc.split()), 3, doc)
                self.assertFalse(doc.startswith(f"{value.__name__}("), "a dataclass that says nothing of its own")
                if inspect.isclass(value):
                    continue
                arrays = [name for name, kind in value.__annotations__.items() if "Array" in str(kind) and name != "return"]
                for array in arrays:
                    self.assertRegex(doc, rf"\b{array}\b")
                if arrays:
                    self.assertRegex(doc, "bf16|bfloat16|float32|int32|e4m3|As MoeLayer.forward")

    def test_what_is_looked_at(self):
        self.assertIn("MoeLayer.forward", dict(documented()))
        self.assertIn("device.DeviceLayer.forward", dict(documented()))
        self.assertIn("device.DeviceExchange.dispatch", dict(documented()))

    def test_the_module_gives_other_libraries_nothing(self):
        """But the function that makes it: libstdc++ would take the module's copies of the templates that it has itself, in a process
        of others, too (python/exports.map)."""
        if sys.platform != "linux" or shutil.which("nm") is None:
            self.skipTest("nm is not here")
        told = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True).stdout
        self.assertEqual([line.split()[-1] for line in told.splitlines()], ["PyInit__core"])

    def test_mypy(self):
        try:
            import mypy
        except ImportError:
            self.skipTest("mypy is not here (tests/python/requirements.txt)")
        done = subprocess.run([sys.executable, "-m", "mypy"], cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
