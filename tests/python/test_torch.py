"""The layer with tensors of PyTorch on the host engine: without copies, as an operator, under torch.compile."""

import re
import unittest

import support
from support import HERE, bits, launch_text, launched

import heddle
import ml_dtypes
import numpy as np

try:
    import torch

    import heddle.torch
except ImportError as error:
    torch, missing = None, str(error)

SHAPE = heddle.LayerShape(hidden=128, intermediate=64, experts=4, topk=2)


def arrays(count=3):
    random = np.random.default_rng(support.SEED)
    hidden = random.normal(size=(count, 128)).astype(ml_dtypes.bfloat16)
    ids = np.tile(np.array([0, 3], np.int32), (count, 1))
    return hidden, ids, random.random((count, 2)).astype(np.float32)


def tensors(count=3):
    hidden, ids, weights = arrays(count)
    return torch.from_numpy(bits(hidden)).view(torch.bfloat16), torch.from_numpy(ids), torch.from_numpy(weights)


def create(group):
    return heddle.MoeLayer.create(group, heddle.Source.synthetic(SHAPE), heddle.LayerOptions(cap=4))


class Subclass(torch.Tensor if torch else object):
    """What is no plain tensor lends itself in its own way."""


@unittest.skipIf(torch is None, f"torch is not here: {None if torch else missing}")
class Torch(unittest.TestCase):
    def setUp(self):
        self.layer = create(heddle.thread_group(1)[0])
        self.expected = bits(self.layer.forward(*arrays()))

    def assert_expected(self, out):
        self.assertEqual((out.dtype, tuple(out.shape)), (torch.bfloat16, (3, 128)))
        np.testing.assert_array_equal(out.view(torch.uint16).numpy(), self.expected)

    def test_tensors_are_not_copied(self):
        given = tensors()
        for tensor in given:
            self.assertEqual(heddle._core.address_of(tensor), tensor.data_ptr())
            self.assertEqual(heddle._core.address_of(tensor[1:]), tensor[1:].data_ptr())
            self.assertEqual(heddle._core.address_of(tensor.as_subclass(Subclass)), tensor.data_ptr())
        parameter = torch.nn.Parameter(given[0], requires_grad=False)
        self.assertEqual(heddle._core.address_of(parameter), given[0].data_ptr())
        out = torch.zeros((5, 128), dtype=torch.bfloat16)
        result = self.layer.forward(*given, out=out[1:4])
        self.assertEqual(result.data_ptr(), out[1:4].data_ptr())
        self.assert_expected(out[1:4])
        self.assert_expected(self.layer.forward(*given))

    def test_wrong_tensors(self):
        hidden, ids, weights = tensors()
        for given, words in (
            ((hidden.float(), ids, weights), "hidden: expected bfloat16 .* got float32"),
            ((hidden.half(), ids, weights), "hidden: expected bfloat16 .* got float16"),
            ((hidden, ids.long(), weights), "ids: expected int32 .* got int64"),
            ((hidden.T.contiguous().T, ids, weights), "strides"),
            ((hidden.clone().requires_grad_(), ids, weights), "a tensor that requires gradients.* detach"),
            ((torch.nn.Parameter(hidden), ids, weights), "a tensor that requires gradients.* detach"),
            ((hidden.to("meta"), ids, weights), "hidden: expected bfloat16"),
            ((hidden.to_sparse(), ids, weights), "hidden: expected bfloat16"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex((heddle.InputError, TypeError), words):
                self.layer.forward(*given)
            self.layer.workspace.reset()

    def test_operator(self):
        module = heddle.torch.MoeModule(self.layer)
        self.assert_expected(module(*tensors(), heddle.Step(3)))
        self.assert_expected(module(*tensors()))
        torch.library.opcheck(heddle.torch.moe, (*tensors(), module._number, 3, False))
        del self.layer
        number = module._number
        del module
        with self.assertRaisesRegex(heddle.InputError, "gone"):
            heddle.torch.moe(*tensors(), number, 3, False)

    def test_fake_tensors(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        module = heddle.torch.MoeModule(self.layer)
        with FakeTensorMode() as mode:
            given = [mode.from_tensor(tensor) for tensor in tensors()]
            out = module(*given, heddle.Step(3))
            self.assertEqual((out.dtype, tuple(out.shape)), (torch.bfloat16, (3, 128)))
            with self.assertRaisesRegex(Exception, "ids: expected int32"):
                module(given[0], given[1].long(), given[2], heddle.Step(3))

    def test_compiled(self):
        module = heddle.torch.MoeModule(self.layer)

        def block(hidden, ids, weights):
            return module(hidden * 1.0, ids, weights, heddle.Step(3)) + 0

        for backend in ("eager", "aot_eager"):
            with self.subTest(backend=backend):
                torch._dynamo.reset()
                compiled = torch.compile(block, backend=backend, fullgraph=True)
                self.assert_expected(compiled(*tensors()))

    def test_compiled_once_for_all_batches(self):
        """Numbers of tokens and steps that change are no reason to compile again where shapes are dynamic."""
        from torch._dynamo.testing import CompileCounterWithBackend

        module = heddle.torch.MoeModule(self.layer)
        for backend in ("eager", "aot_eager"):
            with self.subTest(backend=backend):
                torch._dynamo.reset()
                counter = CompileCounterWithBackend(backend)
                compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
                for count in (3, 4, 2, 3):
                    given = tensors(count)
                    torch.testing.assert_close(compiled(*given, heddle.Step(count)), self.layer.forward(*given), rtol=0, atol=0)
                    self.assertEqual(len(compiled(*given)), count)
                self.assertLess(counter.frame_count, 4)  # with a step and without; torch may take a number for fixed first

    def test_compiled_with_the_wrong_dtype(self):
        module = heddle.torch.MoeModule(self.layer)
        hidden, ids, weights = tensors()
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        with self.assertRaisesRegex(Exception, "ids: expected int32 .*, got torch.int64"):
            compiled(hidden, ids.long(), weights, heddle.Step(3))

    def test_two_ranks(self):
        def main(group):
            return heddle.torch.MoeModule(create(group))(*tensors(), heddle.Step(3))

        for out in heddle.run_threads(2, main):
            self.assert_expected(out)


PROCESS_GROUP = """
import sys, torch, heddle
torch.distributed.init_process_group("gloo")
group = heddle.join(process_group=True, deadline=20)
assert (group.rank, group.ranks) == (torch.distributed.get_rank(), 2)
assert group.exchange(str(group.rank)) == ["0", "1"]
torch.distributed.destroy_process_group()
"""


@unittest.skipIf(torch is None, f"torch is not here: {None if torch else missing}")
class Launched(unittest.TestCase):
    def test_a_process_group_of_torch(self):
        launch_text(PROCESS_GROUP, 2)

    def test_the_example(self):
        """It compares its tokens itself; here they are looked at for being different ones."""
        example = HERE.parent.parent / "examples" / "python" / "torch_layer.py"
        for ranks in (0, 2):
            with self.subTest(ranks=ranks):
                requests = re.findall("request 0: (.*)", launched(example, ranks))
                self.assertEqual(len(requests), max(ranks, 1))
                for tokens in requests:
                    self.assertGreater(len(set(tokens.split())), 10, tokens)


if __name__ == "__main__":
    unittest.main()
