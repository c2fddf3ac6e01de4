"""How processes find each other, without starting any."""

import os
import threading
import unittest
from unittest import mock

import support

import heddle
from heddle import group as bootstrap

NOBODY = {"PATH": os.environ["PATH"]}


class Environment(unittest.TestCase):
    def under(self, **variables):
        return mock.patch.dict(os.environ, NOBODY | variables, clear=True)

    def test_launchers(self):
        for variables in (
            {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            {"PMI_RANK": "2", "PMI_SIZE": "4"},
        ):
            with self.subTest(variables=variables):
                self.assertEqual(bootstrap._launched(variables), (2, 4))

    def test_one_rank_under_a_launcher(self):
        with self.under(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=str(os.getpid())):
            group = heddle.join()
        self.assertEqual((group.rank, group.ranks), (0, 1))

    def test_what_is_missing(self):
        with self.under(), self.assertRaisesRegex(heddle.InputError, "RANK and WORLD_SIZE.*OMPI_COMM_WORLD_RANK"):
            heddle.join()
        with self.under(RANK="two", WORLD_SIZE="4"), self.assertRaisesRegex(heddle.InputError, "RANK='two'"):
            heddle.join()
        with self.assertRaisesRegex(heddle.InputError, "rank 1 of None ranks"):
            heddle.join("name", rank=1)
        with self.assertRaisesRegex(heddle.InputError, "leave address"):
            heddle.join("name", process_group=True)

    def test_more_than_one_machine(self):
        with (
            self.under(RANK="9", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8"),
            self.assertRaisesRegex(heddle.InputError, "16 ranks, 8 of them on this machine"),
        ):
            heddle.join()

    def test_launches_of_one_machine_have_names_of_their_own(self):
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
        open_mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1"}
        srun = {"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_STEP_ID": "0"}
        launches = [
            {},
            torchrun,
            torchrun | {"MASTER_PORT": "2"},
            torchrun | {"TORCHELASTIC_RUN_ID": "mine"},
            open_mpi,
            open_mpi | {"PMIX_NAMESPACE": "2"},
            srun,
            srun | {"SLURM_STEP_ID": "1"},
        ]
        for job in ({}, {"SLURM_JOB_ID": "17"}):  # several launches of one job, too
            names = {bootstrap._launch_name(launch | job) for launch in launches}
            self.assertEqual(len(names), len(launches), names)
        other_rank = torchrun | {"RANK": "1", "LOCAL_RANK": "1", "SLURM_PROCID": "3"}
        self.assertEqual(bootstrap._launch_name(other_rank), bootstrap._launch_name(torchrun))

    def test_launchers_within_each_other(self):
        """The innermost is meant, as far as can be known."""
        mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "n"}
        slurm = {"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_JOB_ID": "17"}
        machines = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "m", "MASTER_PORT": "1"}  # of a job system
        torchrun = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        self.assertEqual(bootstrap._launched(mpi | slurm), (2, 4))
        self.assertEqual(bootstrap._launched(mpi | torchrun), (1, 2))
        self.assertEqual(bootstrap._launched(slurm | torchrun), (1, 2))
        self.assertEqual(bootstrap._launched(mpi | {"RANK": "2", "WORLD_SIZE": "4"}), (2, 4))
        self.assertNotIn("17", bootstrap._launch_name(mpi | slurm))
        with self.assertRaisesRegex(heddle.InputError, "RANK=0 and WORLD_SIZE=1, but OMPI_COMM_WORLD_RANK=2 .* give address"):
            bootstrap._launched(mpi | machines)

    def test_names_and_numbers(self):
        name, groups = f"localhost:{os.getpid()}", {}
        other = threading.Thread(target=lambda: groups.update(other=heddle.join(name, 1, 2, deadline=20)))
        other.start()
        mine = heddle.join(name, 0, 2, deadline=20)
        other.join()
        texts = []
        waiting = threading.Thread(target=lambda: texts.append(groups["other"].exchange("b")))
        waiting.start()
        self.assertEqual(mine.exchange("a"), ["a", "b"])
        waiting.join()
        self.assertEqual(texts, [["a", "b"]])

    def test_long_names(self):
        """Of another kind of letters, too; what they differ by at the end counts."""
        for text in ("/a/path" * 40, "ü" * 60):
            groups = [heddle.join(text + end, 0, 1) for end in ("1", "2")]
            self.assertEqual([group.ranks for group in groups], [1, 1])

    def test_outside_of_the_group(self):
        with self.assertRaisesRegex(heddle.InputError, "3"):
            heddle.join("name", 3, 2)


if __name__ == "__main__":
    unittest.main()
