"""Which lines of a Python file hold code: what the rules of the house and the spine count.

Called by: `spine`, tests. Calls: `ast`.
"""

import ast


def code_lines(source: str) -> frozenset[int]:
    """Numbers of the lines that hold code: no blank lines, comments or docstrings.

    >>> sorted(code_lines("'Doc.'\\n\\n# comment\\nx = 1  # said\\n'Of x.'\\ny = (\\n    2\\n)\\n"))
    [4, 6, 7, 8]
    >>> sorted(code_lines("x = '''\\n\\n# none\\n'''\\n"))
    [1, 2, 3, 4]
    """
    text = source.split("\n")
    lines = {n for n, line in enumerate(text, 1) if line.strip() and line.lstrip()[0] != "#"}
    said: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # Docstrings, and the strings that document a field, are expressions of their own.
            said.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno < node.end_lineno:
            begin = text[node.lineno - 1].encode()[node.col_offset :].decode(errors="replace")
            if '"""' in begin or "'''" in begin:
                lines.update(range(node.lineno, node.end_lineno + 1))
    return frozenset(lines - said)
