"""DeepEP's buffers, vLLM's prepare and finalize and SGLang's dispatcher with tensors of a GPU: one rank on one GPU, in a graph too; and, to see what is
done with tensors there, with the host engine standing in for the exchange. Two processes are test_processes.py's."""

import unittest

import adapted
from adapted import EXPERTS, HIDDEN, Batch, Layer, back, check, to
from adapter_calls import CALLS, MOST, rows_quantised_before_they_travel
from stand_in import standing_in
from test_device import why_not
from test_sglang import topk_output

import heddle
from heddle import device
from heddle.adapters import sglang
from heddle.adapters.deepep import Buffer

torch = adapted.torch


@unittest.skipIf(torch is None, adapted.NO_TORCH)
class OnStandIn(unittest.TestCase):
    def test_calls(self):
        for call in CALLS:
            for ranks in (1, 2):
                with self.subTest(call=call.__name__, ranks=ranks), standing_in() as made:
                    heddle.run_threads(ranks, lambda group, call=call: call(self, group, "torch"), deadline=20)
                    self.assertEqual(len(made) > 0, call is not rows_quantised_before_they_travel)


@unittest.skipIf(why_not(), why_not())
class OnGpu(unittest.TestCase):
    def test_calls(self):
        for call in CALLS:
            with self.subTest(call=call.__name__):
                call(self, heddle.thread_group(1, deadline=10)[0], "cuda")
                torch.cuda.synchronize()

    def test_a_decode_step_in_a_graph(self):
        """Dispatch, one expert's product for all, and combine, replayed with other tokens."""
        buffer, layer = Buffer(heddle.thread_group(1, deadline=10)[0]), Layer(0)
        hidden, ids, weights = (array.clone() for array in Batch(0, 5).given("cuda"))
        out = torch.zeros_like(hidden)
        gate, up, down = (to("cuda", of).float() for of in (layer.gate, layer.up, layer.down))

        def step():
            rows, _, handle, *_ = buffer.low_latency_dispatch(hidden, ids, MOST, EXPERTS, use_fp8=False)
            wide = torch.nan_to_num(rows.float())  # rows of nobody may be anything
            active = torch.nn.functional.silu(wide @ gate.transpose(1, 2)) * (wide @ up.transpose(1, 2))
            buffer.low_latency_combine((active @ down.transpose(1, 2)).bfloat16(), ids, weights, handle, out=out)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(3):
            batch = Batch(0, 5, number)
            for place, array in zip((hidden, ids, weights), batch.given("cuda"), strict=True):
                place.copy_(array)
            graph.replay()
            torch.cuda.synchronize()
            check(self, layer, batch, out)

    def test_sglangs_fused_function(self):
        layer, dispatcher = Layer(0), sglang.StandardDispatcher()
        options = heddle.LayerOptions(cap=MOST, way="mega", activation="bf16")
        weights = layer.source.load(0, 1)
        device_layer = device.DeviceLayer(device.DeviceWorkspace([(weights, options)], deadline=10), weights, options)
        for tokens in (9, 3):
            batch = Batch(0, tokens)
            taken = dispatcher.dispatch(to("cuda", batch.hidden), topk_output("cuda", batch))
            out = dispatcher.combine(sglang.fused_experts(taken, sglang.HeddleMoeQuantInfo(device_layer)))
            torch.cuda.synchronize()
            device_layer.throw_if_failed()
            check(self, layer, batch, out)

    def test_refusals(self):
        buffer, batch = Buffer(heddle.thread_group(1)[0]), Batch(0, 4)
        hidden, ids, weights = batch.given("cuda")
        for act, words in (
            (lambda: buffer.low_latency_dispatch(hidden, ids.cpu(), MOST, EXPERTS), "topk_idx: expected a tensor of cuda:0, got cpu"),
            (lambda: buffer.low_latency_dispatch(hidden.float(), ids, MOST, EXPERTS), "x: expected bfloat16 \\[tokens, hidden\\]"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(heddle.InputError, words):
                act()
        rows, _, handle, *_ = buffer.low_latency_dispatch(hidden, ids, MOST, EXPERTS, use_fp8=False)
        with self.assertRaisesRegex(heddle.InputError, r"x: expected bfloat16 \[8, 16, 128\]"):
            buffer.low_latency_combine(rows[:, :1], ids, weights, handle)
        out, *_ = buffer.low_latency_combine(rows, ids, weights, handle)
        torch.cuda.synchronize()
        buffer.throw_if_failed()
        self.assertEqual(back(out).shape, (4, HIDDEN))

    def test_a_bad_id_and_a_reset(self):
        buffer, batch = Buffer(heddle.thread_group(1, deadline=5)[0]), Batch(0, 4)
        hidden, ids, weights = batch.given("cuda")
        bad = ids.clone()
        bad[1, 0] = EXPERTS
        buffer.low_latency_dispatch(hidden, bad, MOST, EXPERTS)
        torch.cuda.synchronize()
        with self.assertRaises(heddle.FaultError):
            buffer.throw_if_failed()
        buffer.reset()
        rows, _, handle, *_ = buffer.low_latency_dispatch(hidden, ids, MOST, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle)
        torch.cuda.synchronize()
        buffer.throw_if_failed()


if __name__ == "__main__":
    unittest.main()
