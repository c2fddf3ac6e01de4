"""What the adapters' tests share: a small layer with its experts in NumPy, batches, and outputs to compare with."""

import support

import heddle
import ml_dtypes
import numpy as np
import oracle

try:
    import torch
except ImportError:
    torch = None

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 128, 64, 8, 3
NO_TORCH = "torch is not here"
BOUND = 1e-2


def kinds(test):
    """The kinds of arrays that the adapters take, one after the other; without torch the test is said, once, to be skipped for its
    tensors."""
    yield "numpy"
    if torch is not None:
        yield "torch"
    elif not getattr(test, "told_of_torch", False):
        test.told_of_torch = True
        with test.subTest(kind="torch"):
            test.skipTest(NO_TORCH)


class Layer:
    """One layer's weights, bfloat16, as the library and as NumPy have them."""

    def __init__(self, number):
        random = np.random.default_rng([support.SEED, number])
        sizes = ((EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
        self.gate, self.up, self.down = (random.normal(0, 0.1, size).astype(ml_dtypes.bfloat16) for size in sizes)
        self.source = heddle.Source.of_arrays(self.gate, self.up, self.down, topk=TOPK)

    def expert(self, expert, rows):
        """float32 [rows, H] through one expert."""
        gate, up, down = (np.asarray(weights[expert], np.float32) for weights in (self.gate, self.up, self.down))
        gated = rows @ gate.T
        return (gated / (1 + np.exp(-gated)) * (rows @ up.T)) @ down.T

    def expected(self, batch):
        options = heddle.LayerOptions(cap=max(1, len(batch.hidden)), activation="bf16")
        return heddle.reference(self.source, batch.hidden, batch.ids, batch.weights, options)


class Batch:
    """One rank's tokens of a step."""

    def __init__(self, rank, tokens, step=0):
        random = np.random.default_rng([support.SEED, rank, tokens, step])
        self.hidden = random.normal(size=(tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
        self.ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
        self.ids[::3, 1] = -1
        self.ids[4::5] = -1  # no expert at all
        self.weights = random.uniform(0.1, 1, (tokens, TOPK)).astype(np.float32)

    def given(self, kind):
        """hidden, choices int64 and weights as NumPy's or torch's."""
        return tuple(to(kind, array) for array in (self.hidden, self.ids.astype(np.int64), self.weights))


def to(kind, array):
    """As NumPy's, torch's, or torch's on a GPU ("cuda")."""
    if kind == "numpy":
        return array
    if kind == "cuda":
        return to("torch", np.ascontiguousarray(array)).cuda()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def back(array):
    """A result as a NumPy array."""
    if isinstance(array, np.ndarray):
        return array
    array = array.cpu()
    names = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16), torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn)}
    alias, kind = names.get(array.dtype, (None, None))
    return array.numpy() if alias is None else array.view(alias).numpy().view(kind)


def tokens_of(rank, ranks, base):
    """Uneven; of several ranks the second has none."""
    return 0 if ranks > 1 and rank == 1 else base + rank


def first_expert(rank, ranks):
    return rank * EXPERTS // ranks


def routed_sums(layer, first, rows, local_ids, weights):
    """Rows once a rank: the weighted sum of this rank's experts, bfloat16."""
    rows, sums = rows.astype(np.float32), np.zeros(rows.shape, np.float32)
    for token, choice in np.argwhere(local_ids >= 0):
        expert = first + local_ids[token, choice]
        sums[token] += weights[token, choice] * layer.expert(expert, rows[token : token + 1])[0]
    return sums.astype(ml_dtypes.bfloat16)


def check(test, layer, batch, out):
    out = back(out)
    test.assertEqual((out.dtype.name, out.shape), ("bfloat16", batch.hidden.shape))
    if len(out):
        test.assertLess(oracle.relative_error(out, np.asarray(layer.expected(batch), np.float64)), BOUND)
