"""Two processes save and restore one run: damage that one of them meets sends both back to the checkpoint before."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = """
[model]
name = "transformer"
num_layers = 1
embed_dim = 16
num_heads = 2
mlp_dim = 32
dropout = 0.1
[data]
sequence_length = 32
tokenizer = { name = "bytes" }
[train]
num_steps = 6
batch_size = 8
[schedule]
name = "constant"
warmup_steps = 2
[checkpoint]
every_steps = 2
"""

# One of several processes: it saves a state as of steps 2 and 4, and looks for where to go on. The second process
# cannot read step 4.
_PROCESS = """
import contextlib, dataclasses, json, os, pathlib, sys
import jax
index, count, address, devices, cache, *overrides = sys.argv[1:]
index, count, devices = int(index), int(count), int(devices)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
from jaxpar import checkpoint
from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, Notes, Retention
from jaxpar.config import load_config
from jaxpar.data import make_tokenizer
from jaxpar.parallel.agreement import agreed
from jaxpar.plan import make_plan
from jaxpar.processes import joined, placeless
from jaxpar.resume import find_start, stored_config
from jaxpar.state import abstract_state, init_state, optimizer_of, state_extents

original = checkpoint.read_arrays
def read_arrays(store, notes, *others):
    if index == 1 and notes.step == 4:
        raise DamagedCheckpointError("it cannot be read: the disk of this host alone")
    return original(store, notes, *others)
checkpoint.read_arrays = read_arrays

place = [f'distributed.coordinator_address="{address}"', f"distributed.num_processes={count}"]
config = load_config("run.toml", [*overrides, *place, f"distributed.process_id={index}"])
entered = contextlib.ExitStack()
entered.enter_context(joined(config, lambda status, why: os._exit(status)))
config = placeless(config)
plan = make_plan(config, jax.devices(), 257)
optimizer = optimizer_of(plan)
tokenizer = make_tokenizer(config.data, show_progress=False)
events, failure = [], ""
record = lambda event, **details: events.append([event, details.get("step")])
directory = CheckpointStore(str(pathlib.Path("checkpoints").absolute()))
with checkpoint.open_checkpoints(directory, Retention(3), timeout_seconds=60, record=record) as opened:
    if count > 1:
        state = init_state(plan, optimizer)
        extents = state_extents(plan, abstract_state(plan, optimizer))
        add = jax.jit(lambda x: x + 2, out_shardings=plan.replicated)
        for step in (2, 4):
            state = dataclasses.replace(state, step=add(state.step))
            notes = Notes(
                step=step, config=stored_config(config), tokenizer=tokenizer.digest, data="",
                padded_vocab_size=plan.padded_vocab_size, num_updates=step, next_sequence=8 * step, loss=None,
                saved_at="", events="", arrays={},
            )
            opened.save(state, notes, extents)
            opened.finish()
        # A directory that cannot be written, which process 0 alone sees.
        directory = pathlib.Path("checkpoints")
        if index == 0:
            directory.rename("away")
            directory.write_text("")
        agreed("gone")
        opened.save(state, dataclasses.replace(notes, step=6), extents)
        try:
            opened.finish()
        except checkpoint.SaveFailedError as error:
            failure = str(error)
        agreed("noticed")
        if index == 0:
            directory.unlink()
            pathlib.Path("away").rename(directory)
        agreed("back")
    start = find_start(plan, optimizer, tokenizer.digest, "", opened, saved_before=False, record=record)
entered.close()
print(json.dumps({"step": start.step, "messages": start.messages, "events": events, "failure": failure}))
"""


def _processes(directory: Path, *overrides: str, processes: int, devices: int) -> list[tuple[int, str, str]]:
    """Status, output and errors of each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NPROC": "16"}
    environment.pop("XLA_FLAGS", None)
    cache = str(ROOT / ".cache" / "tests" / "jax")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(index), str(processes), address, str(devices), cache, *overrides],
            cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    ended = []
    try:
        for process in started:
            out, err = process.communicate(timeout=120)
            ended.append((process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return ended


def test_processes_agree_on_what_they_restore_and_others_can_take_it_over(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    ended = _processes(tmp_path, "parallel.fsdp=4", processes=2, devices=2)
    for status, _, err in ended:
        assert status == 0, err
    found = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
    assert found[0] == found[1] | {"events": found[0]["events"]}
    assert found[0]["failure"].startswith("the state of step 6 could not be saved: process 0: FileExistsError: ")
    assert found[0]["step"] == 2
    assert found[0]["messages"][0].endswith("is damaged: process 1: it cannot be read: the disk of this host alone")
    assert found[0]["messages"][2] == "continuing after step 2 of 6"
    kinds = ["save", "saved"] * 2 + ["save", "save failed", "damaged checkpoint", "restore", "fallback"]
    assert [kind for kind, _ in found[0]["events"]] == kinds

    ((status, out, err),) = _processes(tmp_path, "parallel.tensor=2", processes=1, devices=2)
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["step"] == 2, "every array has the digest that two processes gave it"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "4.damaged"]
