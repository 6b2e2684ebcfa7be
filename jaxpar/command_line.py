"""What the command lines share: arguments, exit status, and what is set before JAX starts."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from jaxpar.config import Config, ConfigError, dump_toml, help_text, load_config

__all__ = ["USER_ERROR", "UserError", "run_command", "user_errors"]

USER_ERROR = 2


class UserError(Exception):
    """Something that the user can put right; its text is all that is shown."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a ValueError or a missing file inside into a `UserError`: for the checks made before anything is computed."""
    try:
        yield
    except (ValueError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UserError(str(error)) from error


def run_command(
    module: str, description: str | None, command: Callable[[Config], int], arguments: Sequence[str]
) -> int:
    """Loads the configuration that `arguments` name, prepares the backend, and runs `command`; returns the exit status."""
    options = [argument for argument in arguments if argument.startswith("-")]
    rest = [argument for argument in arguments if not argument.startswith("-")]
    try:
        if {"-h", "--help"} & set(options):
            print(f"{(description or '').strip()}\n\n{help_text()}")
            return 0
        unknown = sorted(set(options) - {"--print-config"})
        if unknown:
            raise UserError(f"unknown option {unknown[0]}; there are --help and --print-config")
        if not rest or "=" in rest[0]:
            raise UserError(f"usage: python -m {module} CONFIG.toml [KEY=VALUE ...]   (--help lists every key)")
        config = load_config(rest[0], rest[1:])
        if options:
            print(dump_toml(config), end="")
            return 0
        from jaxpar.backend import prepare

        with user_errors():
            for line in prepare(config.parallel, config.runtime):
                print(line)
        return command(config)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return USER_ERROR
