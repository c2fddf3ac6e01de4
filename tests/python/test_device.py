"""Layers on a GPU with torch's tensors: several ranks on one GPU against the host engine, captured graphs, wrong tensors. Skipped
without the CUDA part, torch, or a GPU."""

import tempfile
import unittest
from pathlib import Path

import support
from support import WAYS

import heddle
import numpy as np
import oracle
from heddle import device

try:
    import torch

    import heddle.torch
except ImportError:
    torch = None

SHAPE = heddle.LayerShape(hidden=256, intermediate=128, experts=8, topk=2)
RANKS, TOKENS = 4, 6
BOUND = 4e-3  # bf16 weights


def why_not():
    if not device.is_built():
        return "this module was built without the CUDA part"
    if torch is None:
        return "torch is not here"
    return "" if device.gpus_present() and torch.cuda.is_available() else "no GPU is here"


def draw(ranks=RANKS, tokens=TOKENS):
    """Of each rank: hidden, ids, weights, in host memory."""
    random = np.random.default_rng(support.SEED)
    batches = []
    for _ in range(ranks):
        hidden = torch.tensor(random.normal(size=(tokens, SHAPE.hidden))).to(torch.bfloat16)
        ids = torch.tensor(np.argsort(random.random((tokens, SHAPE.experts)), axis=1)[:, : SHAPE.topk].astype(np.int32))
        batches.append((hidden, ids, torch.tensor(random.random((tokens, SHAPE.topk)).astype(np.float32))))
    return batches


def on_host(source, options, batches):
    def main(group):
        layer = heddle.MoeLayer.create(group, source, options)
        return layer.forward(*batches[group.rank], step=heddle.Step(TOKENS))

    return heddle.run_threads(len(batches), main)


