"""The router of docs/numerics.md in float64, and how clearly it decided."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Router:
    """weight [E, H] (bf16 values); bias [E] or None; score: softmax, sigmoid, sqrtsoftplus or softmax_topk (over the k chosen)."""

    weight: np.ndarray
    bias: np.ndarray = None
    topk: int = 2
    score: str = "softmax"
    renormalise: bool = True
    route_scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    weight_dtype: str = "bfloat16"


@dataclass
class Decision:
    """ids int [T, k] (descending selection value); clear bool [T]: no rounding of the logits to f32 could choose otherwise."""

    ids: np.ndarray
    clear: np.ndarray


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def scores(router, logits):
    if router.score == "softmax":
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        return shifted / shifted.sum(axis=1, keepdims=True)
    if router.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    if router.score == "sqrtsoftplus":
        return np.sqrt(softplus(logits))
    if router.score == "softmax_topk":
        return logits
    raise ValueError(f"no such score: {router.score}")


def logits_of(router, hidden):
    return hidden.astype(np.float64) @ router.weight.astype(np.float64).T


def best(values, count):
    """The `count` largest of each row, ties to the lower index, NaN lowest; and the gap to the next one (infinite if none)."""
    ranked = np.where(np.isnan(values), -np.inf, values)
    order = np.argsort(-ranked, axis=1, kind="stable")
    taken = order[:, :count]
    if count >= values.shape[1]:
        return taken, np.full(len(values), np.inf)
    last = np.take_along_axis(ranked, order[:, count - 1 : count], 1)
    following = np.take_along_axis(ranked, order[:, count : count + 1], 1)
    with np.errstate(invalid="ignore"):
        gap = (last - following)[:, 0]
    return taken, np.where(np.isnan(gap), 0.0, gap)


def choose(router, hidden, margin=1e-4):
    """The k experts of each token. A decision whose gap is below `margin` times the values at stake is not clear."""
    selection = scores(router, logits_of(router, hidden))
    if router.bias is not None:
        selection = selection + router.bias.astype(np.float64)
    clear = np.ones(len(selection), bool)
    if router.groups > 1:
        by_group = selection.reshape(len(selection), router.groups, -1)
        group_values = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
        groups, gap = best(group_values, router.topk_groups)
        clear &= gap > margin * np.abs(group_values).max(axis=1)
        allowed = np.zeros((len(selection), router.groups), bool)
        np.put_along_axis(allowed, groups, True, 1)
        selection = np.where(np.repeat(allowed, by_group.shape[2], axis=1), selection, -np.inf)
    ids, gap = best(selection, router.topk)
    finite = np.where(np.isinf(selection), 0, np.abs(selection))
    return Decision(ids, clear & (gap > margin * finite.max(axis=1)))


def weights_of(router, hidden, ids):
    """The routing weights [T, k] of the experts chosen, whoever chose them."""
    chosen = np.take_along_axis(scores(router, logits_of(router, hidden)), ids, 1)
    if router.score == "softmax_topk":
        shifted = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        chosen = shifted / shifted.sum(axis=1, keepdims=True)
    elif router.renormalise:
        chosen = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20)
    return chosen * router.route_scale
