"""A decode loop of a small MoE transformer block on GPUs, captured in one CUDA graph: attention on the GPU that has the request,
experts spread over all of them. One process a GPU:

    torchrun --standalone --nproc-per-node=2 examples/python/torch_layer.py [way]

Every rank then decodes again without the graph and must write the same tokens.
"""

import os
import sys

import torch

import heddle
from heddle.device import DeviceLayer, DeviceWorkspace

REQUESTS, STEPS, VOCABULARY, HEADS, HEAD = 8, 32, 512, 8, 64  # requests: of each rank
SHAPE = heddle.LayerShape(hidden=HEADS * HEAD, intermediate=512, experts=32, topk=4)


class Block(torch.nn.Module):
    """Attention with a cache of keys and values, then the MoE layer; everything at fixed addresses, as graphs want it."""

    def __init__(self, layer):
        super().__init__()
        width = SHAPE.hidden
        torch.manual_seed(1)  # the same parameters on all ranks
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.embedding = torch.randn(VOCABULARY, width, **options)
        self.query_key_value = torch.nn.Linear(width, 3 * width, bias=False, **options)
        self.projection = torch.nn.Linear(width, width, bias=False, **options)
        self.router = torch.randn(SHAPE.experts, width, device="cuda") / width**0.5
        self.layer = layer
        self.keys, self.values = (torch.zeros(REQUESTS, STEPS, HEADS, HEAD, **options) for _ in range(2))
        self.tokens = torch.zeros(REQUESTS, dtype=torch.int64, device="cuda")
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.places = torch.arange(STEPS, device="cuda")
        self.routed = torch.empty(REQUESTS, width, **options)

    @staticmethod
    def normalise(x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:])

    def attend(self, x):
        query, key, value = self.query_key_value(self.normalise(x)).view(REQUESTS, 3, HEADS, HEAD).unbind(1)
        self.keys.index_copy_(1, self.position, key[:, None])
        self.values.index_copy_(1, self.position, value[:, None])
        scores = torch.einsum("rhd,rthd->rht", query, self.keys).float() / HEAD**0.5
        scores = scores.masked_fill(self.places > self.position, float("-inf")).softmax(-1).to(x.dtype)
        return x + self.projection(torch.einsum("rht,rthd->rhd", scores, self.values).reshape(REQUESTS, -1))

    def step(self):
        """One more token of every request."""
        x = self.attend(self.embedding[self.tokens])
        hidden = self.normalise(x)
        logits, ids = torch.topk(hidden.float() @ self.router.T, SHAPE.topk)
        self.layer.forward(hidden, ids.int(), logits.softmax(-1), self.routed, step=heddle.Step(REQUESTS))
        self.tokens.copy_((self.normalise(x + self.routed) @ self.embedding.T).argmax(-1))
        self.position += 1

    def begin(self, rank):
        self.tokens.copy_(torch.arange(REQUESTS, device="cuda") + rank * REQUESTS)
        self.position.zero_()
        self.keys.zero_()
        self.values.zero_()


def decode(block, rank, one_step):
    """[steps, requests] and milliseconds a step."""
    block.begin(rank)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    written = []
    begin.record()
    for _ in range(STEPS):
        one_step()
        written.append(block.tokens.clone())
    end.record()
    torch.cuda.synchronize()
    block.layer.throw_if_failed()
    return torch.stack(written), begin.elapsed_time(end) / STEPS


def capture(block):
    """A step as a graph. Every rank captures and replays alike: kernels of one rank wait for those of the others."""
    block.step()  # whatever is made at a first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block.step()
    return graph


def main(way):
    device = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(device)
    group = heddle.join()
    source = heddle.Source.synthetic(SHAPE, seed=1)
    options = heddle.LayerOptions(way=way, cap=REQUESTS)
    weights = source.load(group.rank, group.ranks)
    workspace = DeviceWorkspace([(weights, options)], group=group, devices=[device])
    block = Block(DeviceLayer(workspace, weights, options))
    with torch.no_grad():
        block.begin(group.rank)
        graph = capture(block)
        replayed, fast = decode(block, group.rank, graph.replay)
        called, slow = decode(block, group.rank, block.step)
    same = torch.equal(replayed, called)
    print(f"rank {group.rank} of {group.ranks}, {way}: {1e3 * fast:.0f} us a step in a graph, {1e3 * slow:.0f} us without")
    print(f"rank {group.rank}, request 0:", *replayed[:, 0].tolist(), "" if same else "(without the graph other tokens)")
    group.barrier("the end")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["low_latency"])))
