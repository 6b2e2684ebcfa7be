"""The processes of a run: which one this is, and how it joins the others before JAX starts a backend.

They meet at `distributed.coordinator_address`, where process 0 calls the roll; JAX's own coordinator gets another
port of its host. `jaxpar.hub` says what the line between them carries after that.
"""

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

# No public function tells what JAX would detect before it connects, which ends the process if another one is missing.
from jax._src.clusters import ClusterEnv

from jaxpar.backend import scheduler
from jaxpar.config import Config, dump_toml
from jaxpar.config.operation import DistributedConfig
from jaxpar.hub import Hub
from jaxpar.line import Traveller
from jaxpar.member import Member
from jaxpar.parallel.agreement import active

__all__ = ["Place", "find_place", "joined", "local_parallel", "placeless"]

_PLACES = ("detect", "coordinator_address", "num_processes", "process_id", "local_device_ids")
_JAX_FAILS_LATER_SECONDS = 60
_SHUTDOWN_SECONDS = 60


@dataclass(frozen=True)
class Place:
    """Which of a run's processes this is, and where they meet."""

    index: int
    count: int
    host: str
    port: int
    local_device_ids: tuple[int, ...] | None


def find_place(config: DistributedConfig) -> Place | None:
    """This process's place among several, from the configuration, else from what started it; None if it is alone.

    Raises:
      ValueError: what is set and what is detected is not enough, or does not fit.
    """
    address: str | None = config.coordinator_address or None
    count: int | None = config.num_processes or None
    index: int | None = config.process_id if config.process_id >= 0 else None
    ids = config.local_device_ids or None
    if None in (address, count, index) and config.detect != "off":
        address, count, index, ids = _detected(config, address, count, index, ids)
    given = {"coordinator_address": address, "num_processes": count, "process_id": index}
    if count is not None and index is not None and index >= count:
        raise ValueError(
            f"distributed.process_id={index} must be below distributed.num_processes={count}; legal values: 0 to "
            f"{count - 1}"
        )
    if count == 1 or not (any(value is not None for value in given.values()) or config.detect not in ("auto", "off")):
        return None
    for key, value in given.items():
        if value is None:
            raise ValueError(
                f"distributed.{key} is not set, and distributed.detect={config.detect!r} does not find it; set it, or "
                "start the processes with python -m jaxpar.launch, srun or mpirun"
            )
    assert address is not None
    assert count is not None
    assert index is not None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"distributed.coordinator_address={address!r} must be HOST:PORT, for example "
            f"{(address.rstrip(':') or 'localhost') + ':12345'!r}"
        )
    return Place(index, count, host.strip("[]"), int(port), None if ids is None else tuple(ids))


def _detected(config: DistributedConfig, address: str | None, count: int | None, index: int | None, ids: Any) -> Any:
    """The four values, those that are None filled by JAX from what started this process."""
    method: str | None = None if config.detect in ("auto", "tpu") else config.detect
    if config.detect in ("auto", "slurm", "ompi"):
        started_by = scheduler()
        if config.detect != "auto" and (started_by is None or started_by.name != config.detect):
            return address, count, index, ids
        if started_by is None or started_by.num_processes == 1:
            return address, count, index, ids
        if not started_by.knows_address:
            count = started_by.num_processes if count is None else count
            index = started_by.process_id if index is None else index
            return address, count, index, ids
        method = started_by.name
    try:
        return ClusterEnv.auto_detect_unset_distributed_params(
            address, count, index, ids, method, config.initialization_timeout_seconds
        )
    except Exception as error:
        raise ValueError(
            f"distributed.detect={config.detect!r} does not find this process's place ({type(error).__name__}: "
            f"{error}); set distributed.coordinator_address, distributed.num_processes and distributed.process_id"
        ) from error


def placeless(config: Config) -> Config:
    """The configuration without what differs between processes and starts: what is compared and stored."""
    fresh = DistributedConfig()
    places = {key: getattr(fresh, key) for key in _PLACES}
    return config.model_copy(update={"distributed": config.distributed.model_copy(update=places)})


