"""The messages that the package can raise, read from its source, and which of them a printed text shows."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import lorawgpu

PACKAGE = Path(lorawgpu.__file__).parent
ERRORS, FAILURES = {"UserError"}, {"CheckFailed", "DeviceError"}  # exit code 2; 1 and 3
LETTERS = (
    12  # a message with fewer of its own says the rest by what a name or a function stands for, which is looked up
)
DEPTH = 3  # of functions that return what functions return


@dataclass(frozen=True)
class Template:
    """A message as the source has it: its literal `pieces`, and as `text` with {expressions} between them."""

    place: str  # file:line, to find it; nothing depends on it
    text: str
    pieces: tuple

    @property
    def letters(self) -> int:
        return _letters(self.pieces)

    @cached_property
    def _pattern(self):
        return re.compile(".*?".join(f"({re.escape(piece)})" for piece in self.pieces), re.DOTALL)

    def taken_from(self, printed: str) -> str | None:
        """`printed` with the pieces blanked out; None where it does not hold all of them in their order."""
        found = self._pattern.search(printed) if self.pieces else None
        for group in range(1, len(self.pieces) + 1 if found else 0):
            start, end = found.span(group)
            printed = printed[:start] + "\0" * (end - start) + printed[end:]
        return printed if found else None


def shown_by(printed: str, templates: list[Template]) -> set[Template]:
    """The templates that a printed text was made of: the longest that it holds, and so on for what is left of it.

    So a message within another ("the base model x: x: no such file") shows both, and "is missing" is not shown by a
    longer message that ends like it.
    """
    shown = set()
    while fitting := [(t, rest) for t in templates if (rest := t.taken_from(printed)) is not None]:
        most = max(t.letters for t, _ in fitting)
        best = [(t, rest) for t, rest in fitting if t.letters == most]
        shown |= {t for t, _ in best}
        printed = best[0][1]
    return shown


def _letters(pieces) -> int:
    return sum(c.isalpha() for piece in pieces for c in piece)


class SourceTree:
    """The package's syntax trees, and the messages that they hold."""

    def __init__(self, folder: Path = PACKAGE):
        self.trees = {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in folder.rglob("*.py")}
        nodes = list(chain.from_iterable(map(ast.walk, self.trees.values())))
        self.classes = [n for n in nodes if isinstance(n, ast.ClassDef)]
        self.functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]

    def templates(self, kinds: set[str]) -> list[Template]:
        """Every message given to an exception of these kinds, to a subclass, or to a function that returns one."""
        kinds = kinds | {c.name for c in self.classes if kinds & {_last(base) for base in c.bases}}
        helpers = {f.name for f in self.functions if f.returns and _last(f.returns) in kinds}
        found = []
        for file, tree in sorted(self.trees.items()):
            for call, function in _calls(tree):
                if _last(call.func) in kinds | helpers:
                    messages = [m for argument in call.args for m in self._expand(argument, function, tree)]
                    worded = [m for m in messages if _letters(_literals(m))]
                    if not worded and _last(call.func) in helpers:
                        continue  # the words are the helper's own
                    found += [_template(f"{file}:{call.lineno}", m) for m in worded or messages[:1]]
        return found

    def _expand(self, node, function, tree, depth=DEPTH) -> list[list]:
        """The parts of each message that an expression can be."""
        parts = _parts(node)
        if _letters(_literals(parts)) >= LETTERS or not depth:
            return [parts]
        for i, part in enumerate(parts):
            values = [] if isinstance(part, str) else self._values(part, function, tree)
            known = [m for v, f in values for m in self._expand(v, f, tree, depth - 1) if _letters(_literals(m))]
            if known:
                return [parts[:i] + m + parts[i + 1 :] for m in known]
        return [parts]

    def _values(self, node, function, tree) -> list[tuple]:
        """(expression, function around it) of what `node` can be, where the source says it plainly."""
        if isinstance(node, ast.IfExp):
            return [(node.body, function), (node.orelse, function)]
        if isinstance(node, ast.Name):
            inside = [*ast.walk(function), *tree.body] if function else tree.body
            return [(a.value, function) for a in inside if node.id in _targets(a)]
        if isinstance(node, ast.Call):
            called = [f for f in self.functions if f.name == _last(node.func)]
            return [(r.value, f) for f in called for r in ast.walk(f) if isinstance(r, ast.Return) and r.value]
        return []


def _template(place: str, parts: list) -> Template:
    text = "".join(part if isinstance(part, str) else f"{{{ast.unparse(part)}}}" for part in parts)
    return Template(place, text, tuple(piece for piece in _literals(parts) if _letters([piece])))


def _last(node) -> str:
    return ast.unparse(node).split(".")[-1]


def _targets(node) -> list[str]:
    """The names that get the value of an assignment."""
    if isinstance(node, ast.NamedExpr):
        return [node.target.id]
    return [_last(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _calls(node, function=None) -> Iterator:
    """Every call, with the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, function
        yield from _calls(child, child if isinstance(child, ast.FunctionDef) else function)


def _parts(node) -> list:
    """Strings and expressions, in their order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in _parts(value)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _parts(node.left) + _parts(node.right)
    return [node.value if isinstance(node, ast.FormattedValue) else node]


def _literals(parts: list) -> list[str]:
    return [part.removeprefix(": ") for part in parts if isinstance(part, str)]
