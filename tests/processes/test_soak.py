"""Training that is killed at random moments, also while it saves, ends with the parameters of an unbroken run.

Takes minutes, so that it runs only when it is asked for: `make soak`, with KILLS=30 and SEED=0 unless they are set.
"""

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("KILLS", "30"))
SEED = int(os.environ.get("SEED", "0"))
NUM_PROCESSES = 2
KEYS = (f"train.num_steps={8 * KILLS}", "checkpoint.every_steps=3", "checkpoint.keep=2", "evaluation.every_steps=10")

# Of each attempt the plan says which process is killed, how many of its steps or saves later, and how many seconds
# after that step was dispatched or that save began.
_KILLER = """
import json, os, signal, sys, threading
from jaxpar import checkpoint, step, train

index = int(dict(argument.split("=", 1) for argument in sys.argv[3:]).get("distributed.process_id", 0))
names = os.listdir(DIRECTORY)
attempt = sum(name.startswith(f"started.{index}.") for name in names)
open(os.path.join(DIRECTORY, f"started.{index}.{attempt}"), "w").close()
if index == 0:
    saves = os.path.join(DIRECTORY, "checkpoints")
    left = [name for name in (os.listdir(saves) if os.path.isdir(saves) else []) if not name.isdecimal()]
    with open(os.path.join(DIRECTORY, "attempts"), "a") as file:
        print(json.dumps(left), file=file)
victim, kind, number, seconds = PLAN[attempt] if attempt < len(PLAN) else (None, None, 0, 0)

def counted(what):
    calls = 0
    def call(*arguments, **keys):
        nonlocal calls
        calls += 1
        if calls == number and victim == index:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return what(*arguments, **keys)
    return call

if kind == "save":
    checkpoint.Checkpoints.save = counted(checkpoint.Checkpoints.save)

class Told(step.Step):
    def __init__(self, plan):
        super().__init__(plan)
        if kind == "step":
            self.train = counted(self.train)

train.Step = Told
sys.exit(train.main(sys.argv[2:]))
"""


def _plan() -> list[tuple[int, str, int, float]]:
    chance = random.Random(SEED)
    return [
        (
            chance.randrange(NUM_PROCESSES),
            chance.choice(["save", "save", "step"]),
            chance.randint(1, 3),
            chance.random() * 0.25,
        )
        for _ in range(KILLS)
    ]


def test_killed_again_and_again_it_ends_like_the_unbroken_run(work: Any) -> None:
    processes = ("--processes", str(NUM_PROCESSES))
    status, _, err = work.run("straight", *KEYS, options=processes, timeout=900)
    assert (status, err) == (0, "")
    program = f"DIRECTORY, PLAN = 'killed', {json.dumps(_plan())}\n{_KILLER}"
    options = (*processes, "--max-restarts", str(2 * KILLS))
    status, _, err = work.run("killed", *KEYS, options=options, program=program, timeout=120 * (KILLS + 2))
    assert status == 0, err[-5000:]
    restarts = re.findall(r"^\[launch\] restart .*: process (\d) \(pid \d+\) was killed by SIGKILL$", err, re.MULTILINE)
    attempts = [json.loads(line) for line in Path(work.directory, "killed", "attempts").read_text().splitlines()]
    inside_saves = sum(bool(left) for left in attempts)
    print(f"{len(restarts)} of {KILLS} kills hit, {inside_saves} of them inside a save")
    assert len(restarts) == len(attempts) - 1
    # A kill that is planned after the run's end does not hit.
    assert len(restarts) >= 0.8 * KILLS
    assert set(restarts) == {str(index) for index in range(NUM_PROCESSES)}
    assert inside_saves > 0

    assert work.metrics("killed") == work.metrics("straight")
    found, expected = (work.state(run, 8 * KILLS) for run in ("killed", "straight"))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