def local_parallel(config: Config, count: int) -> Config:
    """The configuration with the simulated devices of one of `count` processes.

    Raises:
      ValueError: they cannot be shared evenly.
    """
    simulated = config.parallel.simulated_devices
    if simulated % count:
        raise ValueError(
            f"parallel.simulated_devices={simulated} must be a multiple of the {count} processes that share them; "
            f"nearest legal values: {max(simulated // count, 1) * count}, {(simulated // count + 1) * count}"
        )
    return config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"simulated_devices": simulated // count})}
    )


@contextlib.contextmanager
def joined(config: Config, end_process: Callable[[int, str], None]) -> Iterator[Member | None]:
    """A block in which this process is one of the run's, and JAX knows of all; None, and nothing done, if it is alone.

    `end_process(status, why)` is called on another thread when another process is lost, and must not return.

    Raises:
      ValueError: the configuration is wrong, or the processes do not belong to one run.
      RollCallError: some process did not arrive.
    """
    place = find_place(config.distributed)
    if place is None:
        if config.distributed.local_device_ids:
            ids = ",".join(map(str, config.distributed.local_device_ids))
            jax.config.update("jax_cuda_visible_devices", ids)
        yield None
        return
    keys = config.distributed
    member = _meet(place, config, end_process)
    with _speaking_at_abort(member, end_process):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            member.coordinator,
            place.count,
            place.index,
            local_device_ids=place.local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=member.coordinator if _is_local(place.host) else None,
            initialization_timeout=keys.initialization_timeout_seconds,
            heartbeat_timeout_seconds=keys.heartbeat_timeout_seconds + _JAX_FAILS_LATER_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
        with active(member):
            yield member
        jax.distributed.shutdown()
    member.leave()


def _meet(place: Place, config: Config, end_process: Callable[[int, str], None]) -> Member:
    keys = config.distributed
    arrival, heartbeat = float(keys.initialization_timeout_seconds), float(keys.heartbeat_timeout_seconds)
    if place.index == 0:
        Hub(
            _listener(place),
            place.count,
            arrival_seconds=arrival,
            heartbeat_seconds=heartbeat,
            start_seconds=float(keys.start_timeout_seconds),
        ).start()
    traveller = Traveller(
        index=place.index,
        count=place.count,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=f"jax {jax.__version__}",
        config=hashlib.blake2b(dump_toml(placeless(config)).encode(), digest_size=16).hexdigest(),
    )
    member = Member(traveller, end_process, heartbeat_seconds=heartbeat)
    member.arrive((place.host, place.port), arrival_seconds=arrival)
    return member


def _listener(place: Place) -> socket.socket:
    """Where process 0 waits: on this machine alone if that is where the others are."""
    try:
        if _is_local(place.host):
            family = socket.AF_INET6 if place.host == "::1" else socket.AF_INET
            return socket.create_server((place.host, place.port), family=family, backlog=place.count)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", place.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=place.count
            )
        return socket.create_server(("", place.port), backlog=place.count)
    except OSError as error:
        raise ValueError(
            f"distributed.coordinator_address: process 0 cannot wait at {place.host}:{place.port} ({error.strerror}); "
            "name a port that is free on its host"
        ) from error


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def _speaking_at_abort(member: Member, end_process: Callable[[int, str], None]) -> Iterator[None]:
    """A block in which an abort of native code is a message and exit status 1.

    When process 0 is gone, with JAX's coordinator in it, JAX aborts every other process; a callback in place of that
    ends in std::bad_cast (jax 0.10.2 and 0.12). Python would call a handler of its own on the main thread, where the
    abort lets it never come: hence C's `signal`.
    """

    def report(number: int) -> None:
        if not member.wait_for_end(2.0):
            end_process(1, "native code has aborted this process; its report is above")
        time.sleep(5.0)  # while the thread that listens ends the process

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(report)
    # Without a declaration the pointer that C's `signal` returns would be cut to 32 bits.
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, before)
