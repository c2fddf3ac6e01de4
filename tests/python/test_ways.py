"""Every way on 1, 2 and 8 ranks against the oracle, as threads; as processes the same bits."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from pathlib import Path

from support import BOUND, HERE, SEED, WAYS, bits, call, save

import heddle
import numpy as np
import oracle


class Ways(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        folder = Path(cls.folder.name)
        cls.saved = {kind: save(folder, kind, shared=kind, clamp=1.5) for kind in ("bf16", "fp8_block")}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def outputs(self, saved, way, ranks, **options):
        wanted = heddle.LayerOptions(way=way, cap=len(saved.batch.hidden), **options)
        return np.concatenate(heddle.run_threads(ranks, lambda group: call(group, saved, wanted, calls=2)))

    def check(self, saved, outputs, way, ranks):
        error = oracle.relative_error(outputs, saved.expected(way, ranks))
        self.assertLess(error, BOUND[saved.activation], f"{way}, {ranks} ranks, seed {SEED}")

    def test_against_the_oracle(self):
        for kind, saved in self.saved.items():
            for way in WAYS:
                for ranks in (1, 2, 8):
                    with self.subTest(kind=kind, way=way, ranks=ranks):
                        self.check(saved, self.outputs(saved, way, ranks), way, ranks)

    def test_against_the_reference(self):
        saved = self.saved["fp8_block"]
        for way in WAYS:
            with self.subTest(way=way):
                options = heddle.LayerOptions(way=way, cap=len(saved.batch.hidden))
                batch = saved.batch
                expected = heddle.reference(saved.source, batch.hidden, batch.ids, batch.weights, options, ranks=2)
                error = oracle.relative_error(self.outputs(saved, way, 2), expected)
                self.assertLess(error, BOUND["fp8"])
                self.assertLess(oracle.relative_error(expected, saved.expected(way, 2)), 1e-3)

    def test_options_that_never_change_a_bit(self):
        saved = self.saved["bf16"]
        slots = self.outputs(saved, "low_latency", 2)
        for options in ({"reduce": "home"}, {"reduce": "home", "cpu_sync": True}):
            np.testing.assert_array_equal(bits(self.outputs(saved, "elastic", 2, **options)), bits(slots))
        for options in ({"block_rows": 8}, {"ring": "full", "workers": 2}):
            np.testing.assert_array_equal(bits(self.outputs(saved, "mega", 2, **options)), bits(slots))
        sums = self.outputs(saved, "gather", 2)
        for gather in ("uneven", "zero_filled"):
            np.testing.assert_array_equal(bits(self.outputs(saved, "gather", 2, gather=gather)), bits(sums))

    def test_ranks_without_tokens(self):
        saved = self.saved["bf16"]
        batch = saved.batch
        nothing = [np.empty((0, *array.shape[1:]), array.dtype) for array in (batch.hidden, batch.ids, batch.weights)]

        def main(group, way):
            layer = heddle.MoeLayer.create(group, saved.source, heddle.LayerOptions(way=way, cap=20))
            mine = (batch.hidden, batch.ids, batch.weights) if group.rank == 1 else nothing
            return layer.forward(*mine)

        for way in WAYS:
            with self.subTest(way=way):
                outputs = heddle.run_threads(3, lambda group: main(group, way))
                self.assertEqual([len(out) for out in outputs], [0, 20, 0])
                self.check(saved, outputs[1], way, 3)

    def test_a_placement_of_ones_own(self):
        saved = self.saved["bf16"]
        placement = [1, 0, 1, 1, 0, 0, 1, 1]

        def main(group):
            options = heddle.LayerOptions(cap=20)
            layer = heddle.MoeLayer.create(group, saved.source, options, placement=placement)
            batch = saved.batch
            out = layer.forward(batch.hidden, batch.ids, batch.weights)
            return out, layer.report

        (first, report), (second, other) = heddle.run_threads(2, main)
        self.check(saved, first, "low_latency", 2)
        np.testing.assert_array_equal(bits(first), bits(second))
        chosen = saved.batch.ids[saved.batch.ids >= 0]
        self.assertEqual(other.rows_real, 2 * sum(placement[expert] for expert in chosen))
        self.assertEqual(report.rows_sent, len(chosen))

    def test_tensor_parallel(self):
        saved = self.saved["bf16"]
        for way in ("gather", "low_latency"):
            with self.subTest(way=way):
                options = heddle.LayerOptions(way=way, cap=20, tensor_parallel=True)

                def main(group):
                    layer = heddle.MoeLayer.create(group, saved.source, options)
                    return layer.forward(saved.batch.hidden, saved.batch.ids, saved.batch.weights, step=heddle.Step(20))

                for out in heddle.run_threads(2, main):
                    self.check(saved, out, way, 2)

    def test_two_layers_of_a_workspace(self):
        saved = self.saved["bf16"]
        ways = [heddle.LayerOptions(way=way, cap=20) for way in ("low_latency", "gather")]

        def main(group):
            layers = [(saved.source.load(group.rank, group.ranks), options) for options in ways]
            needed = heddle.workspace_bytes(layers)
            with heddle.Workspace(group, layers) as workspace:
                self.assertEqual(workspace.bytes, needed)
                outs = []
                for weights, options in layers + layers:
                    layer = heddle.MoeLayer(workspace, weights, options)
                    outs.append(layer.forward(saved.batch.hidden, saved.batch.ids, saved.batch.weights))
            with self.assertRaisesRegex(heddle.InputError, "closed"):
                layer.forward(saved.batch.hidden, saved.batch.ids, saved.batch.weights)
            return outs

        for outs in heddle.run_threads(2, main):
            np.testing.assert_array_equal(bits(outs[0]), bits(outs[2]))
            self.check(saved, outs[0], "low_latency", 2)
            self.check(saved, outs[1], "gather", 2)

    def test_processes_give_the_same_bits(self):
        saved = self.saved["fp8_block"]
        batch = Path(self.folder.name) / "batch.npz"
        np.savez(batch, hidden=bits(saved.batch.hidden), ids=saved.batch.ids, weights=saved.batch.weights)
        for ranks, launcher in ((2, "torchrun"), (8, "mpirun")):
            with self.subTest(ranks=ranks, launcher=launcher):
                job = {"layer": str(saved.path), "batch": str(batch), "ways": WAYS, "out": self.folder.name}
                run_processes(ranks, launcher, job)
                for way in WAYS:
                    of_ranks = [np.load(Path(self.folder.name) / f"{way}.{rank}.npy") for rank in range(ranks)]
                    np.testing.assert_array_equal(np.concatenate(of_ranks), bits(self.outputs(saved, way, ranks)), way)

    def test_weights_of_arrays(self):
        random = np.random.default_rng(SEED)
        source = heddle.Source.synthetic(heddle.LayerShape(128, 64, 4, 2), seed=7)
        from ml_dtypes import bfloat16

        gate, up = (random.normal(0, 0.1, (4, 64, 128)).astype(bfloat16) for _ in range(2))
        down = random.normal(0, 0.1, (4, 128, 64)).astype(bfloat16)
        shared = tuple(array[0].copy() for array in (gate, up, down))
        source = heddle.Source.of_arrays(gate, up, down, topk=2, shared=shared)
        self.assertEqual(source.shape, heddle.LayerShape(128, 64, 4, 2))
        del up, shared  # the source keeps them
        hidden = random.normal(size=(6, 128)).astype(bfloat16)
        ids = np.array([[0, 3], [1, 2], [2, -1], [3, 1], [0, 2], [-1, -1]], np.int32)
        weights = random.random((6, 2)).astype(np.float32)
        options = heddle.LayerOptions(cap=6)
        out = heddle.run_threads(1, lambda group: heddle.MoeLayer.create(group, source, options)(hidden, ids, weights))[0]
        self.assertLess(oracle.relative_error(out, heddle.reference(source, hidden, ids, weights, options)), BOUND["bf16"])
        self.assertGreater(np.abs(out[5].astype(np.float32)).max(), 0)  # the shared expert's


    def test_processes_that_fail_take_the_others_along(self):
        with self.assertRaisesRegex(AssertionError, "rank 1 ended with 2:(.|\n)*no layer there"):
            run_processes(2, "torchrun", {"fails_on": 1, "reason": "no layer there"})
        self.assertEqual([process.poll() is None for process in started], [False, False])


started = []  # by the last call of run_processes


def run_processes(ranks, launcher, job):
    """A process a rank, with the environment that a launcher gives. All of them have ended when it returns or raises."""
    launch = uuid.uuid4().hex
    started.clear()
    with contextlib.ExitStack() as ends:
        outputs = [ends.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        for rank in range(ranks):
            command = [sys.executable, str(HERE / "rank_process.py"), json.dumps(job)]
            environment = os.environ | LAUNCHERS[launcher](rank, ranks, launch)
            started.append(subprocess.Popen(command, env=environment, stdout=outputs[rank], stderr=subprocess.STDOUT))
            ends.callback(end, started[-1])
        wait_for(started, outputs, time.monotonic() + 120)


def wait_for(processes, outputs, until):
    """Until all have ended well, or one has not, wherever it stands."""
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            status = process.poll()
            if status == 0:
                del running[rank]
            elif status is not None:
                outputs[rank].seek(0)
                raise AssertionError(f"rank {rank} ended with {status}:\n{outputs[rank].read()}")
        if time.monotonic() > until:
            raise AssertionError(f"ranks {list(running)} have not ended")
        time.sleep(0.01)


def end(process):
    process.kill()
    process.wait()


def torchrun(rank, ranks, launch):
    numbers = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    return numbers | {"TORCHELASTIC_RUN_ID": launch, "MASTER_ADDR": "localhost"}


def mpirun(rank, ranks, launch):
    numbers = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    return numbers | {"PMIX_NAMESPACE": launch}


LAUNCHERS = {"torchrun": torchrun, "mpirun": mpirun}


if __name__ == "__main__":
    unittest.main()
