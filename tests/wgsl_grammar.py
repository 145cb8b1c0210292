"""Which operators WGSL lets stand side by side. naga, the compiler here, accepts more than the grammar, which browsers
enforce: an operand of << and >>, and of &, | and ^, has to be a unary expression, so `a >> 4 & 15` needs parentheses.

Grammar: https://www.w3.org/TR/WGSL/#operator-expr-grammar (shift_expression, binary_and_expression, short_circuit_*).
"""

import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TYPES = re.compile(r"\b(array|atomic|ptr|vec[234]|mat[234]x[234]|bitcast|var|override)\s*<[^<>;]*>")
_TOKEN = re.compile(
    r"(?P<name>[A-Za-z_]\w*)|(?P<number>[\d.][\w.]*(?:[eEpP][+-]?\d+\w*)?)"
    r"|(?P<op>->|>>=|<<=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%&|^<>!~=])|(?P<other>[^\s\w])"
)
SHIFT, BITS, LOGIC = {"<<", ">>"}, {"&", "|", "^"}, {"&&", "||"}
ARITHMETIC, RELATIONAL = {"+", "-", "*", "/", "%"}, {"<", ">", "<=", ">=", "==", "!="}
ENDS = {"=", ",", ";", ":", "->", "{", "}", "return", "++", "--"}
ENDS |= {f"{op}=" for op in ARITHMETIC | BITS | SHIFT}


def faults(code: str) -> list[str]:
    """The expressions of a module whose operators need parentheses, with their line."""
    code = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), code)
    while (plain := _TYPES.sub(r"\1", code)) != code:
        code = plain
    found: list[str] = []
    levels: list[list[str]] = [[]]
    operand = False  # whether the token before could end an operand, so that - & * are binary
    for match in _TOKEN.finditer(code):
        token = match[0]
        if token in "([":
            levels.append([])
            operand = False
        elif token in ")]":
            found += _judge(levels.pop(), code, match.start())
            operand = True
        elif token in ENDS:
            found += _judge(levels[-1], code, match.start())
            levels[-1], operand = [], False
        elif match["op"]:
            if operand or token in RELATIONAL | LOGIC:
                levels[-1].append(token)
            operand = False
        else:
            operand = bool(match["name"] or match["number"]) and token != "return"
    return found


def _judge(operators: list[str], code: str, at: int) -> list[str]:
    """The operators of one expression, those in parentheses left out."""
    line = code.count("\n", 0, at) + 1
    bits, rest = [op for op in operators if op in BITS], [op for op in operators if op not in BITS]
    if bits and (len(set(bits)) > 1 or rest):
        return [f"line {line}: {' '.join(operators)}"]
    logic = {op for op in operators if op in LOGIC}
    if len(logic) > 1:
        return [f"line {line}: {' '.join(operators)}"]
    parts: list[list[str]] = [[]]
    for op in operators:
        if op in LOGIC | RELATIONAL:
            parts.append([])
        else:
            parts[-1].append(op)
    return [f"line {line}: {' '.join(part)}" for part in parts if SHIFT & set(part) and len(part) > 1]
