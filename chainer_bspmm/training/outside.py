"""`reaches_outside`: whether code visibly writes files, starts processes or talks to others.

A copy of this process keeps everything from it that is in memory or open, but not that.
"""

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
}
# Names that do so if they are those of the module os; they are methods of lists and strings, too.
_OF_OS = {
    *('remove', 'removedirs', 'rename', 'renames', 'replace', 'truncate', 'symlink', 'link'),
    *('kill', 'killpg', 'fork', 'forkpty', 'chmod', 'chown', 'utime', 'mkfifo', 'startfile'),
    *('execv', 'execve', 'execvp', 'spawnl', 'spawnv', 'spawnvp'),
}
_OS = {'os', 'posix', 'nt'}
# Modules all of whose functions and classes do so.
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
    used = names.globals.keys() | names.attributes.keys()
    found = used & _OPENING
    modules = {name.partition('.')[0] for name in names.modules}
    for name in names.globals:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            modules.add(value.__name__.partition('.')[0])
        elif isinstance(value, _MADE_BY_MODULES):
            module = (getattr(value, '__module__', None) or '').partition('.')[0]
            if module in _MODULES or (module in _OS and value.__name__ in _OF_OS):
                found.add(name)
    if modules & _OS:
        found |= used & _OF_OS
    return next(iter(sorted(found | modules & _MODULES)), '')
