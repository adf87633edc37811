"""`branch_on_size`: find comparisons of the size of a batch in a user's code.

In a captured step a batch lies in buffers with more rows than it has, and all replays repeat the
branches of the capture. A comparison such as ``adj.n_rows < 36`` or ``len(atoms) < 36`` would
decide by another number, once and for all. No run shows that unless the two sizes happen to lie on
both sides of the bound, so the comparison is looked for in the source.
"""

import ast
import functools
import linecache
import types

# Sizes of a `BatchedCSR` that are capacities or bounds in a captured step. The number of graphs is
# exact.
_SIZES = {'n_rows', 'n_cols', 'max_rows', 'max_cols', 'nnz', 'max_nnz', 'longest'}
_CHOICES = {'min', 'max'}  # builtins that compare their arguments
_OF_NUMBERS = {*_CHOICES, 'abs', 'float', 'int', 'round'}  # builtins that calculate with them


@functools.lru_cache(maxsize=4096)
def branch_on_size(code: types.CodeType, takes_batch: bool) -> str | None:
    """Return the text of a comparison of a batch's size with anything but another size, or None.

    Sizes are attributes such as ``n_rows``; if the code `takes_batch`, also the length, the size
    and the first dimension of its first two arguments; numbers that are calculated from them, and
    variables to which they are assigned. They are not followed into other functions, and code
    without a source is not seen.
    """
    for node in _functions(''.join(linecache.getlines(code.co_filename))):
        if _first_line(node) == code.co_firstlineno and _name(node) == code.co_name:
            found = _Comparisons(node, takes_batch).found()
            if found is not None:
                return found
    return None


@functools.lru_cache(maxsize=2)  # functions of one file mostly come one after the other
def _functions(source):
    """Return the nodes of all functions in a source, none if it is no Python of this version."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _first_line(node):
    return min(part.lineno for part in [node, *getattr(node, 'decorator_list', [])])


def _name(node):
    return getattr(node, 'name', '<lambda>')


class _Comparisons:
    """Comparisons in a function; `takes_batch`: whether its arguments are the arrays of a batch."""

    def __init__(self, node, takes_batch):
        self._node = node
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        names = [name for name in names if name not in ('self', 'cls')]
        # Atoms or features, and the adjacency. What follows are labels, whose number is exact.
        self._arguments = names[:2] if takes_batch else []
        self._variables = set()  # to which a size is assigned
        for each in ast.walk(node):
            if isinstance(each, (ast.Assign, ast.NamedExpr)) and self._is_size(each.value):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                self._variables |= {of.id for of in targets if isinstance(of, ast.Name)}

    def found(self):
        """Return the text of the first comparison of a size with anything else, or None."""
        for node in ast.walk(self._node):
            parts = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                parts = node.args if node.func.id in _CHOICES else []
            are_sizes = [self._is_size(part) for part in parts]
            if any(are_sizes) and not all(are_sizes):
                return ast.unparse(node)
        return None

    def _is_size(self, node):
        """Return whether an expression is a size, or a number that is calculated from one."""
        if isinstance(node, ast.Name):
            return node.id in self._variables
        if isinstance(node, ast.Attribute):
            return node.attr in _SIZES or node.attr == 'size' and self._is_argument(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            is_first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
            is_shape = node.value.attr == 'shape' and self._is_argument(node.value.value)
            return is_first and is_shape
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name == 'len':
                return any(map(self._is_argument, node.args))
            return name in _OF_NUMBERS and any(map(self._is_size, node.args))
        if isinstance(node, ast.BinOp):
            return self._is_size(node.left) or self._is_size(node.right)
        if isinstance(node, ast.NamedExpr):
            return self._is_size(node.value)
        return False

    def _is_argument(self, node):
        return isinstance(node, ast.Name) and node.id in self._arguments
