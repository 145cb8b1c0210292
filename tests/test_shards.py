"""A sharded model: its index, paths outside the folder, and damage."""

import json

import numpy as np
import pytest
from test_loader import DOWN, GOLDEN, copy_case, error_of, read_tensors, write_tensors

from lorawgpu.weights.loader import open_checkpoint


def split(folder, count=2):
    """Rewrite a folder as `count` shards with an index; returns the index's path."""
    tensors = read_tensors(folder)
    weight_map = {}
    for i in range(count):
        names = list(tensors)[i::count]
        shard = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write_tensors(folder / shard, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_equal_one_file(tmp_path):
    folder = copy_case("bitnet_packed", tmp_path)
    split(folder)
    whole, shards = open_checkpoint(GOLDEN / "bitnet_packed"), open_checkpoint(folder)
    np.testing.assert_array_equal(whole.ternary(DOWN).packed, shards.ternary(DOWN).packed)
    np.testing.assert_array_equal(whole.dense("model.norm.weight").data, shards.dense("model.norm.weight").data)


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "C:x.safetensors", "x\\y.safetensors",
           3, ["a"], "shard.bin"]  # fmt: skip


@pytest.mark.parametrize("shard", OUTSIDE)
def test_a_shard_outside_the_folder_is_rejected(tmp_path, shard):
    folder = copy_case("bitnet_packed", tmp_path)
    index = split(folder)
    data = json.loads(index.read_text())
    data["weight_map"][DOWN] = shard
    index.write_text(json.dumps(data))
    assert "not the name of a .safetensors file in this folder" in error_of(folder)


def test_damaged_index(tmp_path):
    folder = copy_case("bitnet_packed", tmp_path)
    index = split(folder)
    data = json.loads(index.read_text())
    first, second = sorted(set(data["weight_map"].values()))
    data["weight_map"] |= {DOWN: second if data["weight_map"][DOWN] == first else first}
    index.write_text(json.dumps(data))
    assert DOWN in error_of(folder)
    (folder / second).unlink()
    assert second in error_of(folder)
    index.write_text('{"weight_map": []}')
    assert "weight_map" in error_of(folder)
