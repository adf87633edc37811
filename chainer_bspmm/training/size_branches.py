"""`branch_on_size`: find comparisons of the size of a batch in a user's code.

In a captured step a batch lies in buffers with more rows than it has, and all replays repeat the
branches of the capture. A comparison such as ``adj.n_rows < 36`` or ``len(atoms) < 36`` would
decide by another number, once and for all. No run shows that unless the two sizes happen to lie on
both sides of the bound, so the comparison is looked for in the source.
"""

import ast
import functools
import itertools
import linecache
import types

# Sizes of a `BatchedCSR` that are capacities or bounds in a captured step. The number of graphs is
# exact.
_OF_ROWS = {'n_rows', 'n_cols', 'max_rows', 'max_cols'}  # 1 or more, in a batch and in a buffer
_SIZES = {*_OF_ROWS, 'nnz', 'max_nnz', 'longest'}
_OF_ENTRIES = {'indices', 'data'}  # arrays with an element for each entry, of which there may be 0
_OF_MATRIX = {*_OF_ENTRIES, 'indptr', 'row_weights'}  # the arrays of a `BatchedCSR`
_CHOICES = {'min', 'max'}  # builtins that compare their arguments
_OF_NUMBERS = {*_CHOICES, 'abs', 'float', 'int', 'round'}  # builtins that calculate with them


@functools.lru_cache(maxsize=4096)
def branch_on_size(code: types.CodeType, takes_batch: bool) -> str | None:
    """Return the text of a comparison of a batch's size with anything but another size, or None.

    Sizes are attributes such as ``n_rows``, except those of ``self``; if the code `takes_batch`,
    also the length, the size and the first dimension of its first two arguments and of the arrays
    of an adjacency matrix; numbers that are calculated from them, and variables to which they are
    assigned. Whether there are rows at all is no such comparison: a batch has some, and so has a
    buffer. Sizes are not followed into other functions, and code without a source is not seen.
    """
    for node in _functions(''.join(linecache.getlines(code.co_filename))):
        if _first_line(node) == code.co_firstlineno and _name(node) == code.co_name:
            found = _Comparisons(node, takes_batch).found()
            if found is not None:
                return found
    return None


@functools.lru_cache(maxsize=2)  # functions of one file mostly come one after the other
def _functions(source):
    """Return the nodes of all functions in a source; none if this Python cannot parse it."""
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
        self._arguments = set(names[:2]) if takes_batch else set()
        # The name of the tuple of all other arguments, and how many of these are such arrays.
        self._others = getattr(node.args.vararg, 'arg', None)
        self._n_others = 2 - len(names) if takes_batch else 0
        self._variables = set()  # to which a size is assigned
        for each in ast.walk(node):
            for name, value in _assignments(each):
                if self._is_size(value):
                    self._variables.add(name)
                elif self._is_argument(value):
                    self._arguments.add(name)

    def found(self):
        """Return the text of the first comparison of a size with anything else, or None."""
        for node in ast.walk(self._node):
            parts = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                parts = node.args if node.func.id in _CHOICES else []
            elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Match)):
                node = node.subject if isinstance(node, ast.Match) else node.test
                parts = [node, ast.Constant(0)]
            are_sizes = [self._is_size(part) for part in parts]
            if any(are_sizes) and not all(are_sizes):
                if not all(self._are_rows(part) or _is_zero(part) for part in parts):
                    return ast.unparse(node)
        return None

    def _is_size(self, node):
        """Return whether an expression is a size, or a number that is calculated from one."""
        if isinstance(node, ast.Name):
            return node.id in self._variables
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == 'self':
                return False  # the user's own number, or a size that was stored, which guards watch
            return node.attr in _SIZES or node.attr == 'size' and self._is_argument(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            of = node.value.value
            if node.value.attr != 'shape' or not isinstance(node.slice, ast.Constant):
                return False
            # The second dimension of an adjacency matrix is a size, that of features is not.
            sizes = (0, 1) if _is_adjacency(of) else (0,)
            return node.slice.value in sizes and self._is_argument(of)
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

    def _are_rows(self, node):
        """Return whether an expression is a number of rows, and not calculated from one."""
        is_bare = isinstance(node, (ast.Call, ast.Subscript))
        is_bare = is_bare or isinstance(node, ast.Attribute) and node.attr in _OF_ROWS
        return is_bare and self._is_size(node) and not any(map(_are_entries, ast.walk(node)))

    def _is_argument(self, node):
        if isinstance(node, ast.Attribute) and node.attr in ('array', *_OF_MATRIX):
            return self._is_argument(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            is_other = isinstance(node.value, ast.Name) and node.value.id == self._others
            return is_other and node.slice.value in range(self._n_others)
        return isinstance(node, ast.Name) and node.id in self._arguments


def _is_adjacency(node):
    """Return whether an expression is a variable that is named as an adjacency matrix is."""
    return isinstance(node, ast.Name) and 'adj' in node.id


def _are_entries(node):
    is_of_matrix = isinstance(node, ast.Attribute) and _is_adjacency(node.value)
    return is_of_matrix and node.attr in _OF_ENTRIES


def _is_zero(node):
    return isinstance(node, ast.Constant) and node.value == 0


def _assignments(node):
    """Yield (name, value) for each variable that a statement or an expression assigns."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple):
            items = [ast.Subscript(node.value, ast.Constant(i)) for i in range(len(target.elts))]
            pairs = zip(target.elts, getattr(node.value, 'elts', items))
            # What follows a starred variable has another position.
            pairs = itertools.takewhile(lambda pair: not isinstance(pair[0], ast.Starred), pairs)
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))
