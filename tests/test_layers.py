"""Import rules: nothing imports upwards, no cycles, wgpu only under `gpu/`, one meaning per class name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lorawgpu"
ROOT = "lorawgpu"
MOST_AT_THE_TOP = 8  # modules; everything else has a package

# From the bottom up. A package imports itself and packages on lines above, never others on its own line or below.
LAYERS = (
    ("errors", "reference"),
    (ROOT, "util"),  # the package itself: its version, UserError, and `load` on first use
    ("files", "guard"),
    ("families", "gpu"),
    ("chat", "lora", "ops", "tokenizer"),
    ("mpi", "optim", "weights"),
    ("data",),
    ("config",),
    ("model",),
    ("backward",),
    ("engine",),
    ("generate",),
    ("train",),
    ("report",),
    ("api",),
    ("evaluate", "export", "init", "serve", "verify"),
    ("doctor",),
    ("bench",),
    ("cli",),
    ("__main__",),  # of every command too
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
JUDGES = ("doctor", "reference")  # packages that may import the reference
# Imported inside a function, on first use
FACADE = {ROOT: ("lorawgpu.api.model",), "lorawgpu.train": ("lorawgpu.api.training",)}
# These must work without a GPU, so they reach no module that imports wgpu.
HOST = (
    "chat", "cli", "config", "data", "families", "files", "guard", "lora.peft_dir", "optim.schedule", "report",
    "tokenizer", "train.checkpoint", "train.metrics", "util", "weights.gguf_checkpoint", "weights.hf_folder",
    "weights.loader",
)  # fmt: skip
RAW = {"BufferUsage", "begin_compute_pass", "create_command_encoder", "map_async", "queue", "wgpu", "write_buffer"}


def read_sources() -> dict[str, str]:
    """Every module of the package by its dotted name."""
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return sources


def layer_of(module: str) -> str:
    """The name of a module's package in LAYERS, if it is there."""
    parts = module.split(".")
    return "__main__" if parts[-1] == "__main__" else parts[1] if len(parts) > 1 else ROOT


def imports(tree: ast.AST, modules) -> Iterator[str]:
    """All modules that a module imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, except those that the facade imports on first use."""
    graph = {}
    for module, source in sources.items():
        found = {name for name in imports(ast.parse(source), sources) if name in sources}
        graph[module] = found - set(FACADE.get(module, ()))
    return graph


def problems(sources: dict[str, str]) -> list[str]:
    """Violations of the import rules in a package, one sentence each."""
    found, graph = [], graph_of(sources)
    for module, source in sources.items():
        tree, mine = ast.parse(source), layer_of(module)
        if mine not in LEVEL:
            found.append(f"{module}: {mine} stands in no layer")
            continue
        for name in sorted(graph[module]):
            other = layer_of(name)
            if other == "__main__":
                found.append(f"{module} imports {name}: a __main__ is imported by no module")
            elif other != mine and LEVEL.get(other, 0) >= LEVEL[mine]:
                found.append(f"{module} imports {name}, which is not below it")
            if other == "reference" and mine not in JUDGES and not module.startswith("lorawgpu.doctor."):
                found.append(f"{module} imports {name}: the reference judges, production does without it")
        found += [f"{module} has a relative import" for node in ast.walk(tree) if getattr(node, "level", 0)]
        if mine != "gpu":
            found += [f"{module} touches {what}: wgpu belongs under gpu/" for what in raw_wgpu(tree)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle: {' -> '.join(error.args[1])}")
    return found


def raw_wgpu(tree: ast.AST) -> list[str]:
    """The parts of wgpu that a module imports, or reaches through an object."""
    names = [name for name in imports(tree, ()) if name and name.split(".")[0] == "wgpu"]
    return sorted({*names, *(node.attr for node in ast.walk(tree) if getattr(node, "attr", None) in RAW)})


def test_the_package_keeps_its_layers():
    assert problems(read_sources()) == []


def test_every_package_has_a_layer():
    packages = {layer_of(module) for module in read_sources()}
    assert packages == set(LEVEL)


WRONG = {
    "upwards": ({"lorawgpu.ops.a": "from lorawgpu.model import block", "lorawgpu.model.block": ""}, "not below it"),
    "sideways": ({"lorawgpu.lora.a": "import lorawgpu.ops.b", "lorawgpu.ops.b": ""}, "not below it"),
    "in a function": (
        {"lorawgpu.ops.a": "def f():\n    from lorawgpu.data import x", "lorawgpu.data": ""},
        "not below it",
    ),
    "a cycle": (
        {"lorawgpu.ops.a": "import lorawgpu.ops.b", "lorawgpu.ops.b": "from lorawgpu.ops import a"},
        "a cycle: lorawgpu.ops.",
    ),
    "relative": ({"lorawgpu.ops.a": "from . import b"}, "has a relative import"),
    "the reference": ({"lorawgpu.ops.a": "import lorawgpu.reference.a", "lorawgpu.reference.a": ""}, "judges"),
    "a command": (
        {"lorawgpu.doctor.__main__": "from lorawgpu.verify.__main__ import f", "lorawgpu.verify.__main__": ""},
        "imported by no module",
    ),
    "wgpu": ({"lorawgpu.ops.a": "import wgpu"}, "touches wgpu"),
    "a part of wgpu": ({"lorawgpu.ops.a": "from wgpu.backends import x"}, "touches wgpu.backends"),
    "an encoder": ({"lorawgpu.ops.a": "device.wgpu.create_command_encoder()"}, "touches create_command_encoder"),
    "a queue": ({"lorawgpu.ops.a": "device.queue.submit([])"}, "touches queue"),
    "a new package": ({"lorawgpu.attic.a": ""}, "stands in no layer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_import_is_found(case):
    sources, words = WRONG[case]
    assert any(words in problem for problem in problems(sources))


def test_right_imports_are_none():
    sources = {"lorawgpu.ops.a": "from lorawgpu.gpu import Plan\nimport numpy\nfrom lorawgpu.ops import b"}
    sources |= {
        "lorawgpu.gpu": "import wgpu",
        "lorawgpu.ops.b": "",
        "lorawgpu.verify.__main__": "import lorawgpu.ops.a",
    }
    sources |= {"lorawgpu.doctor.a": "import lorawgpu.reference.b", "lorawgpu.reference.b": ""}
    assert problems(sources) == []


def at_import(source: str, modules) -> set[str]:
    """Modules imported together with a module: imports outside functions and `if TYPE_CHECKING`."""
    statements = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom | ast.Try)]
    return {name for statement in statements for name in imports(statement, modules)}


def test_the_host_side_needs_no_gpu():
    sources = read_sources()
    direct = {module: at_import(source, sources) for module, source in sources.items()}
    assert any("wgpu" in names for names in direct.values())
    for host in HOST:
        waiting = [m for m in sources if f"{m}.".startswith(f"lorawgpu.{host}.") and not m.endswith("__main__")]
        assert waiting, host
        seen = set(waiting)
        while waiting:
            module = waiting.pop()
            assert not any(name.split(".")[0] == "wgpu" for name in direct[module]), f"{host} imports wgpu, by {module}"
            packages = {name.rpartition(".")[0] for name in direct[module]}  # their __init__ runs first
            new = {name for name in direct[module] | packages if name in sources} - seen
            seen |= new
            waiting += new


def test_few_modules_stand_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for module, source in read_sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
