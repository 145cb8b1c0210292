"""What WGSL forbids and the compiler here does not notice: operators side by side, and writes to parts of a vector.

Which operators may stand side by side. naga, the compiler here, accepts more than the grammar, which browsers
enforce: an operand of << and >>, and of &, | and ^, has to be a unary expression, so `a >> 4 & 15` needs parentheses.

A write to a component of a vector may read and write the whole vector, so two threads that write parts of one vector
race (https://www.w3.org/TR/WGSL/#memory-operation): in memory that threads share, vectors are written whole.

Grammar: https://www.w3.org/TR/WGSL/#operator-expr-grammar (shift_expression, binary_and_expression, short_circuit_*).
"""

import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_TYPES = re.compile(r"\b(array|atomic|ptr|vec[234]|mat[234]x[234]|bitcast|var|override)\s*<[^<>;]*>")
_TOKEN = re.compile(
    r"(?P<name>[A-Za-z_]\w*)|(?P<number>[\d.][\w.]*(?:[eEpP][+-]?\d+\w*)?)"
    r"|(?P<op>->|>>=|<<=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%&|^<>!~=])|(?P<other>[^\s\w])"
)
_SHARED = re.compile(r"var\s*<\s*(?:storage\s*,\s*read_write|workgroup)\s*>\s*(\w+)\s*:\s*([^;]+);")
_WRITE = re.compile(r"\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)")
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


def partial_writes(code: str) -> list[str]:
    """The statements of a module that write to a part of a vector in storage or workgroup memory, with their line."""
    code = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), code)
    found = []
    for name, kind in _SHARED.findall(code):
        if "vec" not in kind:
            continue
        for match in re.finditer(rf"(?<![\w.]){name}\b", code):
            end, accessors = _accessors(code, match.end())
            if accessors > kind.count("array<") and _WRITE.match(code, end):
                found.append(f"line {code.count(chr(10), 0, end) + 1}: {code[match.start() : end]}")
    return found


def _accessors(code: str, at: int) -> tuple[int, int]:
    """Where the indices and members after a name end, and their number."""
    count = 0
    while at < len(code) and (member := re.compile(r"\.\w+|\[").match(code, at)):
        at, depth = member.end(), int(member[0] == "[")
        while depth:
            depth += {"[": 1, "]": -1}.get(code[at], 0)
            at += 1
        count += 1
    return at, count
