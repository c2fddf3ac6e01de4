"""How ranks come together: as threads of this process, or as processes that were started by torchrun, mpirun or by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from heddle import _core
from heddle.errors import InputError

Result = TypeVar("Result")

# Rank, number of ranks, rank within the machine, and ranks of the machine, as launchers name them.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise InputError(f"{name}={environment[name]!r} in the environment: expected a number") from None


def _launched(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and ranks by the launcher's variables."""
    for launcher, rank, ranks, here in _LAUNCHERS:
        if rank not in environment or ranks not in environment:
            continue
        if here in environment and _number(environment, here) != _number(environment, ranks):
            raise InputError(
                f"{launcher} started {environment[ranks]} ranks, {environment[here]} of them on this machine; a group is of one machine"
            )
        return _number(environment, rank), _number(environment, ranks)
    names = ", ".join(f"{rank} and {ranks}" for _, rank, ranks, _ in _LAUNCHERS)
    raise InputError(f"no launcher is known from the environment ({names}): give name, rank and ranks")


def _launch_name(environment: Mapping[str, str]) -> str:
    """What the processes of one launch have in common. Two launches at once in one Slurm job have no name of their own: give
    `address`."""
    for name in ("TORCHELASTIC_RUN_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_ID_JOB", "SLURM_JOB_ID"):
        if environment.get(name, "none") != "none":
            return f"{name}.{environment[name]}"
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return f"{environment['MASTER_ADDR']}.{environment['MASTER_PORT']}"
    return f"parent.{os.getppid()}"


def join(
    address: str | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    *,
    process_group: Any = None,
    deadline: float = 30.0,
) -> _core.Group:
    """Joins a group of processes of this machine, one rank a process. Collective.

    Without arguments rank and ranks come from the launcher's variables: torchrun's (RANK, WORLD_SIZE), Open MPI's
    (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE) or MPICH's (PMI_RANK, PMI_SIZE); the launch itself gives the name.

    address: any text that the processes have in common and no other group of this machine has: a name, the path of a file, or
        "host:port" of the launch. Nothing is made or opened there: ranks meet on a socket that the kernel keeps for the text.
    process_group: a torch.distributed process group (or True: the default one); its rank 0 draws a name and sends it to the others.
        Any backend; with NCCL the name goes by way of the current CUDA device.
    deadline: seconds of the longest wait on any word.

    Raises InputError where numbers are missing or disagree, FaultError (naming the rank) if others do not come in time.
    """
    if process_group is not None:
        if address is not None or rank is not None or ranks is not None:
            raise InputError("process_group says who is there: leave address, rank and ranks out")
        return _core.join_group(*_agreed_by_torch(process_group), deadline)
    if (rank is None) != (ranks is None):
        raise InputError(f"rank {rank} of {ranks} ranks: give both, or neither under a launcher")
    if rank is None or ranks is None:
        rank, ranks = _launched(os.environ)
    return _core.join_group(address if address is not None else _launch_name(os.environ), rank, ranks, deadline)


def _agreed_by_torch(process_group: Any) -> tuple[str, int, int]:
    import uuid

    import torch.distributed as distributed

    group = None if process_group is True else process_group
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    names = [uuid.uuid4().hex if rank == 0 else ""]
    distributed.broadcast_object_list(names, src=distributed.get_global_rank(group, 0) if group is not None else 0, group=group)
    return names[0], rank, ranks


def run_threads(ranks: int, rank_main: Callable[[_core.Group], Result], deadline: float = 30.0) -> list[Result]:
    """Calls rank_main(group) on `ranks` threads of this process, a rank each, and returns the results by rank.

    Calls of this library leave the interpreter to the other threads. If ranks raise, all are waited for, and the error that
    explains the others is raised: one that is no FaultError, else a rank's own fault.
    """
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(group: _core.Group) -> None:
        try:
            results[group.rank] = rank_main(group)
        except BaseException as error:  # raised again below
            errors[group.rank] = error

    threads = [
        threading.Thread(target=run, args=(group,), name=f"heddle rank {group.rank}")
        for group in _core.thread_group(ranks, deadline)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [(_weight(rank, error), error) for rank, error in enumerate(errors) if error is not None]
    if raised:
        raise max(raised, key=lambda pair: pair[0])[1]
    return results


def _weight(rank: int, error: BaseException) -> int:
    """How much an error explains: a fault may only repeat another rank's."""
    fault_of = getattr(error, "rank", None)
    return 2 if fault_of is None else int(fault_of == rank)
