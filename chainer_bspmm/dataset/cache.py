"""Cache of parsed SMILES on disk, keyed by the SMILES, the preprocessor and the versions."""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import pkgutil
import re
import tempfile
import warnings

import chainer_chemistry
import numpy

from chainer_bspmm.dataset.molecules import Molecules

# The modules that decide how SMILES are parsed, and how the result is written.
SOURCES = ('cache.py', 'molecules.py', 'smiles.py')
VARIABLE = 'CHAINER_BSPMM_CACHE_DIR'
NAME_LENGTH, SUFFIX = 40, '.npz'
OWN_NAME = re.compile(r'[0-9a-f]{%d}(\.npz|\w{8}\.tmp)' % NAME_LENGTH)
MOST_BYTES = 2 * 2**30  # of all files; the least recently used files are removed first


def directory():
    """Return the folder (pathlib.Path): $CHAINER_BSPMM_CACHE_DIR, else the user's cache folder."""
    if os.environ.get(VARIABLE):
        return pathlib.Path(os.environ[VARIABLE]).expanduser()
    base = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    return pathlib.Path(base, 'chainer_bspmm')


@functools.lru_cache(maxsize=None)
def _own_version():
    """Return a digest of SOURCES (str), so that changes between releases are noticed, too."""
    texts = [pkgutil.get_data(__package__, name) for name in SOURCES]
    return hashlib.sha256(b''.join(texts)).hexdigest()


def path_for(smiles, preprocessor):
    """Return the file (pathlib.Path) of some SMILES, or None if not all of them are strings."""
    if not all(issubclass(kind, str) for kind in set(map(type, smiles))):
        return None
    import rdkit

    options = type(preprocessor).__name__, sorted(vars(preprocessor).items())
    versions = chainer_chemistry.__version__, rdkit.__version__, _own_version()
    state = hashlib.sha256(repr((options, versions)).encode())
    # The lengths tell where each SMILES ends. No separator would: a text may contain any character.
    state.update(numpy.fromiter(map(len, smiles), numpy.int64, len(smiles)).tobytes())
    state.update(''.join(smiles).encode('utf-8', 'surrogatepass'))
    return directory() / (state.hexdigest()[:NAME_LENGTH] + SUFFIX)


def read(path):
    """Return the arguments of :func:`write`, or None if there is no file or it is damaged."""
    try:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        canonical = arrays.pop('canonical').tobytes().decode()
        kept = arrays.pop('kept')
        failures = json.loads(arrays.pop('failures').tobytes())
        molecules = Molecules.from_arrays(arrays)
    except Exception:  # there are many kinds of damage
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # _remove_oldest goes by the time of the last use
    return molecules, canonical.split('\n'), kept, failures


def write(path, molecules, canonical, kept, failures):
    """Write a file atomically, so that no process reads a part of it; warn if that fails."""
    texts = {'canonical': '\n'.join(canonical), 'failures': json.dumps(failures)}
    arrays = {name: numpy.frombuffer(text.encode(), numpy.uint8) for name, text in texts.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=path.stem, suffix='.tmp', delete=False
        ) as file:
            try:
                numpy.savez(file, kept=kept, **arrays, **molecules.arrays())
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        words = path.parent, error.strerror, VARIABLE
        text = 'cache: cannot write to %s: %s; set %s to another folder' % words
        warnings.warn(text, stacklevel=3)
    else:
        _remove_oldest(path.parent)


def _remove_oldest(folder):
    total = 0
    with contextlib.suppress(OSError):  # another process removes files, too
        # Files are chosen by name, because the folder that a user names may hold other files.
        # Unfinished files of processes that were killed have such names as well.
        files = [file for file in folder.iterdir() if OWN_NAME.fullmatch(file.name)]
        for file in sorted(files, key=lambda file: -file.stat().st_mtime):
            total += file.stat().st_size
            if total > MOST_BYTES:
                file.unlink()
