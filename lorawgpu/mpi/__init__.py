"""Several processes that train one adapter together, connected by MPI (mpi4py, the extra `mpi`)."""
