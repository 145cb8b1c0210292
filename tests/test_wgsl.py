"""The shaders' text: what browsers refuse and the compiler here does not."""

import re

import pytest
from wgsl_grammar import faults, partial_writes

from lorawgpu.gpu.kernel import SHADERS


@pytest.mark.parametrize(
    "expression",
    ["a >> 4u & 15u", "a & b | c", "a + b << 2u", "a & b == c", "a | b + c", "x << 1u >> 2u", "a && b || c",
     "f(a ^ b & c)", "v[a >> 1u & 3u]", "a & -b * c"],
)  # fmt: skip
def test_what_needs_parentheses_is_found(expression):
    assert faults(f"fn f() {{ let x = {expression}; }}")


@pytest.mark.parametrize(
    "expression",
    ["(a >> 4u) & 15u", "a & b & c", "(a + b) << 2u", "(a & b) == c", "a << 1u < b", "a < b && c < d", "-a & ~b",
     "f(a & b, c | d)", "a * b + c", "array<vec4<f32>, 4>()", "vec2<u32>(a, b) >> vec2(1u)", "a == (b | c)",
     "select(a, b, c > d) + e", "!a && !b", "&x", "f(&x, &y)", "*p + *q", "a[i + 1] & b"],
)  # fmt: skip
def test_what_the_grammar_allows_is_not(expression):
    assert faults(f"fn f() -> u32 {{ var<workgroup> y: array<u32, 4 * 2>; let x = {expression}; return x; }}") == []


def test_every_source_keeps_to_it():
    """Templates as far as they can be read without their values; the kernels fixture looks at what they become."""
    for path in sorted(SHADERS.rglob("*.wgsl*")):
        code = re.sub(r"\{#.*?#\}|\{%.*?%\}", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.S)
        assert faults(re.sub(r"\{\{.*?\}\}", "x", code, flags=re.S)) == [], path.name


SHARED = """var<workgroup> tile: array<array<vec4<f32>, 8>, 4>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> words: array<f32>;
var<workgroup> one: vec4<f32>;
"""


@pytest.mark.parametrize(
    "statement",
    ["tile[i][j].x = 1.0;", "tile[a[i]][j][k] += 1.0;", "out[i].w = x;", "out[i / 2u][i % 2u] = x;", "one.y = x;"],
)
def test_writes_to_a_part_of_a_shared_vector_are_found(statement):
    assert partial_writes(f"{SHARED}fn f() {{ {statement} }}")


@pytest.mark.parametrize(
    "statement",
    [
        "tile[i][j] = v;",
        "out[i] += v;",
        "words[i] = out[i].x;",
        "let same = out[i].x == x;",
        "one = v;",
        "v.x = out[i].y;",
    ],
)
def test_whole_vectors_are_not(statement):
    assert partial_writes(f"{SHARED}fn f() {{ var v = vec4(0.0); {statement} }}") == []
