"""What a call through Python takes beyond the call of the library, on the host engine.

The smallest layer there is, alone on its rank and without tokens or with one, is called through Python; the module then makes the
same calls in a loop of its own, without Python in between. The difference of the two is what Python costs: taking the arrays, the
checks, and letting the interpreter go and taking it back.

    PYTHONPATH=build/python python3 bench/python_overhead.py
"""

import time

import ml_dtypes
import numpy as np

import heddle

SHAPE = heddle.LayerShape(hidden=64, intermediate=64, experts=1, topk=1)
CALLS, ROUNDS = 500, 60


def microseconds(calls):
    begin = time.perf_counter()
    calls()
    return (time.perf_counter() - begin) * 1e6 / CALLS


def batch(tokens):
    return np.ones((tokens, 64), ml_dtypes.bfloat16), np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)


def main():
    group = heddle.thread_group(1)[0]
    layer = heddle.MoeLayer.create(group, heddle.Source.synthetic(SHAPE), heddle.LayerOptions(way="gather", cap=16))
    core = layer._core
    print(f"NumPy {np.__version__}, {CALLS} calls, least of {ROUNDS} rounds")
    print("tokens   library    forward(.., out=)   forward(..)   beyond the library, us")
    for tokens in (0, 1, 16):
        arrays, step = batch(tokens), heddle.Step(tokens)
        out = np.empty_like(arrays[0])

        def through_python(arrays=arrays, step=step, out=out):
            for _ in range(CALLS):
                layer.forward(*arrays, out=out, step=step)

        def with_new_outputs(arrays=arrays, step=step):
            for _ in range(CALLS):
                layer.forward(*arrays, step=step)

        def alone(arrays=arrays, step=step, out=out):
            core.repeat(*arrays, out, step, CALLS)

        rounds = [(microseconds(alone), microseconds(through_python), microseconds(with_new_outputs)) for _ in range(ROUNDS)]
        library, given, new = (min(of) for of in zip(*rounds, strict=True))
        print(f"{tokens:6} {library:9.2f} {given:20.2f} {new:13.2f} {given - library:12.2f} {new - library:9.2f}")


if __name__ == "__main__":
    main()
