"""Metrics files read back: JSON lines over crashes and resumes, TensorBoard events, and the calls that W&B gets."""

import json
import math
import struct
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.metrics import JsonLinesWriter, TensorBoardWriter, WandbWriter, make_writers
from jaxpar.metrics.writers import heat_map


def _strict_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def _events(directory):
    """(step, tag, value) of the scalars in the TFRecord files: length u64, its CRC u32, event, its CRC u32."""
    from tensorboardX.proto.event_pb2 import Event

    found, sessions = [], []
    for path in sorted(directory.iterdir()):
        data, position = path.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            event = Event.FromString(data[position + 12 : position + 12 + length])
            position += 12 + length + 4
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            sessions += [event.step] if event.HasField("session_log") else []
    return found, sessions


def test_lines_are_there_after_each_write(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(10, {"loss": 3.25, "tokens": 640, "skipped": False})
    assert path.read_text() == '{"step": 10, "loss": 3.25, "tokens": 640, "skipped": false}\n'
    writer.write(20, {"eval/loss": np.float32(0.5), "tokens": np.int64(3), "skipped": np.bool_(True)})
    assert _strict_lines(path)[1] == {"step": 20, "eval/loss": 0.5, "tokens": 3, "skipped": True}
    writer.close()
    writer.close()


def test_values_that_are_not_finite_are_strict_json_and_stay_visible(tmp_path):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "learning_rate": -math.inf, "mfu": np.float32("nan")})
    writer.close()
    (line,) = _strict_lines(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "learning_rate": "-Infinity", "mfu": "NaN"}
    assert float(line["learning_rate"]) == -math.inf


def test_resume_drops_what_will_be_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (10, 20, 20, 30, 40)) + '{"step": 50, "lo')
    writer = JsonLinesWriter(path, start_step=20)
    writer.write(30, {"loss": 2.0})
    writer.close()
    assert [(line["step"], line["loss"]) for line in _strict_lines(path)] == [
        (10, 1.0),
        (20, 1.0),
        (20, 1.0),
        (30, 2.0),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ('{"step": 3}\n', [1, 3]),
        ('{"step": 3}', [1, 3]),
        ('{"step": 3', [1]),
        ("\0\0\0\0", [1]),
        ("\0\0\0\0\n", [1]),
        ('{"step": 300', [1]),
    ],
)
def test_last_line_cut_off_by_a_crash(tmp_path, tail, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    writer = JsonLinesWriter(path, start_step=5)
    writer.write(6, {})
    writer.close()
    assert [line["step"] for line in _strict_lines(path)] == [*kept, 6]


def test_file_is_replaced_in_one_go(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    old = '{"step": 1}\n{"step": 2}\n'
    path.write_text(old)

    def crash(descriptor):
        raise OSError("power failure")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="power failure"):
        JsonLinesWriter(path, start_step=1)
    assert path.read_text() == old


@pytest.mark.parametrize("damage", ["<<<<<<< HEAD", "[1, 2]", '{"loss": 1.0}', '{"step": "2"}'])
def test_damage_in_the_middle_is_an_error_that_keeps_the_file(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n'
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl, line 2, is not a JSON object with a step.*move the file away"
    ):
        JsonLinesWriter(path, start_step=3)
    assert path.read_text() == text


def test_device_arrays_are_refused_instead_of_waited_for(tmp_path):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError, match=r"metric 'loss' is of type \w+; fetch it to a host number"):
        writer.write(1, {"loss": jnp.float32(1.0)})
    with pytest.raises(ValueError, match='must not have the key "step"'):
        writer.write(1, {"step": 2})
    writer.close()
    assert _strict_lines(tmp_path / "metrics.jsonl") == []


