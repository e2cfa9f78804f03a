"""Which lines of a Python file hold code: what the rules of the house and the spine count.

Called by: `spine`, tests. Calls: `ast` and `tokenize`.
"""

import ast
import io
import tokenize

SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_lines(source: str) -> frozenset[int]:
    """Numbers of the lines that hold code: no blank lines, comments or docstrings.

    >>> sorted(code_lines("'Doc.'\\n\\n# comment\\nx = 1  # said\\n'Of x.'\\ny = (\\n    2\\n)\\n"))
    [4, 6, 7, 8]
    """
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    # Docstrings, and the strings that document a field, are expressions of their own.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return frozenset(lines)
