"""The three ways in which a command can fail; `cli.main_of` turns each into an exit code."""

import errno

FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def explain(error: OSError, path: object = None) -> str:
    """The file of an OSError, or `path`, what is wrong, and what helps."""
    cure = "; free space on its disk" if error.errno in FULL else ""
    return f"{error.filename or path}: {error.strerror or error}{cure}"


class UserError(ValueError):
    """Wrong input: one message that says what, got, wanted, where and what to do. Exit code 2."""


class CheckFailed(Exception):
    """A check failed. Exit code 1."""


class DeviceError(RuntimeError):
    """The GPU or its driver failed. Exit code 3."""
