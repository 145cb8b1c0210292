"""A jinja2 sandbox for chat templates of strangers: no attribute tricks, and a bound on work and memory.

jinja2's own sandbox hides private attributes and limits `range`, but lets a template loop for ever or make a text of
any size. Here each render has a budget of units: a character or list element made, copied or compared is one, so is a
node of the syntax tree whenever a loop or a macro runs it, and a call is TURN. Sizes are charged before they are made,
also where jinja2 computes constants while compiling. Nothing is timed: a template behaves alike on every machine.
"""

import functools
import re
import threading
import types

from jinja2 import pass_context
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from lorawgpu.chat.sandbox_syntax import TURN, Charged

BASE = 2_000_000  # units of every render, and so many more per unit of what it is given
PER_INPUT = 200
MAX_BITS = 4096  # of an integer: arithmetic on longer ones takes more than linear time
# Filters that look at the outside of a list only; all others may read it to its innermost text.
SHALLOW = {
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice",
}  # fmt: skip
COMPARING = ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge",
             "in")  # fmt: skip
REMOVED = ("pprint", "urlize", "wordwrap", "xmlattr")  # of no use for a prompt, and their work is hard to foresee
_CONTAINERS = (list, tuple, set, frozenset, dict)
_now = threading.local()


class TooMuch(Exception):
    """The template would do more work than its budget."""

    def __init__(self):
        super().__init__("it does more work than a conversation can need: an endless loop, or a text without end?")


class Budget:
    """The units that a render may spend; a context manager that makes it the current thread's."""

    def __init__(self, *given: object):
        self.left = BASE + PER_INPUT * sum(_deep(value, limit=1 << 40) for value in given)

    def __enter__(self):
        self.outer, _now.budget = getattr(_now, "budget", None), self

    def __exit__(self, *_):
        _now.budget = self.outer


def charge(units: int) -> None:
    budget = _now.budget
    budget.left -= units
    if budget.left < 0:
        raise TooMuch


def _shallow(value: object) -> int:
    """Characters or elements of a value."""
    return len(value) + 1 if isinstance(value, (str, bytes, *_CONTAINERS)) else 1


def _deep(value: object, limit: int) -> int:
    """All characters and elements of a nested value, what is shared counted each time; stops beyond `limit`."""
    if not isinstance(value, _CONTAINERS):
        return _shallow(value)
    units, waiting = 0, [value]
    while waiting and units <= limit:
        item = waiting.pop()
        if type(item) is str:  # most are
            units += len(item) + 1
            continue
        units += _shallow(item)
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, _CONTAINERS):
            waiting += item
    return units


def weighed(value):
    """`value`, with all that is in it charged."""
    budget = _now.budget
    budget.left -= len(value) + 1 if type(value) is str else _deep(value, budget.left)
    if budget.left < 0:
        raise TooMuch
    return value


def sized(value):
    """`value`, newly made: its size charged. An integer must be a short one."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TooMuch
    charge(_shallow(value))
    return value


@pass_context  # which keeps jinja2 from computing it while compiling
def _spend(_, units: int) -> str:
    charge(units)
    return ""


@pass_context
def _counted(_, items, units: int):
    return Counted(items, units)


class Counted:
    """What a loop goes over, `units` charged a turn."""

    def __init__(self, items, units: int = TURN):
        self.items, self.units = items, units

    def __iter__(self):
        for item in self.items:
            charge(self.units)
            yield item

    def __len__(self):
        return len(self.items)


def _joined(parts) -> str:
    """The pieces of a template, a macro or a block in one text."""
    budget, kept = _now.budget, []
    for part in parts:
        budget.left -= len(part) + 1
        if budget.left < 0:
            raise TooMuch
        kept.append(part)
    return "".join(kept)


def _concat(parts) -> str:
    """jinja2's ~ operator."""
    return _joined([part if type(part) is str else str(weighed(part)) for part in parts])


def _check_format(text: str) -> None:
    """Charge the widths that a format string spells; refuse those that it takes from its arguments."""
    if re.search(r"\{[^{}]*\{|%[^a-zA-Z%]*\*", text):
        raise TooMuch
    charge(len(text) + sum(int(width) for width in re.findall(r"\d{3,12}", text)))
    if re.search(r"\d{13}", text):
        raise TooMuch


