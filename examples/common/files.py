"""The folder of a run: it belongs to one run, which writes settings, snapshots, models, results."""

import contextlib
import glob
import gzip
import json
import math
import os
import pickle
import pickletools
import sys
import zipfile
import zlib

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
from chainer import serializers
from common.data import DataError
from common.data import shortened

MODEL_FILE = 'model.npz'
BEST_FILE = 'best_model.npz'
SETTINGS_FILE = 'settings.json'
SNAPSHOT_FILE = 'snapshot.npz'
RESULT_FILE = 'result.json'
FAILED_FILE = 'failed.csv'
LOG_FILE = 'log'  # LogReport's name
PLOT_FILE = 'learning_curve.png'
FIT_FILE = 'fit.png'
RUN_FILES = (
    *(SETTINGS_FILE, MODEL_FILE, BEST_FILE, RESULT_FILE, FAILED_FILE, LOG_FILE),
    *(PLOT_FILE, FIT_FILE),
)
UNREADABLE = (  # RuntimeError: a part seems to be encrypted
    *(OSError, EOFError, LookupError, RuntimeError, ValueError),
    *(zipfile.BadZipFile, zlib.error),
)


class Settings(dict):
    """The settings of a run; one that is missing is an error that names the file."""

    def __init__(self, path, values):
        super().__init__(values)
        self._path = path

    def __missing__(self, name):
        raise DataError('%s has no %r: it is not of a training' % (self._path, name))


def check_folder(out, force, resume=False):
    """Refuse a folder for output in which there is something, unless the options allow it."""
    if not out:
        raise DataError('--out: expected the name of a folder, got an empty one')
    if os.path.exists(out) and not os.path.isdir(out):
        raise DataError('--out: expected a folder, got the file %s' % out)
    if resume:
        if not os.path.exists(os.path.join(out, SNAPSHOT_FILE)):
            raise DataError('--resume: the folder %s has no %s' % (out, SNAPSHOT_FILE))
    elif not force and os.path.isdir(out) and os.listdir(out):
        is_run = os.path.exists(os.path.join(out, SNAPSHOT_FILE))
        raise DataError(
            '--out: the folder %s is not empty; expected a new one, %s--force to start again in it'
            % (out, '--resume to continue its run, or ' if is_run else 'or ')
        )


def start_run(out, settings, force):
    """Make the folder of a run and claim it, by its settings; `force` removes a run that is there.

    Only one of several runs that start at the same time creates the file.
    """
    path = os.path.join(out, SETTINGS_FILE)
    with writing(path):
        os.makedirs(out, exist_ok=True)
        if force and os.path.exists(path):
            load_settings(out, settings['script'])  # refuses files that no run has written
            snapshots = glob.glob(os.path.join(glob.escape(out), SNAPSHOT_FILE + '*'))
            for name in (*(os.path.join(out, name) for name in RUN_FILES), *snapshots):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(name)
        try:
            file = open(path, 'x')
        except FileExistsError:
            raise DataError('--out: another run has just started in the folder %s' % out) from None
        with file:
            _dump({**settings, 'folder': os.path.abspath(out)}, file)


def continue_run(out, settings):
    """Refuse to continue a run with other settings."""
    before = load_settings(out, settings['script'])
    for name in settings:
        if name == 'digest' and before[name] != settings[name]:
            raise DataError(
                '--resume: the data have other molecules or labels, or in another order, than '
                'those of the run in %s' % out
            )
        if name != 'data' and before.get(name) != settings[name]:
            raise DataError(
                '--resume: %s was %r in the run in %s, and is %r now; both must be the same'
                % (name, before.get(name), out, settings[name])
            )


