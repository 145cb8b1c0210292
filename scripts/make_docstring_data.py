"""Make a chat data set from this machine's Python standard library: what does this function do?

    python scripts/make_docstring_data.py [--out out/docstrings] [--held-out 0.1]

The question is a signature, the answer the first paragraph of its docstring. Sources are parsed, never imported
(importing `antigravity` opens a browser). Some top-level modules, chosen by a hash of their name, go to `heldout.jsonl`
as a whole, so that held-out functions have no siblings in the training data; the others go to `train.jsonl`. The same
Python version gives the same bytes.
"""

import argparse
import ast
import hashlib
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

MIN_ANSWER, MAX_ANSWER = 20, 600  # characters; shorter ones say nothing, longer ones are manuals
# tkinter is missing on many machines, and makes up a tenth of all docstrings on others
LEFT_OUT = set("test tests idlelib lib2to3 site-packages dist-packages turtledemo tkinter".split())


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """(module name, file) of every public module of the standard library, sorted by name."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or LEFT_OUT.intersection(parts):
            continue
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            yield ".".join(parts), path


def documented(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(signature, docstring) of the public functions, methods and classes of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _entry(module, node, skip_self=False)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _described(f"class {module}.{node.name}", node)
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)
                    yield from _entry(f"{module}.{node.name}", method, skip_self=not static)


def _entry(owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef, skip_self: bool) -> Iterator[tuple[str, str]]:
    if node.name.startswith("_"):
        return
    arguments = node.args
    first = arguments.posonlyargs or arguments.args
    if skip_self and first:
        del first[0]
    yield from _described(f"{owner}.{node.name}({ast.unparse(arguments)})", node)


def _described(signature: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    if docstring := (ast.get_docstring(node) or "").strip():
        yield signature, docstring


def first_paragraph(docstring: str) -> str | None:
    """The first paragraph on one line; None if it is too short, too long, or shows a session."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph if MIN_ANSWER <= len(paragraph) <= MAX_ANSWER and ">>>" not in paragraph else None


def parsed_modules() -> Iterator[tuple[str, ast.Module]]:
    """(module name, syntax tree) of every public module of this Python's standard library."""
    for module, path in sources(Path(sysconfig.get_path("stdlib"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            yield module, ast.parse(path.read_bytes())


def is_held_out(module: str, fraction: float) -> bool:
    """Whether a top-level module is held out: its name's hash, read as a number in [0, 1), is below the fraction."""
    head = hashlib.sha256(module.split(".")[0].encode()).digest()[:8]
    return int.from_bytes(head, "big") / 2**64 < fraction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/docstrings"))
    parser.add_argument("--held-out", type=float, default=0.1, help="fraction of top-level modules (default 0.1)")
    options = parser.parse_args()
    lines: dict[str, list[str]] = {"train": [], "heldout": []}
    seen = set()
    for module, tree in parsed_modules():
        part = "heldout" if is_held_out(module, options.held_out) else "train"
        for signature, docstring in documented(module, tree):
            answer = first_paragraph(docstring)
            if answer is None or answer in seen:  # identical docstrings are kept once, so that none is in both files
                continue
            seen.add(answer)
            turns = [("user", f"What does this do?\n{signature}"), ("assistant", answer)]
            record = {"messages": [{"role": role, "content": content} for role, content in turns]}
            lines[part].append(json.dumps(record, ensure_ascii=False) + "\n")
    options.out.mkdir(parents=True, exist_ok=True)
    for part, records in lines.items():
        path = options.out / f"{part}.jsonl"
        path.write_bytes("".join(records).encode())
        print(f"{path}: {len(records)} conversations")


if __name__ == "__main__":
    main()