def _charge_call(name: str, target: object, args: list) -> None:
    """Before a method or filter `name` of `target` runs: what its arguments make it do."""
    charge(TURN + _shallow(target))
    if not args and name != "format":
        return
    text = str(target) if isinstance(target, (str, bytes)) else ""
    numbers = sum(abs(arg) for arg in args if isinstance(arg, int))
    charge(numbers)
    if name in ("indent", "expandtabs"):
        wide = numbers + sum(len(arg) for arg in args if isinstance(arg, str))
        charge(wide * (text.count("\n") + text.count("\t") + 1))
    elif name == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        charge((text.count(old) + 1) * len(new))
    elif name == "join":
        lists = [arg for arg in (target, *args) if isinstance(arg, _CONTAINERS)]
        charge(sum(map(len, lists)) * sum(len(x) for x in (target, *args) if isinstance(x, str)))
    elif name == "tojson":
        charge(numbers * _deep(target, _now.budget.left))
    elif name == "format":
        _check_format(text)
    elif name in ("translate", "maketrans") or name == "sum" and any(isinstance(arg, _CONTAINERS) for arg in args):
        raise TooMuch  # a table of long texts, a sum of lists: nothing that a prompt needs


def _solid(value):
    """An iterator or a view as a list, so that its size is known before it is used; anything else as it is."""
    if isinstance(value, (str, bytes, Undefined, *_CONTAINERS)) or not hasattr(value, "__iter__"):
        return value
    return list(Counted(value, 1))


def _guarded_filter(name: str, function):
    first, inside = int(hasattr(function, "jinja_pass_arg")), name not in SHALLOW

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        values = args[first:]
        if inside:
            values = [weighed(value if type(value) is str else _solid(value)) for value in values]
        _charge_call(name, values[0] if values else None, [*values[1:], *kwargs.values()])
        return sized(function(*args[:first], *values, **kwargs))

    return guarded


def _guarded_test(function):
    @functools.wraps(function)
    def guarded(*args):
        for value in args:
            weighed(value)
        return function(*args)

    return guarded


class _Quiet(Namespace):
    """A namespace whose text is short: it can hold itself many times over."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _range(*args):
    made = safe_range(*args)
    charge(len(made))
    return made


class Sandbox(ImmutableSandboxedEnvironment):
    """Renders and compiles only within a `Budget`."""

    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "-"])
    concat = staticmethod(_joined)

    def __init__(self, filters: dict, **options):
        """`filters`: further ones, guarded like jinja2's own."""
        super().__init__(finalize=weighed, **options)
        known = {name: f for name, f in (self.filters | filters).items() if name not in REMOVED}
        self.filters = {name: _guarded_filter(name, function) for name, function in known.items()}
        self.filters |= {
            " counted": _counted,
            " spend": _spend,
            " weighed": weighed,
            " sized": sized,
            " concat": _concat,
        }
        self.tests |= {name: _guarded_test(self.tests[name]) for name in COMPARING}
        self.globals |= {"range": _range, "namespace": _Quiet}
        del self.globals["lipsum"]

    def _generate(self, source, *args, **kwargs):
        return super()._generate(Charged().visit(source), *args, **kwargs)

    def call_binop(self, context, operator, left, right):
        if operator == "+" and type(left) is type(right) is str:  # what templates do most
            charge(len(left) + len(right) + 1)
            return left + right
        charge(TURN)
        if operator == "*":
            factors = [abs(x) if isinstance(x, int) else _shallow(x) for x in (left, right)]
            if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
                charge(factors[0] * factors[1])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise TooMuch
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left))
            weighed(right)
        elif operator == "+":
            charge(_shallow(left) + _shallow(right))
        return sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value):
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args, **kwargs):
            _check_format(value.__self__)
            weighed([*args, *kwargs.values()])
            return sized(wrapped(*args, **kwargs))

        return checked

    def call(self, context, function, /, *args, **kwargs):
        charge(TURN)
        if isinstance(function, LoopContext):
            args = [Counted(arg) for arg in args]
        elif isinstance(function, (types.BuiltinMethodType, types.MethodType, type)):
            args = [weighed(_solid(arg)) for arg in args]
            weighed(kwargs)
            target = getattr(function, "__self__", None)
            _charge_call(function.__name__, target, [*args, *kwargs.values()])
        return sized(super().call(context, function, *args, **kwargs))