def test_tensorboard_events_read_back(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(1, {"loss": 2.5, "tokens": 512, "skipped": True})
    writer.write(2, {"eval/loss": np.float32(1.5), "loss": math.nan})
    writer.close()
    writer.close()
    scalars, _ = _events(tmp_path)
    assert scalars[:4] == [(1, "loss", 2.5), (1, "tokens", 512.0), (1, "skipped", 1.0), (2, "eval/loss", 1.5)]
    assert scalars[4][:2] == (2, "loss")
    assert math.isnan(scalars[4][2])


def test_tensorboard_marks_later_events_as_superseded_on_resume(tmp_path):
    """TensorBoard drops events from the step of a session's start on."""
    writer = TensorBoardWriter(tmp_path, start_step=20)
    writer.write(21, {"loss": 1.0})
    writer.close()
    assert _events(tmp_path) == ([(21, "loss", 1.0)], [21])


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package wandb that records calls."""
    calls = []

    def record(name):
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    def init(**kwargs):
        calls.append(("init", (), kwargs))
        return SimpleNamespace(**{name: record(name) for name in ("define_metric", "log", "finish")})

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return calls


def test_wandb_gets_each_value_with_its_step(tmp_path, wandb):
    writer = WandbWriter(tmp_path, project="reading", config={"train": {"num_steps": 3}})
    writer.write(1, {"loss": np.float32(2.5)})
    writer.close()
    (_, _, start), *rest = wandb
    assert start["project"] == "reading"
    assert start["resume"] == "allow"
    assert start["dir"] == str(tmp_path)
    assert start["config"] == {"train": {"num_steps": 3}}
    assert rest == [
        ("define_metric", ("step",), {}),
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 1, "loss": 2.5},), {}),
        ("finish", (), {}),
    ]


def test_wandb_run_goes_on_under_its_id(tmp_path, wandb):
    for directory in ("one", "one", "two"):
        (tmp_path / directory).mkdir(exist_ok=True)
        WandbWriter(tmp_path / directory, project="p", config={}).close()
    first, again, other = (kwargs["id"] for name, _, kwargs in wandb if name == "init")
    assert first == again != other
    assert (tmp_path / "one" / "wandb_run_id").read_text().strip() == first


@pytest.mark.parametrize(
    ("package", "choice", "setting"),
    [
        ("tensorboardX", {"tensorboard": True, "wandb_project": ""}, r"logging\.tensorboard=true"),
        ("wandb", {"tensorboard": False, "wandb_project": "p"}, r'logging\.wandb_project="p"'),
    ],
)
def test_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, package, choice, setting):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf'{setting} needs {package}, which is not installed: pip install "jaxpar\[trackers\]"'
    with pytest.raises(ValueError, match=message):
        make_writers(tmp_path, **choice, config={}, start_step=0)


def test_a_package_broken_inside_is_not_reported_as_missing(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import a_dependency_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_not_there"):
        WandbWriter(tmp_path, project="p", config={})


def test_make_writers_makes_what_is_asked_for(tmp_path, wandb):
    run_dir = tmp_path / "runs" / "new"
    writers = make_writers(run_dir, tensorboard=True, wandb_project="p", config={"a": 1}, start_step=4)
    for writer in writers:
        writer.write(5, {"loss": 1.5})
        writer.close()
    assert _strict_lines(run_dir / "metrics.jsonl") == [{"step": 5, "loss": 1.5}]
    assert _events(run_dir / "tensorboard") == ([(5, "loss", 1.5)], [5])
    assert ("log", ({"step": 5, "loss": 1.5},), {}) in wandb
    (only,) = make_writers(run_dir, tensorboard=False, wandb_project="", config={}, start_step=5)
    assert isinstance(only, JsonLinesWriter)
    only.close()


def test_writers_made_so_far_are_closed_when_one_fails(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(JsonLinesWriter, "close", lambda self: closed.append(self._file.close()))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs wandb"):
        make_writers(tmp_path, tensorboard=False, wandb_project="p", config={}, start_step=0)
    assert len(closed) == 1


def test_a_table_is_a_list_of_rows_and_a_picture(tmp_path):
    table = np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    writer.write(3, {"loss": 1.0, "experts/load": table})
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 3, "loss": 1.0, "experts/load": [[0.25, 0.75], [0.5, 0.5]],
    }  # fmt: skip
    picture = heat_map(table, cell_pixels=3)
    assert (picture.shape, picture.dtype) == ((6, 6, 3), np.uint8)
    assert picture[0, 0].sum() > picture[3, 0].sum() > picture[0, 3].sum(), "the fuller the darker"
    assert (picture[3:, :3] == picture[3:, 3:]).all()
