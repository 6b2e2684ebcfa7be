"""The exit statuses of the commands."""

__all__ = ["FAULT", "INTERRUPTED", "STOPPED", "USER_ERROR"]

FAULT = 1
"""A check has failed, or the run cannot go on."""
USER_ERROR = 2
"""Something that the user can put right."""
STOPPED = 75
"""A signal ended the run with nothing lost (EX_TEMPFAIL): the same command goes on."""
INTERRUPTED = 130
"""Ctrl-C where there was nothing to save, or a second one."""
