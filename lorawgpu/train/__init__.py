"""`lorawgpu train`: from a config to an adapter. The package can be called: `lorawgpu.train(config)`."""

import sys
from types import ModuleType


class _Callable(ModuleType):
    """A package that is a function too: once it is imported, `lorawgpu.train` means the package."""

    def __call__(self, config, *, on_step=None, resume=None, **options):
        """See `lorawgpu.api.training.train`."""
        from lorawgpu.api.training import train  # on first use: the parts of this package do without it

        return train(config, on_step=on_step, resume=resume, **options)


sys.modules[__name__].__class__ = _Callable
