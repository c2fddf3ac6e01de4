"""One of two processes of test_processes.py, as torchrun starts them: layers of every way, in graphs too, exchanges alone, DeepEP's
buffer and vLLM's pairs, DeepGEMM's mega MoE, and a call that is refused, over tensors of this process's GPU or on the host engine, each
compared with the float64 reference.

    layer_process.py host|cuda environment|gloo|nccl [the GPUs that there are]

With the group of the environment a process sees its own GPU alone, with one of torch.distributed all of them."""

import os
import sys
import unittest

import support
from adapted import to
from adapter_calls import CALLS
from support import WAYS
from test_exchange import LAYOUTS as ALL_LAYOUTS

import heddle
import numpy as np
import oracle
import torch
from heddle import device
from heddle.adapters import deepgemm

SHAPE = heddle.LayerShape(hidden=256, intermediate=128, experts=6, topk=2)
CAP = 8
BOUND = 4e-3  # bf16 weights
LAYOUTS = dict(ALL_LAYOUTS)


def see_only(gpu):
    """Before this process's first CUDA call."""
    seen = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[gpu] if seen else str(gpu)


def tokens_of(rank, round):
    """Uneven, and in the second round none of rank 0."""
    return (6, 3, 8)[(rank + round) % 3] if (rank, round) != (0, 1) else 0


class Batch:
    """One rank's tokens of a round, in host memory; the reference's outputs."""

    def __init__(self, rank, round):
        random = np.random.default_rng([support.SEED, rank, round])
        tokens = tokens_of(rank, round)
        self.hidden = torch.tensor(random.normal(size=(tokens, SHAPE.hidden))).to(torch.bfloat16)
        self.ids = torch.tensor(np.argsort(random.random((tokens, SHAPE.experts)), axis=1)[:, : SHAPE.topk].astype(np.int32))
        self.ids[::3, 1] = -1
        self.weights = torch.tensor(random.random((tokens, SHAPE.topk)).astype(np.float32))

    def to(self, where):
        return [array.to(where) for array in (self.hidden, self.ids, self.weights)]

    def check(self, out, source, options, ranks, what):
        wanted = heddle.reference(source, self.hidden, self.ids, self.weights, options, ranks=ranks)
        assert out.shape == wanted.shape, what
        error = oracle.relative_error(out.float().cpu().numpy(), wanted.float().numpy()) if len(wanted) else 0
        assert error < BOUND, f"{what}: relative error {error:.2e}, seed {support.SEED}"


def most_of(group, round):
    return heddle.Step(max(tokens_of(rank, round) for rank in range(group.ranks)))


