"""Starts MPI jobs with the launcher of the wheel next to Python."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def mpi_environment(**more) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"} | more


def mpiexec(*args, timeout=240, **environment) -> subprocess.CompletedProcess:
    """Run `mpiexec *args` to its end."""
    command = [str(MPIEXEC), *map(str, args)]
    return subprocess.run(command, env=mpi_environment(**environment), capture_output=True, text=True, timeout=timeout)
