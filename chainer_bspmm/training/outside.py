"""`reaches_outside`: whether code visibly writes files, starts processes or talks to others.

A forked copy of this process changes neither the memory nor the open files of this one, but such
code has effects beyond the copy.
"""

import dis
import types
from collections.abc import Iterable

from chainer_bspmm.training.code_names import code_names

# Names of functions and methods that write to what they open, or start a process.
_OPENING = {
    *('open', 'openpty', 'fdopen', 'memmap', 'open_memmap', 'SharedMemory'),
    *('write_text', 'write_bytes', 'touch', 'mkdir', 'makedirs', 'unlink', 'rmdir', 'symlink_to'),
    *('save', 'savez', 'savez_compressed', 'savetxt', 'savefig', 'tofile', 'dump'),
    *('save_npz', 'save_hdf5', 'to_csv', 'to_pickle', 'to_parquet', 'to_hdf', 'to_excel'),
    *('execute', 'executemany', 'executescript', 'commit', 'sendall', 'sendto', 'urlopen'),
    *('system', 'popen', 'Popen', 'check_call', 'check_output', 'posix_spawn'),
    *('Process', 'Pool', 'ProcessPoolExecutor'),
}
# Such names in the module os. Methods of lists, strings and others have some of them, too, so only
# functions of os count.
_OF_OS = {
    *('remove', 'removedirs', 'rename', 'renames', 'replace', 'truncate', 'symlink', 'link'),
    *('kill', 'killpg', 'fork', 'forkpty', 'chmod', 'chown', 'utime', 'mkfifo', 'startfile'),
    *('execv', 'execve', 'execvp', 'spawnl', 'spawnv', 'spawnvp'),
}
_OS = {'os', 'posix', 'nt'}
# Modules of which every function and class may do so.
_MODULES = {
    *('subprocess', 'socket', 'sqlite3', 'shelve', 'dbm', 'shutil', 'tempfile'),
    *('requests', 'urllib', 'http', 'smtplib', 'ftplib'),
    *('wandb', 'mlflow', 'neptune', 'comet_ml'),
}
_MADE_BY_MODULES = type, types.FunctionType, types.BuiltinFunctionType


def reaches_outside(functions: Iterable[types.FunctionType]) -> str:
    """Return a clause that completes "it would ..." and names a function, or an empty text."""
    for function in functions:
        name = _name_that_reaches(function)
        if name:
            text = 'repeat what %s does outside of Python (%s)'
            return text % (function.__name__, name)
    return ''


def _name_that_reaches(function):
    names = code_names(function.__code__)
    found = (names.globals.keys() | names.attributes.keys()) & _OPENING
    found |= _attributes_of_os(function.__code__)
    modules = {name.partition('.')[0] for name in names.modules}
    for name in names.globals:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            modules.add(value.__name__.partition('.')[0])
        elif isinstance(value, _MADE_BY_MODULES):
            module = (getattr(value, '__module__', None) or '').partition('.')[0]
            if module in _MODULES or (module in _OS and value.__name__ in _OF_OS):
                found.add(name)
    return next(iter(sorted(found | modules & _MODULES)), '')


def _attributes_of_os(code):
    """Return the names in `_OF_OS` that code, with code within it, imports or reads from `os`."""
    found = set()
    before = module = None
    for each in dis.get_instructions(code):
        if each.opname == 'IMPORT_NAME':
            module = each.argval
        # One import may have several names, so its module need not come just before a name.
        owner = module if each.opname == 'IMPORT_FROM' else before
        if owner == 'os' and each.argval in _OF_OS:
            found.add(each.argval)
        before = each.argval if isinstance(each.argval, str) else None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _attributes_of_os(inner)
    return found