class Process:
    """What the checks share: the group, where tensors lie, and the layer's weights."""

    def __init__(self, group, where):
        self.group, self.where = group, where
        self.source = heddle.Source.synthetic(SHAPE, shared_kind="bf16", seed=support.SEED)
        self.is_on_gpu = where.type == "cuda"

    def layer(self, options):
        if not self.is_on_gpu:
            return heddle.MoeLayer.create(self.group, self.source, options)
        weights = self.source.load(self.group.rank, self.group.ranks)
        workspace = device.DeviceWorkspace([(weights, options)], group=self.group, devices=[self.where.index], deadline=60)
        assert (workspace.ranks, workspace.first_rank(), workspace.gpus) == (self.group.ranks, self.group.rank, 1)
        return device.DeviceLayer(workspace, weights, options)

    def done(self, called):
        if self.is_on_gpu:
            torch.cuda.synchronize()
            called.throw_if_failed()

    def check_ways(self):
        for way in WAYS:
            options = heddle.LayerOptions(way=way, cap=CAP)
            layer = self.layer(options)
            for round in range(3):
                batch = Batch(self.group.rank, round)
                out = layer.forward(*batch.to(self.where), step=most_of(self.group, round))
                self.done(layer)
                batch.check(out, self.source, options, self.group.ranks, f"way {way}, round {round}")
            self.group.barrier(f"the end of way {way}")

    def check_graphs(self):
        """Captured once, replayed with other tokens and other numbers of them."""
        for way in ("low_latency", "one_sided", "mega"):
            options = heddle.LayerOptions(way=way, cap=CAP)
            layer = self.layer(options)
            hidden, out = (torch.zeros(CAP, SHAPE.hidden, dtype=torch.bfloat16, device=self.where) for _ in range(2))
            ids = torch.full((CAP, SHAPE.topk), -1, dtype=torch.int32, device=self.where)
            weights = torch.zeros(CAP, SHAPE.topk, device=self.where)
            count = torch.zeros(1, dtype=torch.int32, device=self.where)
            given = {"step": heddle.Step(CAP), "tokens": count}
            layer.forward(hidden, ids, weights, out, **given)
            self.done(layer)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer.forward(hidden, ids, weights, out, **given)
            for round in range(4):
                batch = Batch(self.group.rank, round)
                tokens = len(batch.hidden)
                for place, array in zip((hidden, ids, weights), batch.to(self.where), strict=True):
                    place[:tokens].copy_(array)
                count.fill_(tokens)
                graph.replay()
                self.done(layer)
                batch.check(out[:tokens], self.source, options, self.group.ranks, f"way {way}, replay {round}")
            self.group.barrier(f"the end of graphs of way {way}")

    def check_mega_moe(self):
        """DeepGEMM's call: this rank's weights, tokens written into the buffer."""
        experts, ranks, rank = 2 * self.group.ranks, self.group.ranks, self.group.rank
        torch.manual_seed(support.SEED)
        w1, w2 = ((0.1 * torch.randn(experts, rows, 128)).bfloat16() for rows in (256, 128))
        here = slice(2 * rank, 2 * rank + 2)
        sizes = (experts, CAP, SHAPE.topk, 128, 128)
        buffer = deepgemm.SymmBuffer(self.group, *sizes, mma_type="bf16xbf16", like=torch.empty(0, device=self.where))
        weights = deepgemm.transform_weights_for_mega_moe(w1[here], w2[here])
        x = torch.randn(ranks, CAP, 128).bfloat16()[rank]
        ids = torch.argsort(torch.rand(ranks, CAP, experts))[rank, :, : SHAPE.topk]
        buffer.x.copy_(x)
        buffer.topk_idx.copy_(ids)
        buffer.topk_weights.fill_(0.5)
        y = torch.empty(CAP, 128, dtype=torch.bfloat16, device=self.where)
        deepgemm.bf16_mega_moe(y, *weights, buffer)
        if self.is_on_gpu:
            torch.cuda.synchronize()
        source = heddle.Source.of_fused_arrays(w1, w2, topk=SHAPE.topk)
        options = heddle.LayerOptions(cap=CAP, way="mega")
        wanted = heddle.reference(source, x, ids.int(), torch.full(ids.shape, 0.5), options).float()
        assert (y.float().cpu() - wanted).norm() <= BOUND * wanted.norm(), f"mega MoE, seed {support.SEED}"
        self.group.barrier("the end of mega MoE")

    def check_exchanges(self):
        """Every token to expert e comes home times e + 1, and times its weight."""
        for way in ("low_latency", "normal", "elastic", "one_sided", "gather"):
            options = heddle.ExchangeOptions(hidden=SHAPE.hidden, experts=SHAPE.experts, topk=1, cap=CAP, way=way, arrived=LAYOUTS[way])
            if self.is_on_gpu:
                exchange = device.DeviceExchange(options, group=self.group, device=self.where.index, deadline=60)
            else:
                exchange = heddle.Exchange(self.group, options)
            for round in range(2):
                batch = Batch(self.group.rank, round)
                hidden, ids, weights = (array[:, :1].contiguous() if array.shape[1] == 2 else array for array in batch.to(self.where))
                arrived = exchange.dispatch(hidden, ids, weights, step=most_of(self.group, round))
                rows, begin = self.tensor(arrived.bf16()).float(), exchange.experts[0]
                if arrived.layout == "routed":
                    local, factors = self.tensor(arrived.local_ids)[:, 0], self.tensor(arrived.weights)[:, 0]
                    factors = torch.where(local >= 0, factors * (local + begin + 1), 0)
                else:
                    factors = torch.zeros(arrived.room, device=self.where)
                    begins, counts = (self.tensor(array).tolist() for array in (arrived.begins, arrived.counts))
                    for number, (first, count) in enumerate(zip(begins, counts, strict=True)):
                        mine = slice(first, first + count)
                        factors[mine] = self.tensor(arrived.row_weights)[mine] * (begin + number + 1)
                results = torch.where(factors[:, None] != 0, rows * factors[:, None], 0).bfloat16()
                out = exchange.combine(results)
                self.done(exchange)
                wanted = torch.where(ids >= 0, hidden.float() * weights * (ids + 1), 0)
                error = (out.float() - wanted).norm() / wanted.norm() if len(wanted) else 0
                assert error < 6e-3, f"way {way}, round {round}: relative error {error:.2e}, seed {support.SEED}"
            self.group.barrier(f"the end of the exchange of way {way}")

    def tensor(self, array):
        return array if self.is_on_gpu else to("torch", np.array(array))

    def check_adapters(self):
        for call in CALLS:
            call(unittest.TestCase(), self.group, "cuda" if self.is_on_gpu else "torch")
            self.group.barrier(f"the end of {call.__name__}")

    def check_a_refusal(self):
        """Of rank 1's tensors: rank 0 hears of it, and after a reset the next call works."""
        options = heddle.LayerOptions(cap=CAP)
        layer, batch = self.layer(options), Batch(self.group.rank, 0)
        hidden, ids, weights = batch.to(self.where)
        expected = heddle.InputError if self.group.rank == 1 else heddle.FaultError
        try:
            layer.forward(hidden, ids.long() if self.group.rank == 1 else ids, weights, step=most_of(self.group, 0))
            self.done(layer)
        except expected as error:
            assert self.group.rank == 1 or 1 in (error.rank, error.peer), f"{error}"
        else:
            raise AssertionError(f"no {expected.__name__}")
        layer.workspace.reset()
        out = layer.forward(hidden, ids, weights, step=most_of(self.group, 0))
        self.done(layer)
        batch.check(out, self.source, options, self.group.ranks, "behind a reset")
        self.group.barrier("the end of a refusal")


def main(engine, bootstrap, gpus="0"):
    local, is_blind = int(os.environ["LOCAL_RANK"]), bootstrap == "environment"
    where = torch.device("cpu")
    if engine == "cuda":
        gpu = local % int(gpus)
        if is_blind:
            see_only(gpu)
        where = torch.device("cuda", 0 if is_blind else gpu)
        torch.cuda.set_device(where)
        assert torch.cuda.device_count() == (1 if is_blind else int(gpus))
    if not is_blind:
        torch.distributed.init_process_group(bootstrap)
    process = Process(heddle.join(process_group=None if is_blind else True, deadline=60), where)
    process.check_ways()
    if process.is_on_gpu:
        process.check_graphs()
    process.check_exchanges()
    process.check_adapters()
    process.check_mega_moe()
    process.check_a_refusal()
    if not is_blind:
        torch.distributed.destroy_process_group()
    print(f"rank {process.group.rank} of {process.group.ranks}: all checks passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
