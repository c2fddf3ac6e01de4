"""How ranks come together: as threads of this process, or as processes that were started by torchrun, mpirun or by hand."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from heddle import _core
from heddle.errors import InputError

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Launcher:
    """The variables by which a launcher tells its processes who they are."""

    name: str
    rank: str
    ranks: str
    here: str
    """Ranks of this machine."""
    launch: tuple[str, ...]
    """What tells one launch from others of this machine; those that are set are taken together."""

    def is_in(self, environment: Mapping[str, str]) -> bool:
        return self.rank in environment and self.ranks in environment

    def numbers(self, environment: Mapping[str, str]) -> tuple[int, int]:
        return _number(environment, self.rank), _number(environment, self.ranks)


# torchrun's RANK and WORLD_SIZE are also set by job systems for whole machines, and by scripts. Slurm's job says little: several
# launches may run in it at once, which their steps tell apart, or a launcher's own variables.
_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
_MPI = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_ID_JOB", "SLURM_JOB_ID", "SLURM_STEP_ID")),
)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise InputError(f"{name}={environment[name]!r} in the environment: expected a number") from None


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    """The one whose process this is. TORCHELASTIC_RUN_ID is set by torchrun itself, and by nobody else."""
    mpi = next((launcher for launcher in _MPI if launcher.is_in(environment)), None)
    if not _TORCHRUN.is_in(environment):
        return mpi
    if mpi is None or "TORCHELASTIC_RUN_ID" in environment:
        return _TORCHRUN
    if mpi.numbers(environment) != _TORCHRUN.numbers(environment):
        raise InputError(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']}, but {mpi.rank}={environment[mpi.rank]} and "
            f"{mpi.ranks}={environment[mpi.ranks]} in the environment: give address, rank and ranks"
        )
    return mpi


def _launched(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and ranks by the launcher's variables."""
    launcher = _launcher(environment)
    if launcher is None:
        names = ", ".join(f"{known.rank} and {known.ranks}" for known in (_TORCHRUN, *_MPI))
        raise InputError(f"no launcher is known from the environment ({names}): give name, rank and ranks")
    rank, ranks = launcher.numbers(environment)
    if launcher.here in environment and _number(environment, launcher.here) != ranks:
        raise InputError(
            f"{launcher.name} started {ranks} ranks, {environment[launcher.here]} of them on this machine; a group is of one machine"
        )
    return rank, ranks


def _launch_name(environment: Mapping[str, str]) -> str:
    """What the processes of one launch have in common, and no other launch of this machine."""
    launcher = _launcher(environment)
    told = [f"{name}={environment[name]}" for name in launcher.launch if name in environment] if launcher is not None else []
    return " ".join(told) if told else f"parent.{os.getppid()}"


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
    (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE) or MPICH's (PMI_RANK, PMI_SIZE); the launch itself gives the name. Where variables of
    torchrun and of MPI disagree, torchrun's are taken if it has started this process (TORCHELASTIC_RUN_ID), else it is an InputError.

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
    text = address if address is not None else _launch_name(os.environ)
    return _core.join_group(_short(text), rank, ranks, deadline)


def _short(text: str) -> str:
    """A name that a socket may have: at most 99 bytes."""
    data = text.encode()
    return text if len(data) <= 99 else hashlib.sha256(data).hexdigest()


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
