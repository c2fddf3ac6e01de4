"""What a call through Python takes beyond the call of the library, on the host engine.

The smallest layer there is, alone on its rank and without tokens or with a few, is called through Python; the module then makes the
same calls in a loop of its own, without Python in between. The difference of the two is what Python costs: taking the arrays, the
checks, and letting the interpreter go and taking it back. With NumPy's arrays, and with torch's tensors where torch is.

    PYTHONPATH=build/python python3 bench/python_overhead.py
"""

import time

import ml_dtypes
import numpy as np

import heddle

try:
    import torch

    import heddle.torch
except ImportError:
    torch = None

SHAPE = heddle.LayerShape(hidden=64, intermediate=64, experts=1, topk=1)
TOKENS, CALLS, ROUNDS = (0, 1, 16), 500, 60


def microseconds(call):
    """A call, of many."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) * 1e6 / CALLS


def batch(tokens):
    return np.ones((tokens, 64), ml_dtypes.bfloat16), np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)


def tensors(tokens):
    hidden, ids, weights = batch(tokens)
    return torch.from_numpy(hidden.view(np.uint16)).view(torch.bfloat16), torch.from_numpy(ids), torch.from_numpy(weights)


def measure(layer, arrays, out, forms):
    """Of the library alone, and of each form of a call beyond it: the least of all rounds, which take turns."""
    step = heddle.Step(len(out))

    def alone():
        begin = time.perf_counter()
        layer._core.repeat(*arrays, out, step, CALLS)
        return (time.perf_counter() - begin) * 1e6 / CALLS

    rounds = [(alone(), *(microseconds(lambda form=form: form(*arrays, out, step)) for form in forms)) for _ in range(ROUNDS)]
    library, *others = (min(of) for of in zip(*rounds, strict=True))
    return library, *(other - library for other in others)


def table(name, layer, make, empty_like, forms):
    print(f"\n{name}, {CALLS} calls, least of {ROUNDS} rounds, us\ntokens  the library  " + "  ".join(f"+ {form}" for form in forms))
    for tokens in TOKENS:
        arrays = make(tokens)
        library, *beyond = measure(layer, arrays, empty_like(arrays[0]), forms.values())
        print(f"{tokens:6} {library:12.2f}  " + "  ".join(f"{more:{len(form) + 2}.2f}" for form, more in zip(forms, beyond, strict=True)))


def main():
    group = heddle.thread_group(1)[0]
    layer = heddle.MoeLayer.create(group, heddle.Source.synthetic(SHAPE), heddle.LayerOptions(way="gather", cap=max(TOKENS)))
    forms = {
        "forward, out given": lambda hidden, ids, weights, out, step: layer.forward(hidden, ids, weights, out, step=step),
        "forward, new out": lambda hidden, ids, weights, _, step: layer.forward(hidden, ids, weights, step=step),
    }
    table(f"NumPy {np.__version__}", layer, batch, np.empty_like, forms)
    if torch is None:
        print("\ntorch is not here: its tensors are left out")
        return
    module = heddle.torch.MoeModule(layer)
    forms["MoeModule"] = lambda hidden, ids, weights, _, step: module(hidden, ids, weights, step)
    with torch.no_grad():
        table(f"torch {torch.__version__}", layer, tensors, torch.empty_like, forms)


if __name__ == "__main__":
    main()
