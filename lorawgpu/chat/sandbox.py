"""A jinja2 sandbox for untrusted chat templates: no attribute tricks, and bounded work and memory.

jinja2's own sandbox hides private attributes and limits `range`, but lets a template loop forever or build a string of
any size. Here each render has a budget of units: one per character or list element that is created, copied or compared,
one per syntax node each time a loop or macro runs it, and STEP per call. Sizes are charged before they are allocated,
including where jinja2 folds constants while compiling. Nothing is timed, so a template behaves the same on every
machine.
"""

import functools
import re
import threading
import types

from jinja2 import pass_context
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from lorawgpu.chat.sandbox_syntax import STEP, Charged

BASE = 2_000_000  # units of every render
PER_INPUT = 200  # additional units per unit of input
MAX_BITS = 4096  # of an integer: arithmetic on longer ones takes more than linear time
# Filters that do not look inside a list's elements; all others may read it to its innermost string.
SHALLOW = {
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice",
}  # fmt: skip
COMPARING = ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge",
             "in")  # fmt: skip
REMOVED = ("pprint", "urlize", "wordwrap", "xmlattr")  # useless for a prompt, and their cost is hard to predict
_CONTAINERS = (list, tuple, set, frozenset, dict)
_now = threading.local()


class OverBudget(Exception):
    """The template would do more work than its budget."""

    def __init__(self):
        super().__init__("it does more work than any conversation needs; does it loop forever or repeat text?")


class Budget:
    """The units that a render may spend, from its inputs. A context manager: the budget of the current thread."""

    def __init__(self, *inputs: object):
        self.left = BASE + PER_INPUT * sum(_deep(value, limit=1 << 40) for value in inputs)

    def __enter__(self):
        self.outer, _now.budget = getattr(_now, "budget", None), self

    def __exit__(self, *_):
        _now.budget = self.outer


def charge(units: int) -> None:
    budget = _now.budget
    budget.left -= units
    if budget.left < 0:
        raise OverBudget


def _shallow(value: object) -> int:
    """The characters or elements of a value."""
    return len(value) + 1 if isinstance(value, (str, bytes, *_CONTAINERS)) else 1


def _deep(value: object, limit: int) -> int:
    """All characters and elements of a nested value, shared ones each time they occur; stops beyond `limit`."""
    if not isinstance(value, _CONTAINERS):
        return _shallow(value)
    units, pending = 0, [value]
    while pending and units <= limit:
        item = pending.pop()
        if type(item) is str:  # the fast path
            units += len(item) + 1
            continue
        units += _shallow(item)
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, _CONTAINERS):
            pending += item
    return units


def charge_deep(value):
    """Charge for everything in `value`, and return it."""
    budget = _now.budget
    budget.left -= len(value) + 1 if type(value) is str else _deep(value, budget.left)
    if budget.left < 0:
        raise OverBudget
    return value


