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


EXIT_CODES = {CheckFailed: 1, UserError: 2, OSError: 2, DeviceError: 3}
INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends with `error`; 1 for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MemoryError):
        return EXIT_CODES[UserError]
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
