"""The launch files for SLURM and Open MPI, run as they are on this machine.

Opt-in: `make test-slurm` needs root and Debian's slurm-wlm and munge, `make test-mpi` its openmpi-bin.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLUSTER = Path(__file__).with_name("cluster.sh")
LAUNCH = ROOT / "configs" / "launch"
TINY = [
    str(ROOT / "configs" / "quickstart.toml"), "model.num_layers=1", "model.embed_dim=16", "model.num_heads=2",
    "model.num_kv_heads=2", "model.head_dim=8", "model.mlp_dim=32", "data.sequence_length=32", "train.batch_size=8",
    "parallel.simulated_devices=4", "data.holdout_every=0", "evaluation.batch_size=8", "logging.every_steps=1",
    "hardware.peak_tflops=1.0", f"runtime.compilation_cache={ROOT / '.cache' / 'tests' / 'jax'}",
    f"data.cache_dir={ROOT / '.cache' / 'tests' / 'data'}", "evaluation.sample_prompt=''",
]  # fmt: skip


def _environment() -> dict[str, str]:
    """With the interpreter that runs the tests as `python`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}


def _steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def _wait(until: str, condition: object, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited in vain until {until}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands reach a cluster that is this machine."""
    directory = tmp_path_factory.mktemp("slurm")
    subprocess.run([CLUSTER, "start", directory], check=True, timeout=60)
    try:
        yield _environment() | {"SLURM_CONF": str(directory / "slurm.conf")}
    finally:
        subprocess.run([CLUSTER, "stop", directory], check=True, timeout=60)


class Job:
    """A job that runs the project's sbatch file on two tasks."""

    def __init__(self, directory: Path, environment: dict[str, str], *arguments: str) -> None:
        self.environment = environment
        self.log = directory / "job.log"
        options = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10"]
        command = ["sbatch", "--parsable", *options, f"--output={self.log}", LAUNCH / "slurm.sbatch", *arguments]
        done = subprocess.run(
            command, cwd=directory, env=environment, check=True, timeout=60, capture_output=True, text=True
        )
        self.number = done.stdout.strip()

    def command(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, check=True, timeout=60, capture_output=True, text=True
        ).stdout

    def state(self) -> str:
        shown = self.command("scontrol", "show", "job", self.number)
        return re.search(r"JobState=(\w+)", shown)[1]  # type: ignore[index]

    def restarts(self) -> int:
        return int(re.search(r"Restarts=(\d+)", self.command("scontrol", "show", "job", self.number))[1])  # type: ignore[index]


@pytest.mark.slurm
def test_slurm_starts_the_processes_of_one_run(cluster: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, cluster, *TINY, "run.dir=run", "train.num_steps=5")
    _wait("the job is done", lambda: job.state() in ("COMPLETED", "FAILED"))
    log = job.log.read_text()
    assert job.state() == "COMPLETED", log
    assert "0: 4 cpu device(s): data 4" in log
    assert not re.search(r"^1: .*device\(s\)", log, re.MULTILINE)
    assert _steps(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.slurm
def test_a_preempted_job_saves_queues_again_and_goes_on(cluster: dict[str, str], tmp_path: Path) -> None:
    """SIGUSR1 to the tasks, as --signal and preemption send it; the second time the run is let end."""
    run = tmp_path / "run"
    job = Job(tmp_path, cluster, *TINY, "run.dir=run", "train.num_steps=800", "checkpoint.every_steps=0")
    _wait("there are steps", lambda: len(_steps(run)) >= 3)
    job.command("scancel", "--signal=USR1", job.number)
    _wait("it is queued again", lambda: job.restarts() == 1)
    _wait("the job is done", lambda: job.state() in ("COMPLETED", "FAILED"), 400)
    log = job.log.read_text()
    assert job.state() == "COMPLETED", log
    assert "exit status 75: the job queues again (restart 1)" in log
    (stopped,) = re.findall(r"0: stopped after step (\d+) of 800", log)
    assert f"0: continuing after step {stopped} of 800" in log
    assert _steps(run) == list(range(1, 801))


@pytest.mark.slurm
def test_a_users_error_fails_the_job_and_is_shown_once(cluster: dict[str, str], tmp_path: Path) -> None:
    job = Job(tmp_path, cluster, *TINY, "run.dir=run", "parallel.tensor=3")
    _wait("the job is done", lambda: job.state() in ("COMPLETED", "FAILED"))
    assert job.state() == "FAILED"
    assert job.restarts() == 0
    assert (
        len(re.findall(r"^\d: parallel\.tensor=3 does not divide the 4 devices", job.log.read_text(), re.MULTILINE))
        == 1
    )


def _mpirun(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = _environment() | {"MPIRUN_OPTIONS": "--allow-run-as-root --oversubscribe"}
    return subprocess.Popen(
        [LAUNCH / "mpirun.sh", *TINY, *arguments], cwd=directory, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.mpi
def test_mpirun_starts_the_processes_of_one_run(tmp_path: Path) -> None:
    process = _mpirun(tmp_path, "run.dir=run", "train.num_steps=5")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "<stdout>:4 cpu device(s): data 4" in out
    assert _steps(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.mpi
def test_a_signal_to_mpirun_stops_all_with_the_state_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _mpirun(tmp_path, "run.dir=run", "train.num_steps=1_000_000", "checkpoint.every_steps=0")
    _wait("there are steps", lambda: len(_steps(run)) >= 3)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    (step,) = re.findall(r"stopped after step (\d+) of", out)
    assert (run / "checkpoints" / step).is_dir()
