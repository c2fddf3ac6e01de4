"""Router scores and top-k by hand."""

import one_thread  # noqa: F401, first: before NumPy

import unittest

import numpy as np

import router
from router import Router


def of_logits(logits, **fields):
    """A router whose logits are the rows given: the hidden state selects the row."""
    logits = np.atleast_2d(np.asarray(logits, np.float64))
    return Router(weight=logits.T, **fields), np.eye(len(logits))


class Scores(unittest.TestCase):
    def test_softmax(self):
        rule, hidden = of_logits(np.log([[1, 2, 4, 1]]), score="softmax", renormalise=False)
        ids = router.choose(rule, hidden).ids
        self.assertEqual(ids.tolist(), [[2, 1]])
        np.testing.assert_allclose(router.weights_of(rule, hidden, ids), [[0.5, 0.25]])
        rule.renormalise, rule.route_scale = True, 3.0
        np.testing.assert_allclose(router.weights_of(rule, hidden, ids), [[2.0, 1.0]])

    def test_softmax_over_the_chosen(self):
        rule, hidden = of_logits(np.log([[1, 2, 6, 1]]), score="softmax_topk")
        np.testing.assert_allclose(router.weights_of(rule, hidden, router.choose(rule, hidden).ids), [[0.75, 0.25]])

    def test_sigmoid_bias_selects_only(self):
        bias = np.array([0, 0, 0.9, 0])
        rule, hidden = of_logits([[2.0, 0.0, -1.0, 1.0]], score="sigmoid", bias=bias)
        ids = router.choose(rule, hidden).ids
        self.assertEqual(ids.tolist(), [[2, 0]])
        expected = 1 / (1 + np.exp([1.0, -2.0]))
        np.testing.assert_allclose(router.weights_of(rule, hidden, ids), [expected / expected.sum()])

    def test_groups_keep_the_best_by_the_sum_of_their_two_best(self):
        logits = [[5.0, -9, 2, 1, 3, -9]]  # groups of two: the first holds the best expert, the second the best pair
        rule, hidden = of_logits(logits, score="sigmoid", groups=3, topk_groups=1)
        self.assertEqual(router.choose(rule, hidden).ids.tolist(), [[2, 3]])
        rule.topk_groups = 2
        self.assertEqual(router.choose(rule, hidden).ids.tolist(), [[0, 2]])

    def test_sqrtsoftplus(self):
        rule, hidden = of_logits([[0.0, 25.0, -3.0]], score="sqrtsoftplus", renormalise=False, topk=3)
        ids = router.choose(rule, hidden).ids
        self.assertEqual(ids.tolist(), [[1, 0, 2]])
        np.testing.assert_allclose(
            router.weights_of(rule, hidden, ids), [[5.0, np.sqrt(np.log(2)), np.sqrt(np.log1p(np.exp(-3.0)))]]
        )

    def test_ties_go_to_the_lower_id_and_are_not_clear(self):
        rule, hidden = of_logits([[1.0, 2.0, 2.0, 2.0], [1.0, 2.0, 3.0, 0.0]])
        decision = router.choose(rule, hidden)
        self.assertEqual(decision.ids.tolist(), [[1, 2], [2, 1]])
        self.assertEqual(decision.clear.tolist(), [False, True])

    def test_nan_ranks_lowest(self):
        taken, _ = router.best(np.array([[np.nan, 1.0, -5.0, np.nan]]), 3)
        self.assertEqual(taken.tolist(), [[1, 2, 0]])


if __name__ == "__main__":
    unittest.main()
