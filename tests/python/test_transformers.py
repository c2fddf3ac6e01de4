"""Checkpoints of Hugging Face's transformers: its MoE blocks in float32 against every way, the router inside, from the same files.

How far apart they may be: transformers rounds nothing to bf16 here, and Heddle rounds at six points at most (docs/numerics.md): gate
and up, the activation, the pair's result, a rank's sum, the token's. One rounding moves a value by at most 2^-8 of it, half a unit of
8 bits at the beginning of a binade, in the mean square by 2^-8 / sqrt(3) at most. Products add many of them up, independently, so that
the relative error in norm stays that of one value, and six are sqrt(6) as large: 5.5e-3. SiLU may steepen what stands before it by
1.1, where it matters, the sum of float32 in another order is a thousand times less: 6e-3."""

import tempfile
import unittest

import hugging_face
from hugging_face import LATENT, LAYER, Model
from support import SEED, WAYS, bits, slice_of
from test_device import why_not

import heddle
import numpy as np
import oracle
from heddle import device

BOUND = 6e-3
TOKENS = 37
QWEN = {"hidden_size": 128, "intermediate_size": 320, "moe_intermediate_size": 64, "num_experts_per_tok": 4, "head_dim": 32}
DEEPSEEK = {"hidden_size": 128, "intermediate_size": 320, "moe_intermediate_size": 64, "first_k_dense_replace": 1} | LATENT
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
MIXTRAL = {"hidden_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2}

MODELS = [
    Model("MixtralConfig", MIXTRAL | {"intermediate_size": 192}),
    Model("MixtralConfig", MIXTRAL | {"intermediate_size": 192}, fused=True),
    Model("MixtralConfig", MIXTRAL | {"intermediate_size": 128}, fused=True),  # down_proj is square
    Model("MixtralConfig", MIXTRAL | {"intermediate_size": 64}, fused=True),  # gate_up_proj is
    Model("Qwen3MoeConfig", QWEN | {"num_experts": 16, "norm_topk_prob": True}),
    Model("Qwen3MoeConfig", QWEN | {"num_experts": 16, "norm_topk_prob": False}, fused=True),
    Model("Qwen2MoeConfig", QWEN | {"num_experts": 6, "shared_expert_intermediate_size": 192}),
    Model("Qwen2MoeConfig", QWEN | {"num_experts": 6, "shared_expert_intermediate_size": 192}, fused=True),
    Model("DeepseekV3Config", DEEPSEEK | GROUPS | {"n_shared_experts": 1}),
    Model("DeepseekV3Config", DEEPSEEK | GROUPS | {"n_shared_experts": 2, "routed_scaling_factor": 1.5}, fused=True),
    Model("DeepseekV3Config", DEEPSEEK | GROUPS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
]


def run(saved, way, ranks):
    """All tokens' outputs and choices, by the layer and the router that the folder describes."""
    source = heddle.Source.open(saved.folder, LAYER)
    options = heddle.LayerOptions(way=way, cap=TOKENS)

    def main(group):
        layer = heddle.MoeLayer.create(group, source, options)
        out = layer.forward(saved.hidden[slice_of(TOKENS, group.rank, ranks)])
        ids, weights = layer.routing
        layer.workspace.close()
        return out, ids, weights

    return [np.concatenate(of_ranks) for of_ranks in zip(*heddle.run_threads(ranks, main), strict=True)]


def run_on_a_gpu(saved, way, ranks):
    """All tokens' outputs, by ranks of one GPU; the router stays on the host."""
    torch = hugging_face.torch
    source = heddle.Source.open(saved.folder, LAYER)
    options = heddle.LayerOptions(way=way, cap=TOKENS)
    weights = [source.load(rank, ranks) for rank in range(ranks)]
    workspace = device.DeviceWorkspace([(weights[0], options)], ranks=ranks, deadline=5)
    layer = device.DeviceLayer(workspace, weights, options)
    hidden = torch.from_numpy(bits(saved.hidden)).view(torch.bfloat16)
    batch = [hidden, *map(torch.from_numpy, source.route(saved.hidden))]
    slices = [slice_of(TOKENS, rank, ranks) for rank in range(ranks)]
    most = max(mine.stop - mine.start for mine in slices)
    # Copies of their own, so that every rank's rows are aligned.
    outs = layer.forward(*([array[mine].cuda() for mine in slices] for array in batch), step=heddle.Step(most))
    torch.cuda.synchronize()
    layer.throw_if_failed()
    return torch.cat(outs).float().cpu().numpy()


def no_gpu():
    return hugging_face.missing or why_not()


class OfTransformers(unittest.TestCase):
    """Has the models, saved once a class."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.saved = [hugging_face.save(model, f"{cls.folder.name}/{number}", TOKENS) for number, model in enumerate(MODELS)]

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()


@unittest.skipIf(hugging_face.missing, hugging_face.missing)
class Transformers(OfTransformers):
    def check_choices(self, saved, ids, weights):
        """The same experts for every token, in whatever order, with the same weights."""
        for token, wanted in enumerate(saved.choices):
            chosen = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
            self.assertEqual(sorted(chosen), sorted(wanted), f"token {token}, seed {SEED}")
            for expert, weight in wanted.items():
                self.assertAlmostEqual(chosen[expert], weight, delta=1e-5 * max(1.0, weight))

    def test_every_way(self):
        for model, saved in zip(MODELS, self.saved, strict=True):
            for way in WAYS:
                for ranks in (1, 2, 4):
                    with self.subTest(model=str(model), way=way, ranks=ranks):
                        out, ids, weights = run(saved, way, ranks)
                        self.check_choices(saved, ids, weights)
                        self.assertLess(oracle.relative_error(out, saved.output), BOUND, f"seed {SEED}")

    def test_ids_of_ones_own_give_the_same_bits(self):
        saved = self.saved[0]
        out, ids, weights = run(saved, "low_latency", 1)
        group = heddle.thread_group(1)[0]
        layer = heddle.MoeLayer.create(group, heddle.Source.open(saved.folder, LAYER), heddle.LayerOptions(cap=TOKENS))
        np.testing.assert_array_equal(bits(layer.forward(saved.hidden, ids, weights)), bits(out))

    def test_a_wrong_layer_is_seen(self):
        """The bound tells: other experts, other weights or no shared expert are far outside of it."""
        saved = self.saved[8]
        source = heddle.Source.open(saved.folder, LAYER)
        self.assertTrue(source.has_shared)
        ids, weights = source.route(saved.hidden)
        layer = heddle.MoeLayer.create(heddle.thread_group(1)[0], source, heddle.LayerOptions(cap=TOKENS))
        without_groups = source.route(saved.hidden, heddle.RouterOptions("sigmoid", 4, scale=2.5))
        nobody = np.full_like(ids, -1)
        for wrong in ((np.roll(ids, 1, axis=0), weights), (ids, weights / 2.5), without_groups, (nobody, weights)):
            self.assertGreater(oracle.relative_error(layer.forward(saved.hidden, *wrong), saved.output), 5 * BOUND)


@unittest.skipIf(no_gpu(), no_gpu())
class OnGpus(OfTransformers):
    def test_every_way(self):
        for model, saved in zip(MODELS, self.saved, strict=True):
            for way in WAYS:
                for ranks in (1, 4):
                    with self.subTest(model=str(model), way=way, ranks=ranks):
                        self.assertLess(oracle.relative_error(run_on_a_gpu(saved, way, ranks), saved.output), BOUND, f"seed {SEED}")


if __name__ == "__main__":
    unittest.main()
