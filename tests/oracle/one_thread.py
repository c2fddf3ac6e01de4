"""Import this before NumPy: OpenBLAS reads its number of threads when it loads, and threads only slow products this small."""

import os

ENVIRONMENT = dict(os.environ)  # as it was, for the command under test
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
