"""A decode loop of a small MoE transformer block with PyTorch: attention on the rank that has the request, experts spread over all
ranks, next tokens taken greedily. One process a rank:

    torchrun --standalone --nproc-per-node=2 examples/python/torch_layer.py [way]      # on two GPUs, or two ranks of the host engine
    python3 examples/python/torch_layer.py [way]                                       # one rank

Where there are Hopper GPUs, every rank has one and a step is one CUDA graph; decoding again without the graph must write the same
tokens. Elsewhere the same block runs on the host engine, and every rank decodes its requests again with all experts to itself: it must
write the same tokens by ways low_latency and mega, whose bits do not depend on the number of ranks.
"""

import os
import sys
import time

import torch

import heddle
from heddle.device import DeviceLayer, DeviceWorkspace, gpus_present

REQUESTS, STEPS, VOCABULARY, HEADS, HEAD = 8, 32, 512, 8, 64  # requests: of each rank
SHAPE = heddle.LayerShape(hidden=HEADS * HEAD, intermediate=512, experts=32, topk=4)


class Block(torch.nn.Module):
    """Attention with a cache of keys and values, then the MoE layer, a MoeLayer or a DeviceLayer. Every tensor that lives from step
    to step has its place from the beginning, as graphs want it."""

    def __init__(self, layer, device):
        super().__init__()
        width, kind = SHAPE.hidden, {"device": device, "dtype": torch.bfloat16}
        torch.manual_seed(1)  # the same parameters on all ranks
        self.embedding, self.head = (torch.randn(VOCABULARY, width, **kind) for _ in range(2))
        self.query_key_value = torch.nn.Linear(width, 3 * width, bias=False, **kind)
        self.projection = torch.nn.Linear(width, width, bias=False, **kind)
        self.router = torch.randn(SHAPE.experts, width, device=device) / width**0.5
        self.layer = layer
        self.keys, self.values = (torch.zeros(REQUESTS, STEPS, HEADS, HEAD, **kind) for _ in range(2))
        self.tokens = torch.zeros(REQUESTS, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(STEPS, device=device)
        self.routed = torch.empty(REQUESTS, width, **kind)

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
        self.tokens.copy_((self.normalise(x + self.routed) @ self.head.T).argmax(-1))
        self.position += 1

    def begin(self, rank):
        self.tokens.copy_(torch.arange(REQUESTS) + rank * REQUESTS)
        self.position.zero_()
        self.keys.zero_()
        self.values.zero_()


def wait_for(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(block, rank, one_step):
    """Tokens [steps, requests], and milliseconds a step."""
    device = block.tokens.device
    block.begin(rank)
    wait_for(device)
    begin, written = time.perf_counter(), []
    for _ in range(STEPS):
        one_step()
        written.append(block.tokens.clone())
    wait_for(device)
    return torch.stack(written), 1e3 * (time.perf_counter() - begin) / STEPS


def capture(block):
    """A step as a graph. Every rank captures and replays alike: kernels of one rank wait for those of the others."""
    block.step()  # whatever is made at a first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block.step()
    return graph


def on_gpus(group, source, options):
    """Twice: in a graph, and without it."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    weights = source.load(group.rank, group.ranks)
    processes = group if group.ranks > 1 else None
    workspace = DeviceWorkspace([(weights, options)], group=processes, devices=[device.index])
    layer = DeviceLayer(workspace, weights, options)
    block = Block(layer, device)
    block.begin(group.rank)
    graph = capture(block)
    decoded = {"in a graph": decode(block, group.rank, graph.replay), "without": decode(block, group.rank, block.step)}
    layer.throw_if_failed()
    return decoded


def on_host(group, source, options):
    """Twice: experts spread over the ranks, and all of them here."""
    cpu = torch.device("cpu")
    decoded = {}
    for name, members in {f"{group.ranks} ranks": group, "alone": heddle.thread_group(1)[0]}.items():
        layer = heddle.MoeLayer.create(members, source, options)
        block = Block(layer, cpu)
        decoded[name] = decode(block, group.rank, block.step)
        layer.workspace.close()
    return decoded


def main(way):
    group = heddle.join() if "RANK" in os.environ else heddle.thread_group(1)[0]
    source = heddle.Source.synthetic(SHAPE, seed=1)
    options = heddle.LayerOptions(way=way, cap=REQUESTS)
    has_gpus = gpus_present() > 0 and torch.cuda.is_available()
    with torch.no_grad():
        decoded = (on_gpus if has_gpus else on_host)(group, source, options)
    (tokens, _), (again, _) = decoded.values()
    same = torch.equal(tokens, again)
    times = ", ".join(f"{milliseconds:.3f} ms a step {name}" for name, (_, milliseconds) in decoded.items())
    print(f"rank {group.rank} of {group.ranks}, {'GPUs' if has_gpus else 'host engine'}, {way}: {times}")
    print(f"rank {group.rank}, request 0:", *tokens[:, 0].tolist(), "" if same else "(the second time others)")
    group.barrier("the end")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["low_latency"])))
