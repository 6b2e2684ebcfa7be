#!/bin/bash
# Trains with Open MPI: configs/launch/mpirun.sh CONFIG.toml [KEY=VALUE ...]
#
# mpirun only starts the processes; they talk through JAX. Edit the number of processes and the hosts. Stop the run with
# `kill -USR1` of mpirun's process, which all processes get: they save and end with status 75, and the same command goes
# on. (mpirun answers Ctrl-C and SIGTERM by killing them; the last checkpoint is there.)

PROCESSES=${PROCESSES:-2}           # one for each GPU, or one for each host with simulated devices on the CPU
HOSTS=${HOSTS:-localhost:$PROCESSES}  # host:processes,host:processes,...

# JAX 0.10 and 0.11 find process 0 through Open MPI 4, not 5, which does not say where it is (with JAX 0.12 and the
# package mpi4py they do). Then name it here, at any free port of the first host:
# set -- "$@" distributed.coordinator_address=first-host:29500

# Cores are not divided among processes, since XLA's threads want them all; options in MPIRUN_OPTIONS come last and win.
exec mpirun -np "$PROCESSES" --host "$HOSTS" --bind-to none --tag-output -x PATH -x PYTHONPATH $MPIRUN_OPTIONS \
    python -u -m jaxpar.train "$@"
