"""A drawing shows every task in its place, by colour, with the schedule's numbers."""

import sys
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.drawing import draw, draw_text
from jaxpar.parallel.pipeline.picture import Picture, Rectangle, Text, save_png, svg_text

VEE = build_schedule("zb_v", 4, 8, 2)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_text_has_a_row_a_rank_with_its_peak() -> None:
    assert draw_text(build_schedule("1f1b", 2, 3)).splitlines() == [
        "1f1b",
        "2 ranks, 3 microbatches",
        "8 ticks, 25.0 % of all cells idle, 2 microbatches in flight at most",
        "",
        "rank 0  F0 F1  . B0 F2 B1  . B2   2 in flight",
        "rank 1   . F0 B0 F1 B1 F2 B2  .   1 in flight",
    ]
    assert draw_text(VEE).splitlines()[1:3] == [
        "4 ranks, 8 microbatches, 2 chunks on each rank (vee), split backward",
        "51 ticks, 5.9 % of all cells idle, 8 chunks in flight at most (4 whole stages)",
    ]
    one = draw_text(build_schedule("naive", 1, 1, hop=2)).splitlines()
    assert one[1] == "1 rank, 1 microbatch, results usable 2 ticks later, aligned"
    assert one[2] == "2 ticks, 0.0 % of all cells idle, 1 microbatch in flight at most"


def test_every_task_has_a_cell_in_its_row_and_column() -> None:
    shapes = draw(VEE).shapes
    cells = {shape.title: shape for shape in shapes if isinstance(shape, Rectangle) and shape.title}
    names = {1: "forward", 2: "backward", 3: "weight gradient"}
    assert len(cells) == VEE.geometry.num_tasks
    rows, columns = (sorted({getattr(cell, name) for cell in cells.values()}) for name in ("y", "x"))
    assert (len(rows), len(columns)) == (4, VEE.num_ticks)
    for (kind, microbatch, stage), tick in VEE.ticks.items():
        cell = cells[f"{names[kind]}, microbatch {microbatch}, stage {stage}, tick {tick}"]
        assert (cell.x, cell.y) == (columns[tick], rows[VEE.geometry.rank(stage)])
        numbers = [shape.text for shape in shapes if isinstance(shape, Text) and _is_inside(shape, cell)]
        assert numbers == [str(microbatch)]


def _is_inside(text: Text, cell: Rectangle) -> bool:
    return cell.x < text.x < cell.x + cell.width and cell.y < text.y < cell.y + cell.height


def test_kinds_chunks_and_microbatches_have_colours_of_their_own() -> None:
    cells = [shape for shape in draw(VEE).shapes if isinstance(shape, Rectangle) and shape.title]
    colors = {shape.title.partition(", tick")[0]: shape.color for shape in cells}
    of_rank_0 = [
        colors[f"{kind}, microbatch {microbatch}, stage {stage}"]
        for kind, microbatch, stage in product(("forward", "backward", "weight gradient"), range(8), (0, 7))
    ]
    assert len(set(of_rank_0)) == 3 * 8 * 2
    assert colors["forward, microbatch 3, stage 0"] == colors["forward, microbatch 3, stage 2"]
    # The legend has all of them: eight shades for each kind and chunk.
    legend = {shape.color for shape in draw(VEE).shapes if isinstance(shape, Rectangle) and not shape.title}
    assert set(of_rank_0) < legend


def test_numbers_can_be_read_on_their_colour() -> None:
    """Contrast of 4.5 and more, as WCAG 2 asks."""
    for schedule in (VEE, build_schedule("gpipe", 2, 20), build_schedule("interleaved", 2, 4, 5)):
        shapes = draw(schedule).shapes
        for cell, text in pairwise(shapes):
            if isinstance(cell, Rectangle) and cell.title and isinstance(text, Text):
                bright, dark = sorted((_luminance(cell.color), _luminance(text.color)), reverse=True)
                assert (bright + 0.05) / (dark + 0.05) >= 4.5, (cell.color, text.color)


def _luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(factor * part for factor, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_long_schedules_are_drawn_with_narrow_cells_without_numbers() -> None:
    short, long = (draw(build_schedule("1f1b", 4, microbatches)) for microbatches in (8, 100))
    assert long.width < 2200
    assert short.width < long.width
    assert not [shape for shape in long.shapes if isinstance(shape, Text) and shape.text == "99"]
    ticks = [shape.text for shape in long.shapes if isinstance(shape, Text) and shape.anchor == "middle"]
    assert ticks[:3] == ["0", "5", "10"]


def test_everything_is_inside_the_picture() -> None:
    for schedule in (VEE, build_schedule("naive", 1, 1), build_schedule("interleaved", 3, 6, 6)):
        picture = draw(schedule, "with a note")
        for shape in picture.shapes:
            right = shape.x + (shape.width if isinstance(shape, Rectangle) else 0.0)
            assert 0.0 <= shape.x <= right <= picture.width
            assert 0.0 <= shape.y <= picture.height - 8.0


def test_svg_is_xml_with_the_same_shapes() -> None:
    picture = draw(VEE, "costs < 2 & more")
    root = ElementTree.fromstring(svg_text(picture))
    assert (float(root.get("width", 0)), float(root.get("height", 0))) == (picture.width, picture.height)
    # The background is one more.
    rectangles = root.findall(f"{SVG}rect")
    assert len(rectangles) == 1 + sum(isinstance(shape, Rectangle) for shape in picture.shapes)
    texts = [element.text for element in root.findall(f"{SVG}text")]
    assert texts == [shape.text for shape in picture.shapes if isinstance(shape, Text)]
    assert "51 ticks, 5.9 % of all cells idle, 8 chunks in flight at most (4 whole stages); costs < 2 & more" in texts
    titles = {element.findtext(f"{SVG}title"): element.get("fill") for element in rectangles}
    assert titles["forward, microbatch 0, stage 0, tick 0"] == next(
        shape.color for shape in picture.shapes if isinstance(shape, Rectangle)
    )


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ValueError, match=r'needs Matplotlib, which is not installed: pip install "jaxpar\[plots\]"'):
        save_png(draw(VEE), tmp_path / "picture.png")


def test_png_has_the_same_shapes(tmp_path: Path) -> None:
    image_module = pytest.importorskip("matplotlib.image")
    shapes = (
        Rectangle(10.0, 5.0, 20.0, 10.0, "#ff0000"),
        Rectangle(20.0, 5.0, 10.0, 10.0, "#0000ff"),
        Text(60.0, 30.0, "$x", 12.0, "#000000", "middle", bold=True),
    )
    save_png(Picture(100.0, 50.0, "two", shapes), tmp_path / "picture.png")
    pixels = image_module.imread(tmp_path / "picture.png")[..., :3]
    assert pixels.shape == (100, 200, 3)
    assert pixels[20, 30].tolist() == [1.0, 0.0, 0.0]
    assert pixels[20, 50].tolist() == [0.0, 0.0, 1.0]
    assert pixels[20, 70].tolist() == [1.0, 1.0, 1.0]
    ink = (pixels < 0.5).all(axis=2).nonzero()
    assert ink[0].size > 20
    assert abs(ink[1].mean() - 120) < 4
    assert abs(ink[0].mean() - 60) < 6
