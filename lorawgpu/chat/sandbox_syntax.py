"""The syntax tree of a chat template, rewritten so that lorawgpu.chat.sandbox can charge for what it does.

Its filters have names that no template can spell: " counted" around what a loop goes over, " spend" before the body of
a loop or a macro, " weighed" around what is compared, " sized" around what is newly made, " concat" for the operator ~.
"""

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

TURN = 10  # units of a call, and of a turn of a loop beside its body


class Charged(NodeTransformer):
    """Puts filters around what has no hook of its own in jinja2."""

    def visit_For(self, node):
        turn = TURN + (_size([node.test]) if node.test else 0)
        self._charge_body(node)
        node.iter = _filter(node.iter, " counted", turn)
        return node

    def _charge_body(self, node):
        spend = nodes.Const(_size(node.body), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(spend, " spend"), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = _charge_body

    def visit_Concat(self, node):
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), " concat")

    def visit_Compare(self, node):
        """With a constant on one side, what is compared is no more than that; a search takes its whole right side."""
        self.generic_visit(node)
        searched = any(operand.op in ("in", "notin") for operand in node.ops)
        if searched or not any(isinstance(x, nodes.Const) for x in (node.expr, node.ops[0].expr)) or node.ops[1:]:
            for holder in (node, *node.ops):
                if not isinstance(holder.expr, nodes.Const):
                    holder.expr = _filter(holder.expr, " weighed")
        return node

    def visit_Getitem(self, node):
        self.generic_visit(node)
        return _filter(node, " sized") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node):
        self.generic_visit(node)
        return _filter(node, " sized")

    visit_Dict = visit_List


def _size(body: list) -> int:
    """Nodes in statements."""
    return sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


def _filter(node, name: str, *args):
    args = [nodes.Const(arg, lineno=node.lineno) for arg in args]
    return nodes.Filter(node, name, args, [], None, None, lineno=node.lineno)
