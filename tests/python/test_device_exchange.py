"""An exchange on a GPU with torch's tensors and experts written here: every way and layout with several ranks on one GPU, graphs,
refusals. Skipped without the CUDA part, torch, or a GPU; what stands above the module is tested without one, too."""

import unittest
from dataclasses import replace

import adapted
from adapted import to
from stand_in import standing_in
from test_device import why_not
from test_exchange import EXPERTS, HIDDEN, LAYOUTS, TOPK, batch, expected, run_experts

import heddle
import ml_dtypes
import numpy as np
import oracle
from heddle import device

torch = adapted.torch
MOST = heddle.Step(16)
ARRAYS = ("rows", "begins", "counts", "row_weights", "local_ids", "weights")


def in_host_memory(arrived):
    """What has arrived as NumPy's."""
    arrays = {name: getattr(arrived, name) for name in ARRAYS}
    return replace(arrived, **{name: None if array is None else array.cpu().numpy() for name, array in arrays.items()})


def rows_of(arrived):
    if arrived.wire == "bf16":
        return arrived.bf16()
    codes, scales = arrived.fp8()
    return heddle.formats.widen_fp8(codes.copy(), scales.copy(), arrived.options.quantisation)


def options(**changed):
    return heddle.ExchangeOptions(**({"hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, "cap": 16} | changed))


class Of:
    """The experts of a rank as run_experts wants them."""

    def __init__(self, exchange, local):
        self.experts = exchange.experts_of(local)


@unittest.skipIf(why_not(), why_not())
class OnGpu(unittest.TestCase):
    def give(self, batches):
        return [[to("torch", array).cuda() for array in of] for of in zip(*batches, strict=True)]

    def check(self, outs, batches, bound=6e-3):
        for rank, (out, given) in enumerate(zip(outs, batches, strict=True)):
            if len(given[0]):
                self.assertLess(oracle.relative_error(out.float().cpu().numpy(), expected(*given)), bound, f"rank {rank}")

    def round_trip(self, exchange, batches, bound=6e-3):
        arrived = exchange.dispatch(*self.give(batches), step=MOST)
        torch.cuda.synchronize()
        exchange.throw_if_failed()
        results = []
        for local, of_rank in enumerate(arrived):
            here = in_host_memory(of_rank)
            results.append(to("torch", np.ascontiguousarray(run_experts(Of(exchange, local), here, rows_of(here)))).cuda())
        outs = exchange.combine(results)
        torch.cuda.synchronize()
        exchange.throw_if_failed()
        self.check(outs, batches, bound)
        return arrived

    def test_ways_and_layouts(self):
        for way, layout in LAYOUTS:
            for reduce in ("rank", "home") if way == "elastic" else ("rank",):
                with self.subTest(way=way, layout=layout, reduce=reduce):
                    exchange = device.DeviceExchange(options(way=way, arrived=layout, reduce=reduce), ranks=3, deadline=10)
                    for _ in range(2):
                        arrived = self.round_trip(exchange, [batch(rank) for rank in range(3)])
                    self.assertEqual({of_rank.layout for of_rank in arrived}, {layout})
                    self.assertEqual({of_rank.received is not None for of_rank in arrived}, {way == "normal"})

    def test_an_fp8_wire(self):
        exchange = device.DeviceExchange(options(wire="fp8", quantisation=heddle.Quantisation(32, "f32")), ranks=2, deadline=10)
        arrived = self.round_trip(exchange, [batch(0), batch(2)], 4e-2)
        codes, scales = arrived[0].fp8()
        self.assertEqual((codes.dtype, scales.dtype), (torch.float8_e4m3fn, torch.float32))
        self.assertTrue(codes.is_cuda and codes.data_ptr() == arrived[0].rows.data_ptr())

    def test_a_graph(self):
        """Dispatch, experts and combine of one rank, replayed with other tokens and numbers of them."""
        exchange = device.DeviceExchange(options(), deadline=10)
        hidden = torch.zeros(16, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids = torch.full((16, TOPK), -1, dtype=torch.int32, device="cuda")
        weights, out = torch.zeros(16, TOPK, device="cuda"), torch.zeros_like(hidden)
        count = torch.zeros(1, dtype=torch.int32, device="cuda")
        factors = torch.arange(1, EXPERTS + 1, device="cuda").view(-1, 1, 1)

        def call():
            arrived = exchange.dispatch(hidden, ids, weights, step=MOST, tokens=count)
            blocks = arrived.bf16().view(EXPERTS, -1, HIDDEN).float()
            weighted = factors * arrived.row_weights.view(EXPERTS, -1, 1) * blocks
            real = torch.arange(blocks.shape[1], device="cuda") < arrived.counts.view(-1, 1)
            exchange.combine(torch.where(real.unsqueeze(-1), weighted, 0).bfloat16().view(-1, HIDDEN), out)

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for rank in (0, 2, 1, 5):
            given = batch(rank)
            for place, array in zip((hidden, ids, weights), given, strict=True):
                place[: len(array)].copy_(to("torch", array))
            count.fill_(len(given[0]))
            graph.replay()
            torch.cuda.synchronize()
            exchange.throw_if_failed()
            self.check([out[: len(given[0])]], [given])

    def test_refusals(self):
        exchange = device.DeviceExchange(options(), deadline=5)
        hidden, ids, weights = (of[0] for of in self.give([batch(0)]))
        with self.assertRaisesRegex(heddle.InputError, "nothing has arrived: dispatch comes first"):
            exchange.combine(hidden)
        for act, words in (
            (lambda: exchange.dispatch(hidden, ids.long(), weights, step=MOST), "ids: expected int32 .*got int64"),
            (lambda: exchange.dispatch(hidden.repeat(2, 1), ids, weights, step=MOST), "18 tokens.* 16|ids: expected int32 \\[18, 3\\]"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                act()
            with self.assertRaises(heddle.FaultError):
                exchange.throw_if_failed()
            exchange.reset()
        arrived = exchange.dispatch(hidden, ids, weights, step=MOST)
        with self.assertRaisesRegex(heddle.InputError, r"results: expected bfloat16 \[\d+, 128\].*got shape \[1, 128\]"):
            exchange.combine(hidden[:1].contiguous())
        exchange.reset()
        self.round_trip(device.DeviceExchange(options(), ranks=2, deadline=5), [batch(0), batch(1)])
        exchange.close()
        self.assertGreaterEqual(arrived.rows.sum().item(), 0)  # its memory is there as long as this is
        with self.assertRaisesRegex(heddle.InputError, "this exchange is closed"):
            exchange.dispatch(hidden, ids, weights, step=MOST)

    def test_options(self):
        for changed, words in (({"way": "mega"}, "mega"), ({"topk": 0}, "0"), ({"arrived": "masked", "way": "gather"}, "gather")):
            with self.subTest(changed=changed), self.assertRaisesRegex(heddle.InputError, words):
                device.DeviceExchange(options(**changed))


@unittest.skipIf(torch is None, adapted.NO_TORCH)
class OnStandIn(unittest.TestCase):
    """What is Python's: framework, lifetimes, order. The engine is the host's."""

    def setUp(self):
        context = standing_in()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def test_round_trips(self):
        for way, layout in LAYOUTS:

            def main(group, way=way, layout=layout):
                exchange = device.DeviceExchange(options(way=way, arrived=layout), group=group)
                self.assertEqual((exchange.ranks, exchange.first_rank, exchange.live), (2, group.rank, [True, True]))
                given = batch(group.rank)
                for _ in range(2):
                    arrived = exchange.dispatch(*(to("torch", array) for array in given), step=MOST)
                    self.assertIsInstance(arrived.rows, torch.Tensor)
                    self.assertEqual((arrived.bf16().dtype, arrived.real), (torch.bfloat16, None))
                    here = in_host_memory(arrived)
                    out = exchange.combine(to("torch", run_experts(Of(exchange, 0), here, here.bf16())))
                return out.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

            with self.subTest(way=way, layout=layout):
                for rank, out in enumerate(heddle.run_threads(2, main)):
                    if len(out):
                        self.assertLess(oracle.relative_error(out, expected(*batch(rank))), 6e-3)

    def test_order(self):
        exchange = device.DeviceExchange(options())
        given = [to("torch", array) for array in batch(0)]
        with self.assertRaisesRegex(heddle.InputError, "nothing has arrived"):
            exchange.combine(given[0])
        with self.assertRaisesRegex(heddle.InputError, "different numbers of ranks"):
            exchange.dispatch([given[0]] * 2, given[1], given[2], step=MOST)
        self.assertEqual(exchange._core.refused, 1)
        (arrived,) = exchange.dispatch(*([one] for one in given), step=MOST)  # lists in, lists out
        (out,) = exchange.combine([torch.zeros(arrived.room, HIDDEN, dtype=torch.bfloat16)])
        self.assertEqual(out.abs().max().item(), 0)
        exchange.close()
        with self.assertRaisesRegex(heddle.InputError, "this exchange is closed"):
            exchange.reset()


if __name__ == "__main__":
    unittest.main()
