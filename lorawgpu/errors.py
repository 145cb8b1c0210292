"""The three ways in which a command can fail; `cli.main_of` turns each into an exit code."""


class UserError(ValueError):
    """Wrong input: one message that says what, got, wanted, where and what to do. Exit code 2."""


class CheckFailed(Exception):
    """A check failed. Exit code 1."""


class DeviceError(RuntimeError):
    """The GPU or its driver failed. Exit code 3."""
