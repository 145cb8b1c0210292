"""Proving from its syntax tree that a chat template does not look at contents.

Such a template puts the contents, unchanged or trimmed, between pieces of text that depend on the roles alone. So the
render of one conversation gives those of all others with the same roles. The check is an allow-list: a template with
anything else in it is rendered each time. Most published templates that just join headers and contents pass.
"""

from jinja2 import nodes

SAFE_NODES = (nodes.TemplateData, nodes.Const, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add,
         nodes.Concat, nodes.CondExpr)  # fmt: skip
FILTERS = ("trim", "capitalize", "upper", "lower", "title", "length")
LOOP_KEYS = ("first", "last", "index", "index0", "length", "revindex", "revindex0")  # of `loop`
FUNCTIONS = ("raise_exception", "strftime_now")
RESERVED = ("messages", "loop", "self", "caller", "varargs", "kwargs")


def is_content_independent(tree: nodes.Template) -> bool:
    """Whether the template's output, apart from the contents, does not depend on them."""
    return _all_independent(tree.body, frozenset())


def _all_independent(body: list, turns: frozenset[str]) -> bool:
    return all(_statement(node, turns) for node in body)


def _statement(node, turns: frozenset[str]) -> bool:
    """`turns`: names of variables that are messages here."""
    if isinstance(node, nodes.Output):
        return all(_shown(part, turns) for part in node.nodes)
    if isinstance(node, nodes.If):
        return _independent(node.test, turns) and _all_independent([*node.body, *node.elif_, *node.else_], turns)
    if isinstance(node, nodes.Scope):
        return _all_independent(node.body, turns)
    if isinstance(node, nodes.Assign):
        return isinstance(node.target, nodes.Name) and _is_free(node.target, turns) and _independent(node.node, turns)
    if isinstance(node, nodes.For):
        plain = isinstance(node.target, nodes.Name) and _is_messages(node.iter) and node.target.name not in RESERVED
        return plain and not (node.test or node.recursive) and _all_independent(
            [*node.body, *node.else_], turns | {node.target.name}
        )  # fmt: skip
    return False


def _shown(node, turns: frozenset[str]) -> bool:
    """An expression that is output: contents may be part of it, unchanged or trimmed."""
    if isinstance(node, nodes.Add):
        return _shown(node.left, turns) and _shown(node.right, turns)
    if isinstance(node, nodes.Concat):
        return all(_shown(part, turns) for part in node.nodes)
    if isinstance(node, nodes.CondExpr):
        sides = (node.expr1, node.expr2)
        return _independent(node.test, turns) and all(side is None or _shown(side, turns) for side in sides)
    if isinstance(node, nodes.Filter) and node.name == "trim" and not (node.args or node.kwargs or node.dyn_args):
        node = node.node if _key(node.node, turns) == "content" else node
    return _key(node, turns) == "content" or _independent(node, turns)


def _independent(node, turns: frozenset[str]) -> bool:
    """An expression without contents."""
    key = _key(node, turns)
    if key is not None:
        return key != "content" and not hasattr(dict, key)
    if isinstance(node, nodes.Name):
        return _is_free(node, turns)
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in LOOP_KEYS
    if isinstance(node, nodes.Filter):
        if node.name == "length" and _is_messages(node.node):
            return True
        return (
            node.name in FILTERS and not (node.args or node.kwargs or node.dyn_args) and _independent(node.node, turns)
        )
    if isinstance(node, nodes.Test):
        return node.name in ("defined", "none") and not node.args and _independent(node.node, turns)
    if isinstance(node, nodes.Call):
        named = isinstance(node.node, nodes.Name) and node.node.name in FUNCTIONS
        return named and not (node.kwargs or node.dyn_args) and all(_independent(arg, turns) for arg in node.args)
    return isinstance(node, SAFE_NODES) and all(_independent(child, turns) for child in node.iter_child_nodes())


def _key(node, turns: frozenset[str]) -> str | None:
    """K of `message.K`, `message['K']` or `messages[0]['K']`; None for anything else."""
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


def _is_free(name: nodes.Name, turns: frozenset[str]) -> bool:
    """A variable that is neither a message, nor the messages, nor special in loops and macros."""
    return name.name not in RESERVED and name.name not in turns
