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
        first = bootstrap._launch_name({"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"})
        second = bootstrap._launch_name({"MASTER_ADDR": "localhost", "MASTER_PORT": "2", "TORCHELASTIC_RUN_ID": "none"})
        third = bootstrap._launch_name({"MASTER_ADDR": "localhost", "MASTER_PORT": "2", "TORCHELASTIC_RUN_ID": "mine"})
        self.assertEqual(len({first, second, third, bootstrap._launch_name({})}), 4)

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

    def test_outside_of_the_group(self):
        with self.assertRaisesRegex(heddle.InputError, "3"):
            heddle.join("name", 3, 2)


if __name__ == "__main__":
    unittest.main()
