"""Rewriting the syntax tree of a chat template so that lorawgpu.chat.sandbox can charge for what it does.

It inserts filters whose names no template can spell: " iterate" around the iterable of a loop, " body" at the start of
the body of a loop or macro, " deep" around compared operands, " size" around new values, " concat" for the operator ~.
"""

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

STEP = 10  # units for a call, and for an iteration of a loop on top of its body


class Charged(NodeTransformer):
    """Inserts filters where jinja2 has no hook."""

    def visit_For(self, node):
        units = STEP + (_size([node.test]) if node.test else 0)
        self._charge_body(node)
        node.iter = _filter(node.iter, " iterate", units)
        return node

    def _charge_body(self, node):
        units = nodes.Const(_size(node.body), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(units, " body"), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = _charge_body

    def visit_Concat(self, node):
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), " concat")

    def visit_Compare(self, node):
        """A comparison with a constant costs no more than the constant; a search costs its whole right side."""
        self.generic_visit(node)
        searched = any(operand.op in ("in", "notin") for operand in node.ops)
        if searched or not any(isinstance(x, nodes.Const) for x in (node.expr, node.ops[0].expr)) or node.ops[1:]:
            for holder in (node, *node.ops):
                if not isinstance(holder.expr, nodes.Const):
                    holder.expr = _filter(holder.expr, " deep")
        return node

    def visit_Getitem(self, node):
        self.generic_visit(node)
        return _filter(node, " size") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node):
        self.generic_visit(node)
        return _filter(node, " size")

    visit_Dict = visit_List


def _size(body: list) -> int:
    """The number of nodes in these statements."""
    return sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


def _filter(node, name: str, *args):
    args = [nodes.Const(arg, lineno=node.lineno) for arg in args]
    return nodes.Filter(node, name, args, [], None, None, lineno=node.lineno)
