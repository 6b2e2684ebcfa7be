"""A progress bar over bytes, for work that is done once before training starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Advance", "progress_bar"]

Advance = Callable[[int], None]
"""Is told how many more bytes are done."""


@contextmanager
def progress_bar(description: str, total_bytes: int, show: bool) -> Iterator[Advance]:
    """Yield a function that moves a bar on stderr by so many bytes; without `show` it draws nothing."""
    if not show:
        yield lambda num_bytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
