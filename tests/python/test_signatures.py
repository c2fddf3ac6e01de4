"""The adapters' signatures against those of the packages that they stand in for: names, order and defaults."""

import ast
import dataclasses
import inspect
import json
import unittest
from pathlib import Path

import pinned

import heddle.adapters.deepep
from heddle.adapters import deepgemm, sglang, sglang_base, vllm, vllm_base

DATA = Path(__file__).parent / "data"
REQUIRED = object()


def own(function):
    """(name, default) of what can be given by position; what only Heddle has must be optional and by name."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    by_position = [one for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    more = [one.name for one in parameters if one not in by_position and one.default is inspect.Parameter.empty]
    return [(one.name, REQUIRED if one.default is inspect.Parameter.empty else one.default) for one in by_position], more


def written(default):
    """As a source has it."""
    return repr(default) if isinstance(default, str) else str(default).removeprefix("_")


def parsed(function):
    """(name,) or (name, default's text) of a function's arguments in a source that is not run."""
    arguments = function.args.args
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
    pairs = [(one.arg, default) for one, default in zip(arguments, defaults) if one.arg not in ("self", "cls")]
    return [(name,) if default is None else (name, ast.unparse(default)) for name, default in pairs]


def classes(path):
    """The classes of a source file by name."""
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def methods(node):
    return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}


def is_decorated(method, by):
    return any(ast.unparse(one) == by for one in method.decorator_list)


def values(node):
    """What an enumeration's members or a tuple's fields are set to; None where to nothing."""
    found = {}
    for part in node.body:
        if isinstance(part, ast.Assign):
            found[part.targets[0].id] = ast.literal_eval(part.value)
        elif isinstance(part, ast.AnnAssign):
            found[part.target.id] = REQUIRED if part.value is None else ast.literal_eval(part.value)
    return found


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

    def assert_same_as_source(self, function, source):
        """Names, order, and what their defaults are written as."""
        given = [(name,) if default is REQUIRED else (name, written(default)) for name, default in own(function)[0]]
        self.assertEqual((given, own(function)[1]), (parsed(source), []))

    def test_sglang_base(self):
        base = classes(pinned.package("sglang") / "sglang/srt/layers/moe/token_dispatcher/base.py")
        theirs = methods(base["BaseDispatcher"])
        abstract = {name for name, method in theirs.items() if "abstractmethod" in map(ast.unparse, method.decorator_list)}
        self.assertEqual(abstract, {"dispatch", "combine"})
        for name, method in theirs.items():
            if name.startswith("_") and name != "__init__":
                continue
            for dispatcher in (sglang_base._BaseDispatcher, sglang.DeepEPDispatcher, sglang.StandardDispatcher):
                if name != "__init__":
                    with self.subTest(name=name, dispatcher=dispatcher):
                        self.assert_same_as_source(getattr(dispatcher, name), method)
        for name, enumeration in (
            ("DispatchOutputFormat", sglang_base._DispatchOutputFormat),
            ("CombineInputFormat", sglang_base._CombineInputFormat),
        ):
            for member in enumeration:
                self.assertEqual(values(base[name])[member.name], member.value)

    def test_sglang_mode(self):
        mode = classes(pinned.package("sglang") / "sglang/srt/layers/moe/utils.py")["DeepEPMode"]
        self.assertEqual({member.name: member.value for member in sglang_base._DeepEPMode}, values(mode))
        for name, method in methods(mode).items():
            self.assert_same_as_source(getattr(sglang_base._DeepEPMode, name), method)

    def test_sglang_dispatchers(self):
        folder = pinned.package("sglang") / "sglang/srt/layers/moe/token_dispatcher"
        deepep, standard = classes(folder / "deepep.py"), classes(folder / "standard.py")
        for name, method in methods(deepep["DeepEPDispatcher"]).items():
            if not name.startswith("_") or name == "__init__":
                with self.subTest(name=name):
                    self.assert_same_as_source(getattr(sglang.DeepEPDispatcher, name), method)
        for theirs, name in (
            (deepep, "DeepEPNormalDispatchOutput"),
            (deepep, "DeepEPLLDispatchOutput"),
            (deepep, "DeepEPNormalCombineInput"),
            (deepep, "DeepEPLLCombineInput"),
            (standard, "StandardDispatchOutput"),
            (standard, "StandardCombineInput"),
        ):
            fields = getattr(sglang, name)._fields, getattr(sglang, name)._field_defaults
            with self.subTest(name=name):
                defaults = {field: value for field, value in values(theirs[name]).items() if value is not REQUIRED}
                self.assertEqual(fields, (tuple(values(theirs[name])), defaults))

    def test_sglang_fused(self):
        """The arguments of a function that SGLang would register."""
        path = pinned.package("sglang") / "sglang/srt/layers/moe/flashinfer_megamoe.py"
        theirs = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "run_flashinfer_megamoe")
        self.assertEqual([name for name, *_ in parsed(theirs)], [name for name, _ in own(sglang.fused_experts)[0]])

    def test_vllm_prepare_and_finalize(self):
        folder = pinned.package("vllm") / "vllm/model_executor/layers/fused_moe"
        base = classes(folder / "modular_kernel.py")
        theirs = {**methods(base["FusedMoEPrepareAndFinalize"]), **methods(base["FusedMoEPrepareAndFinalizeModular"])}
        own_classes = {"deepep_ht": vllm.HeddlePrepareAndFinalize, "deepep_ll": vllm.HeddleBatchedPrepareAndFinalize}
        for file, carrier in own_classes.items():
            for name, method in theirs.items():
                with self.subTest(name=name, carrier=carrier):
                    ours = inspect.getattr_static(carrier, name)
                    self.assertNotIn(name, carrier.__abstractmethods__)
                    self.assertEqual(isinstance(ours, property), is_decorated(method, "property"))
                    if not isinstance(ours, property):
                        self.assert_same_as_source(ours, method)
            (constructor,) = (methods(node)["__init__"] for node in classes(folder / f"prepare_finalize/{file}.py").values())
            self.assert_same_as_source(carrier.__init__, constructor)

    def test_vllm_experts(self):
        folder = pinned.package("vllm") / "vllm/model_executor/layers/fused_moe"
        base = classes(folder / "modular_kernel.py")
        theirs = {**methods(base["FusedMoEExperts"]), **methods(base["FusedMoEExpertsModular"])}
        needed = {name for name, method in theirs.items() if is_decorated(method, "abstractmethod")}
        for experts in (vllm.HeddleExperts, vllm.HeddleBatchedExperts):
            self.assertLessEqual(needed, set(dir(experts)) - experts.__abstractmethods__)
            for name, method in theirs.items():
                ours = inspect.getattr_static(experts, name, None)
                with self.subTest(name=name, experts=experts):
                    if ours is None or isinstance(ours, property):  # a helper of theirs that stand-ins do not have
                        self.assertNotIn(name, needed)
                        continue
                    self.assertEqual(isinstance(ours, staticmethod), is_decorated(method, "staticmethod"))
                    self.assert_same_as_source(getattr(experts, name), method)

    def test_vllm_words(self):
        folder = pinned.package("vllm") / "vllm/model_executor/layers/fused_moe"
        base, sums = classes(folder / "modular_kernel.py"), classes(folder / "topk_weight_and_reduce.py")
        formats = {member.name: member.value for member in vllm_base._FusedMoEActivationFormat}
        self.assertEqual(formats, values(base["FusedMoEActivationFormat"]))
        fields = {field.name: field.default for field in dataclasses.fields(vllm_base._ExpertTokensMetadata)}
        expected = values(base["ExpertTokensMetadata"])
        self.assertEqual(list(fields), list(expected))
        for name, default in expected.items():
            self.assertEqual(fields[name] is dataclasses.MISSING, default is REQUIRED)
        for name in ("TopKWeightAndReduceDelegate", "TopKWeightAndReduceNoOP"):
            self.assert_same_as_source(getattr(vllm_base, f"_{name}").apply, methods(sums[name])["apply"])

    def test_deepgemm_products(self):
        """Functions that the package defines inside of another one."""
        source = ast.parse((pinned.package("vllm") / "vllm/third_party/deep_gemm/_C.py").read_text())
        theirs = {node.name: node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
        for name in (
            "m_grouped_fp8_fp4_gemm_nt_contiguous",
            "m_grouped_fp8_fp4_gemm_nt_masked",
            "m_grouped_bf16_gemm_nt_contiguous",
            "m_grouped_bf16_gemm_nt_masked",
            "set_mk_alignment_for_contiguous_layout",
        ):
            with self.subTest(name=name):
                self.assert_same_as_source(getattr(deepgemm, name), theirs[name])
        names = next(node for node in ast.walk(source) if getattr(getattr(node, "targets", [None])[0], "id", "") == "_PUBLIC_API")
        public = set(ast.literal_eval(names.value))
        functions = {name for name in deepgemm.__all__ if "gemm" in name or "layout" in name or "aligned" in name}
        layout = (pinned.package("vllm") / "vllm/third_party/deep_gemm/utils/layout.py").read_text()
        self.assertEqual({name for name in functions - public if name not in layout}, set())

    def test_deepgemm_layouts(self):
        for name, expected in json.loads((DATA / "deepgemm.json").read_text())["names"].items():
            with self.subTest(name=name):
                self.assert_same(getattr(deepgemm, name), expected)

    def test_deepgemm_mega(self):
        source = ast.parse((pinned.package("vllm") / "vllm/third_party/deep_gemm/mega/__init__.py").read_text())
        theirs = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in ("get_symm_buffer_for_mega_moe", "transform_weights_for_mega_moe", "fp8_fp4_mega_moe", "bf16_mega_moe"):
            with self.subTest(name=name):
                self.assert_same_as_source(getattr(deepgemm, name), theirs[name])
        for name, method in methods(theirs["SymmBuffer"]).items():
            with self.subTest(name=name):
                self.assert_same_as_source(getattr(deepgemm.SymmBuffer, name), method)


if __name__ == "__main__":
    unittest.main()