@unittest.skipIf(why_not(), why_not())
class Device(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.source = heddle.Source.synthetic(SHAPE, shared_kind="bf16", seed=support.SEED)

    def create(self, options, ranks=RANKS):
        weights = [self.source.load(rank, ranks) for rank in range(ranks)]
        workspace = device.DeviceWorkspace([(weights[0], options)], ranks=ranks, deadline=5)
        return device.DeviceLayer(workspace, weights, options)

    def lists(self, batches):
        return [[array.cuda() for array in of] for of in zip(*batches, strict=True)]

    def assert_close(self, outs, expected):
        for out, wanted in zip(outs, expected, strict=True):
            self.assertLess(oracle.relative_error(out.float().cpu().numpy(), wanted.float().numpy()), BOUND)

    def test_ways_against_the_host_engine(self):
        batches = draw()
        for way in WAYS:
            with self.subTest(way=way):
                options = heddle.LayerOptions(way=way, cap=8)
                layer = self.create(options)
                outs = layer.forward(*self.lists(batches), step=heddle.Step(TOKENS))
                torch.cuda.synchronize()
                layer.throw_if_failed()
                self.assert_close(outs, on_host(self.source, options, batches))

    def test_the_router_inside(self):
        """Without ids: the bits of the same call with the ids and weights that the host's router chooses."""
        with tempfile.TemporaryDirectory() as folder:
            saved = support.save(Path(folder), router={"score": "softmax", "topk": 3, "renormalise": True})
            source = heddle.Source.open(saved.path)
            options = heddle.LayerOptions(way="low_latency", cap=len(saved.batch.hidden))
            weights = source.load(0, 1)
            layer = device.DeviceLayer(device.DeviceWorkspace([(weights, options)], ranks=1, deadline=5), weights, options)
            hidden = torch.tensor(saved.batch.hidden.astype(np.float32)).to(torch.bfloat16).cuda()
            chosen = [torch.tensor(array).cuda() for array in source.route(saved.batch.hidden)]
            step = heddle.Step(len(hidden))
            own, given = layer.forward(hidden, step=step), layer.forward(hidden, *chosen, step=step)
            torch.cuda.synchronize()
            layer.throw_if_failed()
            self.assertTrue(torch.equal(own, given))
            with self.assertRaisesRegex(heddle.InputError, "give both"):
                layer.forward(hidden, chosen[0], step=step)

    def test_graphs_with_other_tokens(self):
        options = heddle.LayerOptions(way="low_latency", cap=8)
        layer = self.create(options)
        hidden, ids, weights = self.lists(draw())
        counts = [torch.tensor([TOKENS], dtype=torch.int32, device="cuda") for _ in range(RANKS)]
        out = [torch.zeros_like(rank) for rank in hidden]
        layer.forward(hidden, ids, weights, out, step=heddle.Step(TOKENS), tokens=counts)
        torch.cuda.synchronize()
        first = [rank.clone() for rank in out]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.forward(hidden, ids, weights, out, step=heddle.Step(TOKENS), tokens=counts)
        for rank in out:
            rank.zero_()
        graph.replay()
        torch.cuda.synchronize()
        layer.throw_if_failed()
        for rank in range(RANKS):
            self.assertTrue(torch.equal(out[rank], first[rank]))
        counts[0].fill_(2)
        out[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(out[0][:2], first[0][:2]))
        self.assertEqual(out[0][2:].abs().max().item(), 0)

    def test_a_stream_of_ones_own(self):
        layer = self.create(heddle.LayerOptions(cap=8), ranks=1)
        hidden, ids, weights = (array.cuda() for array in draw(1)[0])
        expected = layer.forward(hidden, ids, weights, step=heddle.Step(TOKENS))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        out = torch.zeros_like(hidden)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.assertEqual(device.current_stream(hidden), stream.cuda_stream)
            layer.forward(hidden, ids, weights, out, step=heddle.Step(TOKENS))
        stream.synchronize()
        self.assertTrue(torch.equal(out, expected))
        layer.forward(hidden, ids, weights, out.zero_(), step=heddle.Step(TOKENS), stream=torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(out, expected))
        new = layer.forward(hidden, ids, weights, step=heddle.Step(TOKENS), stream=stream.cuda_stream)
        stream.synchronize()
        self.assertTrue(torch.equal(new, expected))

    def test_operator(self):
        layer = self.create(heddle.LayerOptions(cap=8), ranks=1)
        batch = [array.cuda() for array in draw(1)[0]]
        module = heddle.torch.MoeModule(layer)
        expected = layer.forward(*batch, step=heddle.Step(TOKENS))
        self.assertTrue(torch.equal(module(*batch, heddle.Step(TOKENS)), expected))
        compiled = torch.compile(lambda *given: module(*given, heddle.Step(TOKENS)), backend="aot_eager", fullgraph=True)
        self.assertTrue(torch.equal(compiled(*batch), expected))

    def test_wrong_tensors(self):
        layer = self.create(heddle.LayerOptions(cap=8), ranks=1)
        hidden, ids, weights = (array.cuda() for array in draw(1)[0])
        wrong = [
            ((hidden.cpu(), ids, weights), "hidden: expected bfloat16 .* CUDA device 0; got an array in host memory"),
            ((hidden, ids.long(), weights), "ids: expected int32 .* got int64"),
            ((hidden.new_zeros(TOKENS * 256 + 4)[4:].view(TOKENS, 256), ids, weights), "multiple of 16"),
            ((hidden.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1)), "12 tokens.* 8"),
        ]
        for given, words in wrong:
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                layer.forward(*given, step=heddle.Step(8), stream=torch.cuda.current_stream().cuda_stream)
            with self.assertRaises(heddle.FaultError) as told:
                layer.workspace.throw_if_aborted()
            self.assertEqual((told.exception.rank, told.exception.phase), (0, "input check"))
            layer.workspace.reset()
        self.assertEqual(layer.forward(hidden, ids, weights, step=heddle.Step(TOKENS)).shape, hidden.shape)
        torch.cuda.synchronize()
        layer.throw_if_failed()

    def test_a_refusal_in_a_capture_is_told_to_nobody(self):
        layer = self.create(heddle.LayerOptions(cap=8), ranks=1)
        hidden, ids, weights = (array.cuda() for array in draw(1)[0])
        graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(hidden)
        layer.forward(hidden, ids, weights, out, step=heddle.Step(TOKENS))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            with self.assertRaisesRegex(heddle.InputError, "ids: expected int32"):
                layer.forward(hidden, weights, weights, out, step=heddle.Step(TOKENS))
            layer.forward(hidden, ids, weights, out, step=heddle.Step(TOKENS))
        graph.replay()
        torch.cuda.synchronize()
        layer.throw_if_failed()

    def test_more_tokens_than_the_cap_in_passes(self):
        """Without tokens=; the numbers that calls point at are made where a batch is larger than any before, but not in a capture."""
        hidden, ids, weights = (array.cuda() for array in draw(1, 20)[0])
        whole = self.create(heddle.LayerOptions(cap=20), ranks=1).forward(hidden, ids, weights, step=heddle.Step(20))
        layer = self.create(heddle.LayerOptions(cap=4, overflow="split"), ranks=1)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), self.assertRaisesRegex(heddle.InputError, "before the capture"):
            layer.forward(hidden, ids, weights, torch.empty_like(hidden), step=heddle.Step(20))
        for count in (4, 9, 20, 9):
            given = (array[:count] for array in (hidden, ids, weights))
            out = layer.forward(*given, step=heddle.Step(count))
            torch.cuda.synchronize()
            layer.throw_if_failed()
            self.assertTrue(torch.equal(out, whole[:count]))

    def test_a_bad_id_is_a_fault(self):
        layer = self.create(heddle.LayerOptions(cap=8), ranks=1)
        hidden, ids, weights = (array.cuda() for array in draw(1)[0])
        ids[1, 0] = SHAPE.experts
        layer.forward(hidden, ids, weights, step=heddle.Step(TOKENS))
        torch.cuda.synchronize()
        with self.assertRaises(heddle.FaultError):
            layer.throw_if_failed()
        layer.workspace.reset()


if __name__ == "__main__":
    unittest.main()
