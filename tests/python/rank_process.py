"""One rank, as a launcher starts it: joins by the environment, calls every way, leaves its outputs."""

import json
import sys
from pathlib import Path

from support import bits, call

import heddle
import ml_dtypes
import numpy as np
from oracle import Batch
from support import Saved


def fail(job):
    """On one rank; the others would wait for it longer than a test may last."""
    group = heddle.join(deadline=300)
    if group.rank == job["fails_on"]:
        print(job["reason"])
        sys.exit(2)
    group.barrier()


def main(job):
    if "fails_on" in job:
        fail(job)
    arrays = np.load(job["batch"])
    batch = Batch(arrays["hidden"].view(ml_dtypes.bfloat16), arrays["ids"], arrays["weights"])
    source = heddle.Source.open(job["layer"]).with_topk(batch.ids.shape[1])
    saved = Saved(Path(job["layer"]), source, None, batch, "")
    group = heddle.join()
    for way in job["ways"]:
        out = call(group, saved, heddle.LayerOptions(way=way, cap=len(batch.hidden)))
        np.save(Path(job["out"]) / f"{way}.{group.rank}.npy", bits(out))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
