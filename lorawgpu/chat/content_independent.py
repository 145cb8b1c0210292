"""Chat templates that look at no content: proven from their syntax tree, by what is allowed and nothing else.

Such a template puts the contents of a conversation, as they are or trimmed, between texts that depend on the roles
alone. So once it has rendered one conversation, it needs no rendering for others of the same roles. A template with
anything beyond the forms below is not called blind, and rendered each time; most of the published ones that only join
headers and contents pass.
"""

from jinja2 import nodes

QUIET = (nodes.TemplateData, nodes.Const, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add,
         nodes.Concat, nodes.CondExpr)  # fmt: skip
FILTERS = ("trim", "capitalize", "upper", "lower", "title", "length")
PLACES = ("first", "last", "index", "index0", "length", "revindex", "revindex0")  # of `loop`
FUNCTIONS = ("raise_exception", "strftime_now")
RESERVED = ("messages", "loop", "self", "caller", "varargs", "kwargs")


def is_blind(tree: nodes.Template) -> bool:
    """Whether what the template shows depends on no content, but for the contents themselves."""
    return _all_quiet(tree.body, frozenset())


def _all_quiet(body: list, turns: frozenset[str]) -> bool:
    return all(_statement(node, turns) for node in body)


def _statement(node, turns: frozenset[str]) -> bool:
    """`turns`: names that stand for a message here."""
    if isinstance(node, nodes.Output):
        return all(_shown(part, turns) for part in node.nodes)
    if isinstance(node, nodes.If):
        return _blind(node.test, turns) and _all_quiet([*node.body, *node.elif_, *node.else_], turns)
    if isinstance(node, nodes.Scope):
        return _all_quiet(node.body, turns)
    if isinstance(node, nodes.Assign):
        return isinstance(node.target, nodes.Name) and _new(node.target, turns) and _blind(node.node, turns)
    if isinstance(node, nodes.For):
        plain = isinstance(node.target, nodes.Name) and _is_messages(node.iter) and node.target.name not in RESERVED
        return plain and not (node.test or node.recursive) and _all_quiet(
            [*node.body, *node.else_], turns | {node.target.name}
        )  # fmt: skip
    return False


def _shown(node, turns: frozenset[str]) -> bool:
    """An expression that is written out: a content may be a part of it, as it is or trimmed."""
    if isinstance(node, nodes.Add):
        return _shown(node.left, turns) and _shown(node.right, turns)
    if isinstance(node, nodes.Concat):
        return all(_shown(part, turns) for part in node.nodes)
    if isinstance(node, nodes.CondExpr):
        sides = (node.expr1, node.expr2)
        return _blind(node.test, turns) and all(side is None or _shown(side, turns) for side in sides)
    if isinstance(node, nodes.Filter) and node.name == "trim" and not (node.args or node.kwargs or node.dyn_args):
        node = node.node if _key(node.node, turns) == "content" else node
    return _key(node, turns) == "content" or _blind(node, turns)


def _blind(node, turns: frozenset[str]) -> bool:
    """An expression that no content is a part of."""
    key = _key(node, turns)
    if key is not None:
        return key != "content" and not hasattr(dict, key)
    if isinstance(node, nodes.Name):
        return _new(node, turns)
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in PLACES
    if isinstance(node, nodes.Filter):
        if node.name == "length" and _is_messages(node.node):
            return True
        return node.name in FILTERS and not (node.args or node.kwargs or node.dyn_args) and _blind(node.node, turns)
    if isinstance(node, nodes.Test):
        return node.name in ("defined", "none") and not node.args and _blind(node.node, turns)
    if isinstance(node, nodes.Call):
        named = isinstance(node.node, nodes.Name) and node.node.name in FUNCTIONS
        return named and not (node.kwargs or node.dyn_args) and all(_blind(arg, turns) for arg in node.args)
    return isinstance(node, QUIET) and all(_blind(child, turns) for child in node.iter_child_nodes())


def _key(node, turns: frozenset[str]) -> str | None:
    """K of `message.K`, `message['K']` and `messages[0]['K']`; None for anything else."""
    if isinstance(node, nodes.Getattr):
        key = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        key = node.arg.value
    else:
        return None
    base = node.node
    if isinstance(base, nodes.Getitem) and isinstance(base.arg, nodes.Const) and type(base.arg.value) is int:
        return key if _is_messages(base.node) else None
    return key if isinstance(base, nodes.Name) and base.name in turns else None


def _is_messages(node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages"


def _new(name: nodes.Name, turns: frozenset[str]) -> bool:
    """A variable that stands neither for messages nor for what belongs to a loop or a macro."""
    return name.name not in RESERVED and name.name not in turns
