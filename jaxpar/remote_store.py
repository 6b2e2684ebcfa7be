"""Checkpoints behind a URL, with whatever fsspec knows: S3, Google Cloud Storage, and others.

Object stores have no renaming and no appending, and what reads and writes arrays knows few of them. So a checkpoint
is written to a directory of the run first and then uploaded, file by file, its `commit_success.txt` last; to be read
it is downloaded again. Neither needs more memory than a part of a file. An upload that was cut off is made up for when
the run is opened the next time, from the copy that stays until it has succeeded. One process does all that: of several
hosts, all must see the run's directory.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from jaxpar.checkpoint_store import ASIDE, COMMITTED, CheckpointStore
from jaxpar.config import Config
from jaxpar.config.credentials import masked

__all__ = ["RemoteStore", "open_store", "store_of"]

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


def open_store(directory: str, staging: Path) -> CheckpointStore:
    """The checkpoints in a directory or behind a URL, of which copies are in `staging` for a while.

    Raises:
      ValueError: a package is missing for the kind of URL, or there is no such kind.
    """
    if "://" not in directory:
        return CheckpointStore(directory)
    scheme = directory.partition("://")[0]
    for package in ("fsspec", *filter(None, [_PACKAGES.get(scheme)])):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"checkpoint.directory={masked(directory)!r} needs {package}, which is not installed: "
                'pip install "jaxpar[cloud]"'
            )
    return RemoteStore(directory, staging)


def store_of(config: Config, run_dir: Path, staging: Path) -> CheckpointStore:
    """The checkpoints of the run in `run_dir`."""
    where = config.checkpoint.directory
    if "://" in where:
        return open_store(where, staging)
    return CheckpointStore(str(Path(where or run_dir / "checkpoints").expanduser().absolute()))


class RemoteStore(CheckpointStore):
    """The checkpoints behind `url`; `directory` is where they are on their way.

    Raises:
      ValueError: nothing knows this kind of URL.
    """

    def __init__(self, url: str, staging: Path) -> None:
        import fsspec

        super().__init__(str(staging.absolute()))
        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ValueError(f"checkpoint.directory={masked(url)!r} cannot be opened: {masked(str(error))}") from error

    def __str__(self) -> str:
        return masked(self.url)

    def prepare(self) -> None:
        """Makes the directories, and uploads what an earlier process could not."""
        super().prepare()
        self._files.makedirs(self._root, exist_ok=True)
        for step in super().steps():
            if super().is_complete(step):
                self.publish(step)
            else:
                super().remove(step)

    def steps(self) -> list[int]:
        """Steps of which something is behind the URL, in order."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        return sorted(int(name) for name in self._remote_names() if name.isdecimal())

    def is_complete(self, step: int) -> bool:
        """Whether all of it is behind the URL."""
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._remote(step)}/{COMMITTED}"))

    def read_text(self, step: int, name: str) -> str:
        """A small file of a checkpoint."""
        return self._files.cat_file(f"{self._remote(step)}/{name}").decode()

    def size_bytes(self, step: int) -> int:
        """Bytes behind the URL."""
        return int(self._files.du(self._remote(step)))

    def publish(self, step: int) -> None:
        """Uploads a checkpoint that is complete here, and removes the copy, with those whose upload failed before."""
        local = self.path(step)
        for earlier in super().steps():
            if earlier < step:
                super().remove(earlier)
        self._remove_remote(step)
        files = sorted(path for path in local.rglob("*") if path.is_file() and path.name != COMMITTED)
        targets = [f"{self._remote(step)}/{path.relative_to(local).as_posix()}" for path in files]
        self._files.put([str(path) for path in files], targets)
        self._files.put_file(str(local / COMMITTED), f"{self._remote(step)}/{COMMITTED}")
        shutil.rmtree(local)

    def fetch(self, step: int) -> None:
        """Downloads a checkpoint to where its arrays are read."""
        local = self.path(step)
        shutil.rmtree(local, ignore_errors=True)
        for source in self._files.find(self._remote(step)):
            target = local / source[len(self._remote(step)) + 1 :]
            # The mark of a complete checkpoint stays away: what is here is a copy, which need not be uploaded again.
            if target.name != COMMITTED:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(source, str(target))

    def release(self, step: int) -> None:
        """Removes the copy that was fetched."""
        shutil.rmtree(self.path(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Removes it behind the URL, its mark of a complete checkpoint first."""
        self._remove_remote(step)

    def set_aside(self, step: int) -> None:
        """Gives it another name behind the URL."""
        aside = f"{self._remote(step)}{ASIDE}"
        if self._files.exists(aside):
            self._files.rm(aside, recursive=True)
        self._files.mv(self._remote(step), aside, recursive=True)
        self._files.invalidate_cache()

    def aside(self) -> list[str]:
        """Names of what was set aside behind the URL."""
        return sorted(name for name in self._remote_names() if name.endswith(ASIDE))

    def remove_aside(self, name: str) -> None:
        """Removes what was set aside behind the URL."""
        self._files.rm(f"{self._root}/{name}", recursive=True)
        self._files.invalidate_cache()

    def _remote_names(self) -> list[str]:
        return [entry.rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._root, detail=False)]

    def _remove_remote(self, step: int) -> None:
        remote: Any = self._remote(step)
        self._files.invalidate_cache()
        if self._files.exists(f"{remote}/{COMMITTED}"):
            self._files.rm_file(f"{remote}/{COMMITTED}")
        if self._files.exists(remote):
            self._files.rm(remote, recursive=True)
        self._files.invalidate_cache()

    def _remote(self, step: int) -> str:
        return f"{self._root}/{step}"
