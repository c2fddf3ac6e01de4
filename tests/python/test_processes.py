"""Two processes under torchrun, a rank each: on the host engine, and on GPUs, where one GPU alone is shared in turns. What they do
is in layer_process.py."""

import unittest

import adapted
from support import HERE, launched
from test_device import why_not

from heddle import device


@unittest.skipIf(adapted.torch is None, adapted.NO_TORCH)
class Processes(unittest.TestCase):
    def run_two(self, *arguments):
        said = launched(HERE / "layer_process.py", 2, *arguments)
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2: all checks passed", said)

    def test_on_the_host_engine(self):
        for bootstrap in ("environment", "gloo"):
            with self.subTest(bootstrap=bootstrap):
                self.run_two("host", bootstrap)

    @unittest.skipIf(why_not(), why_not())
    def test_each_sees_its_own_gpu_alone(self):
        self.run_two("cuda", "environment", str(min(2, device.gpus_present())))

    @unittest.skipIf(why_not(), why_not())
    def test_a_group_of_torch_with_nccl(self):
        if device.gpus_present() < 2:
            self.skipTest("one GPU is here, and NCCL wants one a process")
        self.run_two("cuda", "nccl", str(device.gpus_present()))


if __name__ == "__main__":
    unittest.main()
