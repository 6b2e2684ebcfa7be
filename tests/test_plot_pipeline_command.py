"""`python -m jaxpar.plot_pipeline`: tables, pictures and comparisons, and what a user got wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.table_file import read_table, write_table
from jaxpar.plot_pipeline import main

ROOT = Path(__file__).parents[1]
SIZE = ["--stages", "4", "--microbatches", "8"]


def rows_of(out: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def test_a_table_is_printed(capsys: pytest.CaptureFixture) -> None:
    assert main(["--schedule", "1f1b", *SIZE, "--costs", "1,1,1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "1f1b"
    assert out[4:8] == [
        f"rank {rank}  {line}   {4 - rank} in flight" for rank, line in enumerate(build_schedule("1f1b", 4, 8).lines())
    ]
    assert out[-1] == "1.667 of the ideal time in lockstep with costs 1, 1, 1"


def test_modes_costs_and_hop_count(capsys: pytest.CaptureFixture) -> None:
    assert main(["--schedule", "zb_h1", *SIZE, "--costs=1,2,1", "--mode=ring"]) == 0
    assert capsys.readouterr().out.endswith("1.406 of the ideal time in ring with costs 1, 2, 1\n")
    assert main(["--schedule", "interleaved", *SIZE, "--chunks=2", "--hop=2"]) == 0
    assert "results usable 2 ticks later" in capsys.readouterr().out


def test_all_schedules_are_compared(capsys: pytest.CaptureFixture) -> None:
    assert main([*SIZE, "--chunks", "3", "--compare"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == list(SCHEDULES)
    assert rows["1f1b"] == ["1", "22", "27.3 %", "1.667", "1.667", "1.375", "4", "4", ""]
    assert rows["zb_h1"] == ["1", "27", "11.1 %", "1.125", "1.125", "1.125", "4", "8", ""]
    assert rows["interleaved_aligned"][0] == "3"
    # It has two chunks, whatever is asked for.
    assert rows["zb_v"][:2] == ["2", "51"]
    assert main(["--stages", "4", "--microbatches", "6", "--chunks", "1", "--compare"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["interleaved"][0] == "2"
    assert rows["interleaved"][8].startswith("pipeline.microbatches=6 must be")


def test_auto_takes_the_fastest_that_fits_and_says_why(capsys: pytest.CaptureFixture) -> None:
    assert main([*SIZE, "--chunks=2", "--max-in-flight=7"]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert next(iter(rows)) == "interleaved_aligned"
    assert rows["zb_v"][5] == "it keeps 7.5 activations, more than max_in_flight=7"
    assert "\ninterleaved_aligned\n4 ranks, 8 microbatches, 2 chunks on each rank (loop), aligned\n" in out


def test_tables_and_pictures_are_written_and_ones_own_table_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    table, picture = tmp_path / "mine.txt", tmp_path / "mine.svg"
    assert main(["--schedule", "zb_h2", *SIZE, "--output", str(table)]) == 0
    assert read_table(table) == build_schedule("zb_h2", 4, 8)
    assert main(["--schedule", str(table), "--output", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{picture}: zb_h2, 27 ticks, 1.125 of the ideal time")
    assert picture.read_text().startswith("<svg ")
    assert "27 ticks" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zb_h9", *SIZE], 'pipeline.schedule="zb_h9" is unknown'),
        (["--schedule", "gpipe", *SIZE, "--chunks=0"], "--chunks=0 must be 1 or more"),
        (["--stages=-1", "--microbatches=2", "--compare"], "--stages=-1 must be 1 or more"),
        (["--schedule", "none.txt"], "none.txt is no file; --schedule is a file with a table, or one of auto, naive"),
        (["--schedule", "gpipe", "--stages=4"], "--microbatches is missing; write --stages P --microbatches M"),
        (["--compare"], "--stages is missing"),
        ([*SIZE, "--max-in-flight=0.5"], "every schedule keeps more activations of a stage than max_in_flight=0.5"),
        ([*SIZE, "--output=picture.pdf"], "--output=picture.pdf must end in .svg, .png, .txt"),
        ([*SIZE, "--output=nowhere/picture.svg"], "nowhere/picture.svg: No such file or directory"),
    ],
)  # fmt: skip
def test_what_the_user_got_wrong_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(('pipeline.schedule="auto": ' if "every" in message else "") + message)
    assert len(err.splitlines()) == 1


def test_a_file_says_its_numbers_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_table(build_schedule("gpipe", 2, 2), tmp_path / "t.txt")
    assert main(["--schedule", str(tmp_path / "t.txt"), "--hop=2"]) == 2
    assert capsys.readouterr().err.startswith(f"--hop goes with a schedule by name, but {tmp_path / 't.txt'} is a file")
    (tmp_path / "t.txt").write_text("0: F0 B1\n")
    assert main(["--schedule", str(tmp_path / "t.txt")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 't.txt'}, line 1: B0a (rank 0): it never runs\n"


@pytest.mark.parametrize("costs", ["1,2", "1,2,x", "1,-1,1", "1,nan,1"])
def test_costs_are_three_numbers(costs: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SIZE, f"--costs={costs}"])
    assert stopped.value.code == 2
    assert f"argument --costs: '{costs}' must be three numbers of 0 or more, as 1,1,1" in capsys.readouterr().err


def test_the_command_needs_no_jax(tmp_path: Path) -> None:
    code = "import runpy, sys; sys.modules['jax'] = None; runpy.run_module('jaxpar.plot_pipeline', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, "--schedule", "zb_v", *SIZE, "--chunks", "2", "--output", "v.svg"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "v.svg: zb_v, 51 ticks, 1.062 of the ideal time in lockstep with costs 1, 1, 1\n"
    wrong = subprocess.run(
        [sys.executable, "-m", "jaxpar.plot_pipeline", "--schedule", "zb_v", *SIZE, "--chunks", "3"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert wrong.stderr.startswith('pipeline.chunks=3 does not go with pipeline.schedule="zb_v"; legal values: 2; ')
    assert "Traceback" not in wrong.stderr
