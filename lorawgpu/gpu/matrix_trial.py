"""`python -m lorawgpu.gpu.matrix_trial INDEX`: try the matrix cores of an adapter, and print the answer as JSON."""

import json
import sys

from lorawgpu.gpu.device import DEFAULT_LIMITS, Device, list_adapters
from lorawgpu.gpu.matrix_cores import FEATURES, TILES, trial


def answer_of(index: int) -> dict:
    """{"tile", "lanes"} of the adapter at `index` of `list_adapters`, or {"reason"}."""
    device = Device(list_adapters()[index], "trial", dict(DEFAULT_LIMITS), required=FEATURES)
    for tile in TILES:
        if lanes := trial(device, tile):
            return {"tile": tile, "lanes": lanes}
    return {"reason": f"no product of tiles of {' or '.join(map(str, TILES))} was exact"}


if __name__ == "__main__":
    print(json.dumps(answer_of(int(sys.argv[1]))), flush=True)
