"""Refuse three kinds of statements that save lines and cost their reader time.

    python tools/plain_statements.py FOLDER...

- A tuple or dict with a name that is used once only, as ``*name`` or ``**name`` of a call. Its
  items belong in the call, where it is seen which argument each of them is. The dozen arguments of
  a kernel's launch are an exception: they are read in groups.
- An assignment of several values that are not alike, such as ``found, start = {}, time.time()``.
  The reader must count commas to pair names with values. Allowed are values that are written alike
  (``x, y = point.x, point.y``), constants, values that read the names (a swap), and starred ones.
- A lambda with a name: a ``def`` says the same, and tracebacks have its name.

The formatter breaks a statement that is too long into many lines. These three avoid that, so they
look shorter, but there is more to understand. Prints where they are; exits with 1 if it finds any.
"""

import ast
import collections
import pathlib
import sys

LAUNCHES = 'run', 'kernel'  # names of the functions that launch a kernel


def parts_of_calls(function):
    """Yield the assignments of a function that only give a name to some arguments of one call."""
    n_uses = collections.Counter()
    unpacked = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            n_uses[node.id] += 1
        if isinstance(node, ast.Call) and ast.unparse(node.func).split('.')[-1] not in LAUNCHES:
            values = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
            values += [keyword.value for keyword in node.keywords if keyword.arg is None]
            unpacked |= {value.id for value in values if isinstance(value, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Dict):
            name = ast.unparse(node.targets[0])
            if name in unpacked and n_uses[name] == 1:
                yield node


def form(value):
    """Return the structure of an expression, whatever its names and constants."""
    if isinstance(value, ast.Name | ast.Attribute):
        return 'a name'
    children = [node for node in ast.iter_child_nodes(value) if isinstance(node, ast.expr)]
    return type(value), *map(form, children)


def has_unlike_values(assignment):
    names = assignment.targets[0]
    values = assignment.value
    if not isinstance(names, ast.Tuple) or not isinstance(values, ast.Tuple):
        return False
    if any(isinstance(node, ast.Starred) for node in (*names.elts, *values.elts)):
        return False
    if all(isinstance(value, ast.Constant) for value in values.elts):
        return False
    read = {ast.unparse(node) for node in ast.walk(values) if isinstance(node, ast.expr)}
    if any(ast.unparse(name) in read for name in names.elts):
        return False
    return len(set(map(form, values.elts))) > 1


def is_named_lambda(assignment):
    names = assignment.targets[0]
    if isinstance(names, ast.Tuple) and isinstance(assignment.value, ast.Tuple):
        return any(isinstance(value, ast.Lambda) for value in assignment.value.elts)
    return isinstance(names, ast.Name) and isinstance(assignment.value, ast.Lambda)


def refused(text):
    """Return the line and the reason, sorted, of all statements of a program that are refused."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            for assignment in parts_of_calls(node):
                found.add((assignment.lineno, 'write these arguments into their call'))
        if isinstance(node, ast.Assign) and has_unlike_values(node):
            found.add((node.lineno, 'these values are not alike: give each an assignment'))
        if isinstance(node, ast.Assign) and is_named_lambda(node):
            found.add((node.lineno, 'this lambda has a name: make it a function'))
    return sorted(found)


def main(folders):
    is_plain = True
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob('*.py')):
            for line, reason in refused(path.read_text(encoding='utf-8')):
                print(f'{path}:{line}: {reason}')
                is_plain = False
    return 0 if is_plain else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