def load_settings(folder, script):
    """Read the settings that a run of `script` left in a folder."""
    path = os.path.join(folder, SETTINGS_FILE)
    try:
        with open(path) as file:
            values = json.load(file)
    except FileNotFoundError:
        raise DataError(
            '%s not found: expected the folder of a run of %s' % (path, script)
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise DataError('%s cannot be read: %s' % (path, reason)) from error
    settings = Settings(path, values if isinstance(values, dict) else {})
    if settings['script'] != script:
        raise DataError(
            '%s is a folder of %s, expected one of %s' % (folder, settings['script'], script)
        )
    data = settings['data']
    if os.path.isabs(data) and not os.path.exists(data):
        # The folder may have moved together with the data.
        near = os.path.join(folder, os.path.relpath(data, settings['folder']))
        settings['data'] = os.path.abspath(near) if os.path.exists(near) else data
    return settings


@contextlib.contextmanager
def writing(path):
    """Say in one line what could not be written: a disk is full, or a folder is another user's."""
    try:
        yield
    except OSError as error:
        sys.unraisablehook = lambda _: None  # a half-written archive complains, too, when it goes
        raise DataError('cannot write %s: %s' % (path, error.strerror or error)) from error


def write_table(path, table):
    """Write a CSV file, compressed if it ends in .gz, as a whole or not at all.

    What is no file, such as /dev/stdout, is written to as it is.
    """
    is_special = os.path.exists(path) and not os.path.isfile(path)
    part = path if is_special else path + '.part'
    with writing(path):
        # Bytes that are not UTF-8 stay as they are.
        opened = gzip.open if path.endswith('.gz') else open
        with opened(part, 'wt', encoding='utf-8', errors='surrogateescape', newline='') as file:
            table.to_csv(file, index=False, float_format='%.7g')
        if not is_special:
            os.replace(part, path)


def check_new_file(path, force):
    """Refuse a file for output that exists, unless `force`, or that is in no folder."""
    if not os.path.isdir(os.path.dirname(path) or '.') or os.path.isdir(path):
        raise DataError('--out: cannot write the file %s: it, or its folder, is none' % path)
    if os.path.isfile(path) and not force:
        raise DataError('--out: %s exists; expected a new file, or --force to replace it' % path)


def report_failures(failures, path=None, shown=10):
    """Print how many molecules were left out, the first ones with the reason; write all to a file.

    `failures` is a table (row, smiles, reason).
    """
    if failures.empty:
        return
    listed = '' if path is None else ', all listed in %s' % path
    print('%d molecule(s) could not be used%s' % (len(failures), listed))
    for where, smiles, reason in failures.head(shown).itertuples(index=False):
        print('  %s: %r: %s' % (where, shortened(smiles), reason))
    if len(failures) > shown > 0:
        print('  ... and %d more' % (len(failures) - shown))
    if path is not None:
        write_table(path, failures)


def write_result(out, result):
    """Write a dict to OUT/result.json; numbers that are not finite become null, as JSON asks."""
    path = os.path.join(out, RESULT_FILE)
    with writing(path), open(path, 'w') as file:
        _dump(_finite(result), file)


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dump(value, file):
    json.dump(value, file, indent=1, allow_nan=False)
    file.write('\n')


def save_model(out, model):
    """Write the parameters, and the scaler of the labels if there is one, to OUT/model.npz."""
    path = os.path.join(out, MODEL_FILE)
    with writing(path):
        serializers.save_npz(path, model)
    return path


def load_npz(path, target):
    """Load a model or a trainer from its file."""
    if not os.path.exists(path):
        raise DataError('%s not found' % path)
    try:
        check_arrays(path)
        serializers.load_npz(path, target)
    except UNREADABLE as error:
        raise DataError(
            '%s cannot be loaded, it is damaged or another kind of file: %s' % (path, error)
        ) from error


def check_arrays(path):
    """Refuse an .npz file with objects: loading them would run whatever code they name.

    Chainer stores None as an object; that is the only one allowed. Nothing is unpickled here.
    """
    with open(path, 'rb') as file:
        # NumPy takes a file that starts otherwise for a pickle, even if an archive follows.
        if file.read(4) != b'PK\3\4':
            raise ValueError('expected an archive of arrays')
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as file:
                if _has_objects(file) and _opcodes(file.read()) not in NONES:
                    raise ValueError('%s is an object, expected numbers' % info.filename)


def _has_objects(file):
    """Return whether an .npy file has objects, and leave it where the numbers or objects begin."""
    version = numpy.lib.format.read_magic(file)
    readers = numpy.lib.format.read_array_header_1_0, numpy.lib.format.read_array_header_2_0
    _, _, dtype = readers[version[0] - 1](file)
    return dtype.hasobject


def _opcodes(pickled):
    """Return what a pickle would do, without doing it; NumPy 2 has another name for a module."""
    return [
        (code.name, arg.replace('numpy._core', 'numpy.core') if isinstance(arg, str) else arg)
        for code, arg, _ in pickletools.genops(pickled)
        if code.name != 'FRAME'  # its argument is a length
    ]


NONES = [_opcodes(pickle.dumps(numpy.array(None, object), protocol)) for protocol in (2, 3, 4, 5)]
