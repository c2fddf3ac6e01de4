"""A decode loop of a small MoE transformer block with NumPy: attention on the rank that has the request, experts spread over four
ranks (threads of this program), next tokens taken greedily.

    python3 examples/python/numpy_layer.py [low_latency|mega]

One rank with all requests and all experts must write the same tokens: these ways sum a token's results at home, in an order that the
number of ranks does not change. (The others round partial sums of every rank, so that a token may differ.)
"""

import sys
import time

import ml_dtypes
import numpy as np

import heddle

RANKS, REQUESTS, STEPS = 4, 10, 12  # requests: of all ranks together, unevenly spread
VOCABULARY, HEADS, HEAD = 200, 4, 32
SHAPE = heddle.LayerShape(hidden=HEADS * HEAD, intermediate=128, experts=16, topk=4)
BFLOAT16 = ml_dtypes.bfloat16


def draw(random, *shape):
    return (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


class Block:
    """The parameters, the same on all ranks. Products are made a token at a time, so that a token's bits depend on nothing else."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        width = SHAPE.hidden
        self.embedding = 4 * draw(random, VOCABULARY, width)
        self.query_key_value = draw(random, 3 * width, width)
        self.projection = draw(random, width, width)
        self.router = draw(random, SHAPE.experts, width)
        experts = [2 * draw(random, SHAPE.experts, *sizes) for sizes in ((128, width), (128, width), (width, 128))]
        gate, up, down = (weights.astype(BFLOAT16) for weights in experts)
        self.source = heddle.Source.of_arrays(gate, up, down, topk=SHAPE.topk)

    def attend(self, x, cache):
        """One token of one request, with the keys and values of those before it."""
        query, key, value = (self.query_key_value @ normalise(x)).reshape(3, HEADS, HEAD)
        cache.append((key, value))
        keys, values = (np.stack(of) for of in zip(*cache, strict=True))  # [tokens, heads, HEAD]
        scores = np.exp(np.einsum("hd,thd->ht", query, keys) / np.sqrt(HEAD))
        mixed = np.einsum("ht,thd->hd", scores / scores.sum(axis=1, keepdims=True), values)
        return x + self.projection @ mixed.reshape(-1)

    def choose(self, x):
        """The k best experts of a token and their softmax weights."""
        logits = self.router @ x
        best = np.argsort(-logits, kind="stable")[: SHAPE.topk].astype(np.int32)
        weights = np.exp(logits[best] - logits[best[0]])
        return best, (weights / weights.sum()).astype(np.float32)


def normalise(x):
    return x / np.sqrt(np.mean(x * x) + 1e-6)


class Decoder:
    """The requests of one rank."""

    def __init__(self, block, layer, first_tokens):
        self.block, self.layer = block, layer
        self.tokens = [[token] for token in first_tokens]
        self.caches = [[] for _ in first_tokens]
        # Made once and used by every step: what goes into the layer, and what comes out.
        count = len(first_tokens)
        self.hidden, self.out = (np.empty((count, SHAPE.hidden), BFLOAT16) for _ in range(2))
        self.ids, self.weights = np.empty((count, SHAPE.topk), np.int32), np.empty((count, SHAPE.topk), np.float32)

    def step(self, most_requests):
        """One more token of every request. A rank without requests calls the layer, too."""
        block = self.block
        states = [block.attend(block.embedding[tokens[-1]], cache) for tokens, cache in zip(self.tokens, self.caches, strict=True)]
        for row, state in enumerate(states):
            self.hidden[row] = normalise(state)
            self.ids[row], self.weights[row] = block.choose(self.hidden[row].astype(np.float32))
        self.layer.forward(self.hidden, self.ids, self.weights, self.out, step=heddle.Step(most_requests))
        for tokens, state, experts in zip(self.tokens, states, self.out, strict=True):
            tokens.append(int(np.argmax(block.embedding @ normalise(state + experts.astype(np.float32)))))


def decode(block, ranks, way):
    """All requests' tokens, decoded by so many ranks."""
    first = np.random.default_rng(2).integers(VOCABULARY, size=REQUESTS).tolist()
    shares = [first[REQUESTS * rank // ranks : REQUESTS * (rank + 1) // ranks] for rank in range(ranks)]
    most = max(len(share) for share in shares)
    options = heddle.LayerOptions(way=way, cap=most)

    def rank_main(group):
        layer = heddle.MoeLayer.create(group, block.source, options)
        decoder = Decoder(block, layer, shares[group.rank])
        for _ in range(STEPS):
            decoder.step(most)
        layer.workspace.close()
        return decoder.tokens

    begin = time.perf_counter()
    tokens = [of_request for of_rank in heddle.run_threads(ranks, rank_main) for of_request in of_rank]
    print(f"{ranks} ranks, {way}: {1e3 * (time.perf_counter() - begin) / STEPS:.1f} ms a step of {REQUESTS} requests")
    return tokens


def main(way):
    block = Block(seed=1)
    spread, alone = decode(block, RANKS, way), decode(block, 1, way)
    print("request 0:", *spread[0])
    different = sum(a != b for a, b in zip(spread, alone, strict=True))
    print(f"{different} of {REQUESTS} requests differ from those of one rank")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["low_latency"])))