def charge_size(value):
    """Charge for the size of a new `value`, and return it. Long integers are over any budget."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverBudget
    charge(_shallow(value))
    return value


@pass_context  # keeps jinja2 from folding it into a constant
def _charge_body(_, units: int) -> str:
    charge(units)
    return ""


@pass_context
def _charge_iterations(_, items, units: int):
    return Metered(items, units)


class Metered:
    """An iterable that charges `units` per item."""

    def __init__(self, items, units: int = STEP):
        self.items, self.units = items, units

    def __iter__(self):
        for item in self.items:
            charge(self.units)
            yield item

    def __len__(self):
        return len(self.items)


def _join(parts) -> str:
    """Join the output of a template, macro or block."""
    budget, kept = _now.budget, []
    for part in parts:
        budget.left -= len(part) + 1
        if budget.left < 0:
            raise OverBudget
        kept.append(part)
    return "".join(kept)


def _concat(parts) -> str:
    """The ~ operator of jinja2."""
    return _join([part if type(part) is str else str(charge_deep(part)) for part in parts])


def _check_format(text: str) -> None:
    """Charge for the widths in a format string; widths that come from its arguments are over any budget."""
    if re.search(r"\{[^{}]*\{|%[^a-zA-Z%]*\*", text):
        raise OverBudget
    charge(len(text) + sum(int(width) for width in re.findall(r"\d{3,12}", text)))
    if re.search(r"\d{13}", text):
        raise OverBudget


def _charge_call(name: str, target: object, args: list) -> None:
    """Charge for what method or filter `name` of `target` will do with these arguments."""
    charge(STEP + _shallow(target))
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
        raise OverBudget  # a table of long strings, a sum of lists: no prompt needs them


def _materialize(value):
    """An iterator or view as a list, so that its size is known before it is used; anything else unchanged."""
    if isinstance(value, (str, bytes, Undefined, *_CONTAINERS)) or not hasattr(value, "__iter__"):
        return value
    return list(Metered(value, 1))


def _guarded_filter(name: str, function):
    first, inside = int(hasattr(function, "jinja_pass_arg")), name not in SHALLOW

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        values = args[first:]
        if inside:
            values = [charge_deep(value if type(value) is str else _materialize(value)) for value in values]
        _charge_call(name, values[0] if values else None, [*values[1:], *kwargs.values()])
        return charge_size(function(*args[:first], *values, **kwargs))

    return guarded


def _guarded_test(function):
    @functools.wraps(function)
    def guarded(*args):
        for value in args:
            charge_deep(value)
        return function(*args)

    return guarded


class _Quiet(Namespace):
    """A namespace with a short repr: it can contain itself many times over."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _range(*args):
    numbers = safe_range(*args)
    charge(len(numbers))
    return numbers


class Sandbox(ImmutableSandboxedEnvironment):
    """Renders and compiles within a `Budget`."""

    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "-"])
    concat = staticmethod(_join)

    def __init__(self, filters: dict, **options):
        """`filters`: additional ones, guarded like jinja2's own."""
        super().__init__(finalize=charge_deep, **options)
        kept = {name: f for name, f in (self.filters | filters).items() if name not in REMOVED}
        self.filters = {name: _guarded_filter(name, function) for name, function in kept.items()}
        self.filters |= {
            " iterate": _charge_iterations,
            " body": _charge_body,
            " deep": charge_deep,
            " size": charge_size,
            " concat": _concat,
        }
        self.tests |= {name: _guarded_test(self.tests[name]) for name in COMPARING}
        self.globals |= {"range": _range, "namespace": _Quiet}
        del self.globals["lipsum"]

    def _generate(self, source, *args, **kwargs):
        return super()._generate(Charged().visit(source), *args, **kwargs)

    def call_binop(self, context, operator, left, right):
        if operator == "+" and type(left) is type(right) is str:  # the fast path
            charge(len(left) + len(right) + 1)
            return left + right
        charge(STEP)
        if operator == "*":
            factors = [abs(x) if isinstance(x, int) else _shallow(x) for x in (left, right)]
            if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
                charge(factors[0] * factors[1])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise OverBudget
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left))
            charge_deep(right)
        elif operator == "+":
            charge(_shallow(left) + _shallow(right))
        return charge_size(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value):
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args, **kwargs):
            _check_format(value.__self__)
            charge_deep([*args, *kwargs.values()])
            return charge_size(wrapped(*args, **kwargs))

        return checked

    def call(self, context, function, /, *args, **kwargs):
        charge(STEP)
        if isinstance(function, LoopContext):
            args = [Metered(arg) for arg in args]
        elif isinstance(function, (types.BuiltinMethodType, types.MethodType, type)):
            args = [charge_deep(_materialize(arg)) for arg in args]
            charge_deep(kwargs)
            target = getattr(function, "__self__", None)
            _charge_call(function.__name__, target, [*args, *kwargs.values()])
        return charge_size(super().call(context, function, *args, **kwargs))
