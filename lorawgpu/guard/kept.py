"""Objects that live in workers: made there once, from a recipe that is small enough to be sent with each call."""

import contextlib
import itertools
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator

from lorawgpu.guard import memory
from lorawgpu.guard.limits import LOADING
from lorawgpu.guard.status import doing

MOST = 8  # objects of a process; the one that was used longest ago goes first
_objects: OrderedDict[tuple, object] = OrderedDict()
_count = itertools.count()


class Kept:
    """Stands for `build(*args)`: sent to a worker, it arrives as that object. Sent again, as the same one.

    Another `Kept` is another object: the files that it is made from may have changed. They are found from the folder
    that was the current one when this was made.
    """

    def __init__(self, build: Callable, *args: object):
        self._name = os.getpid(), next(_count), current_folder()
        self._recipe = pickle.dumps(_Recipe(build, args))

    def __reduce__(self):
        return _object, (self._name, self._recipe)


class _Recipe:
    """Unpickles to `build(*args)`."""

    def __init__(self, build: Callable, args: tuple):
        self.build, self.args = build, args

    def __reduce__(self):
        return self.build, self.args


def current_folder() -> str | None:
    """None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def enter(folder: str | None) -> None:
    """Make it the current folder, if it is still there."""
    if folder is not None and folder != current_folder():
        with contextlib.suppress(OSError):
            os.chdir(folder)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """In a worker: the time and memory of loading an object, not those of one item."""
    before = doing(LOADING)
    memory.allow_loading()
    yield
    memory.allow_work()
    doing(before)


def _object(name: tuple, recipe: bytes) -> object:
    if name not in _objects:
        here = current_folder()
        enter(name[-1])
        with loading():
            made = pickle.loads(recipe)
        enter(here)
        if len(_objects) >= MOST:
            _objects.popitem(last=False)
        _objects[name] = made
    _objects.move_to_end(name)
    return _objects[name]
