"""How widely the generators of the tests search. CI takes one seed; LORAWGPU_TEST_SEEDS=15 takes fifteen."""

import os


def seeds() -> range:
    return range(int(os.environ.get("LORAWGPU_TEST_SEEDS", "1")))
