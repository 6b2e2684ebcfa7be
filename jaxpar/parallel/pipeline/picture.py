"""Rectangles and lines of text, written as an SVG file or, with the extra `plots`, as a PNG file."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Picture", "Rectangle", "Text", "save_png", "svg_text"]

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_BASELINE = 0.36
"""How far below its middle a text's baseline is, in font sizes."""
_PNG_PIXELS = 2
"""For each unit of length."""
_POINTS_PER_INCH = 72


@dataclass(frozen=True)
class Rectangle:
    """Corner at the top left, size, colour as #rrggbb, and what a viewer shows of it when pointed at."""

    x: float
    y: float
    width: float
    height: float
    color: str
    title: str = ""


@dataclass(frozen=True)
class Text:
    """A line whose middle is at height y; `anchor` says which part of it is at x: start, middle or end."""

    x: float
    y: float
    text: str
    size: float
    color: str
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    """Shapes on white, in pixels from the top left, each over those before it."""

    width: float
    height: float
    title: str
    shapes: tuple[Rectangle | Text, ...]


def svg_text(picture: Picture) -> str:
    """The picture as the text of an SVG file."""
    width, height = _number(picture.width), _number(picture.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}" role="img">'
    )
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    shapes = (_svg_rectangle(shape) if isinstance(shape, Rectangle) else _svg_line(shape) for shape in picture.shapes)
    return "\n".join([head, f"<title>{escape(picture.title)}</title>", background, *shapes, "</svg>", ""])


def save_png(picture: Picture, path: Path) -> None:
    """Writes the picture as a PNG file.

    Raises:
      ValueError: Matplotlib is not installed.
    """
    figure_module, patches = (_matplotlib(name) for name in ("matplotlib.figure", "matplotlib.patches"))
    backend = _matplotlib("matplotlib.backends.backend_agg")
    dpi = 100 * _PNG_PIXELS
    figure = figure_module.Figure(figsize=(picture.width / 100, picture.height / 100), dpi=dpi, facecolor="#ffffff")
    backend.FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frame_on=False)
    axes.set(xlim=(0.0, picture.width), ylim=(picture.height, 0.0), xticks=(), yticks=())
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            axes.add_patch(patches.Rectangle((shape.x, shape.y), shape.width, shape.height, color=shape.color, lw=0))
        else:
            _draw_line(axes, shape)
    figure.savefig(path, format="png")


def _svg_rectangle(shape: Rectangle) -> str:
    place = _attributes({"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height})
    title = f"><title>{escape(shape.title)}</title></rect>" if shape.title else "/>"
    return f'<rect {place} rx="2" fill={quoteattr(shape.color)}{title}'


def _svg_line(shape: Text) -> str:
    place = _attributes({"x": shape.x, "y": shape.y + _BASELINE * shape.size, "font-size": shape.size})
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text {place} text-anchor="{shape.anchor}" fill={quoteattr(shape.color)}{weight}>{escape(shape.text)}</text>'
    )


def _draw_line(axes: Any, shape: Text) -> None:
    axes.text(
        shape.x,
        shape.y + _BASELINE * shape.size,
        shape.text,
        fontsize=shape.size * _POINTS_PER_INCH / 100,
        color=shape.color,
        ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
        va="baseline",
        fontweight="bold" if shape.bold else "normal",
        parse_math=False,
    )


def _attributes(values: dict[str, float]) -> str:
    return " ".join(f'{name}="{_number(value)}"' for name, value in values.items())


def _number(value: float) -> str:
    """Two digits behind the point at most: 3, 3.5, 3.25."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _matplotlib(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError(
            'a PNG file needs Matplotlib, which is not installed: pip install "jaxpar[plots]", or write an SVG file'
        ) from error
