"""The folder of a run: it belongs to one run, which writes settings, snapshots, models, results."""

import contextlib
import glob
import gzip
import json
import os
import pickle
import sys
import zipfile
import zlib

import numpy
import pandas
from chainer import serializers
from common.data import DataError

MODEL_FILE = 'model.npz'
BEST_FILE = 'best_model.npz'
SETTINGS_FILE = 'settings.json'
FAILED_FILE = 'failed.csv'
SNAPSHOT_FILE = 'snapshot_%s.%d'  # step, rank
RUN_FILES = (
    *(SETTINGS_FILE, MODEL_FILE, BEST_FILE, FAILED_FILE, 'log', 'result.json'),
    *('learning_curve.png', 'fit.png', 'snapshot_*.*'),
)


def check_folder(out, force, resume=False):
    """Refuse a folder for output in which there is something, unless the options allow it."""
    has_snapshot = bool(steps(out, 0))
    if os.path.exists(out) and not os.path.isdir(out):
        raise DataError('--out: expected a folder, got the file %s' % out)
    if resume and not has_snapshot:
        raise DataError('--resume: the folder %s has no snapshot' % out)
    if not (resume or force) and os.path.isdir(out) and os.listdir(out):
        raise DataError(
            '--out: the folder %s is not empty; expected a new one, %s--force to start again in it'
            % (out, '--resume to continue its run, or ' if has_snapshot else 'or ')
        )


def start_run(out, settings, force):
    """Make the folder of a run and claim it, by its settings; `force` removes a run that is there.

    Only one of several runs that start at the same time creates the file.
    """
    path = os.path.join(out, SETTINGS_FILE)
    os.makedirs(out, exist_ok=True)
    if force and os.path.exists(path):
        load_settings(out, settings['script'])  # refuses files that no run has written
        for pattern in RUN_FILES:
            for name in glob.glob(os.path.join(glob.escape(out), pattern)):
                os.remove(name)
    try:
        with open(path, 'x') as file:
            json.dump(settings, file, indent=1)
    except FileExistsError:
        raise DataError('--out: another run has just started in the folder %s' % out) from None


def continue_run(out, settings):
    """Refuse to continue a run with other settings."""
    before = load_settings(out, settings['script'])
    for name in settings:
        if name.startswith('data') or before.get(name) == settings[name]:
            continue
        if name == 'digest':
            raise DataError(
                '--resume: the data have other molecules or labels, or in another order, than '
                'those of the run in %s' % out
            )
        text = '--resume: %s was %r in the run in %s, and is %r now; both must be the same'
        raise DataError(text % (name, before.get(name), out, settings[name]))


def script_of(source):
    """Return the name of the script that a module is."""
    return os.path.basename(source.__file__)


def load_settings(folder, script):
    """Read the settings that a run of `script` left in a folder."""
    path = os.path.join(folder, SETTINGS_FILE)
    try:
        with open(path) as file:
            settings = json.load(file)
        found = settings['script']
    except FileNotFoundError:
        text = '%s not found: expected the folder of a run of %s'
        raise DataError(text % (path, script)) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError('%s cannot be read, or is not of a run: %s' % (path, error)) from error
    if found != script:
        raise DataError('%s is a folder of %s, expected one of %s' % (folder, found, script))
    return settings


@contextlib.contextmanager
def writing(path):
    """Say in one line what could not be written: a disk is full, or a folder is another user's."""
    try:
        yield
    except OSError as error:
        sys.unraisablehook = lambda _: None  # a half-written archive complains, too, when it goes
        raise DataError('cannot write %s: %s' % (path, error.strerror or error)) from error


def steps(out, rank):
    """Return the steps after which a rank has taken the snapshots in a folder."""
    paths = glob.glob(os.path.join(glob.escape(out), SNAPSHOT_FILE % ('*', rank)))
    return [int(path.split('_')[-1].split('.')[0]) for path in paths]


def resume(out, trainer, ranks):
    """Load the last snapshot that all ranks have taken: a kill may have come before some had."""
    step = max(ranks.common(steps(out, ranks.rank)), default=0)
    load_npz(os.path.join(out, SNAPSHOT_FILE % (step, ranks.rank)), trainer)


def check_new_file(path, force):
    """Refuse a file for output that exists, unless `force`, or that is in no folder."""
    if not os.path.isdir(os.path.dirname(path) or '.') or os.path.isdir(path):
        raise DataError('--out: cannot write the file %s: it, or its folder, is none' % path)
    if os.path.isfile(path) and not force:
        raise DataError('--out: %s exists; expected a new file, or --force to replace it' % path)


def is_special(path):
    """Return whether a path is there, but no file, such as /dev/stdout."""
    return os.path.exists(path) and not os.path.isfile(path)


def write_table(path, table):
    """Write a CSV file, compressed if it ends in .gz, as a whole or not at all."""
    folder, name = os.path.split(path)
    part = path if is_special(path) else os.path.join(folder, 'part_' + name)
    opened = gzip.open if path.endswith('.gz') else open
    with writing(path):
        # Not by name: pandas 1.3 leaves an error of the last bytes unsaid.
        with opened(part, 'wt', encoding='utf-8', newline='') as file:
            table.to_csv(file, index=False, float_format='%.7g')
        if part != path:
            os.replace(part, path)


def report_failures(rows, path=None, shown=10):
    """Print how many molecules cannot be used, and why the first ones; write all to a file."""
    bad = rows.take(rows.reason != '')
    failures = pandas.DataFrame({'row': bad.where, 'smiles': bad.smiles, 'reason': bad.reason})
    if failures.empty:
        return
    listed = '' if path is None else ', all listed in %s' % path
    print('%d molecule(s) could not be used%s' % (len(failures), listed))
    for row in failures.head(shown).itertuples(index=False):
        print('  %s: %.60r: %s' % row)
    if len(failures) > shown > 0:
        print('  ... and %d more' % (len(failures) - shown))
    if path is not None:
        write_table(path, failures)


def write_result(out, result):
    """Write a dict to OUT/result.json; numbers that are not finite become null, as JSON asks."""
    finite = json.loads(json.dumps(result), parse_constant=lambda name: None)
    with open(os.path.join(out, 'result.json'), 'w') as file:
        json.dump(finite, file, indent=1)


def load_npz(path, target):
    """Load a model or a trainer from its file."""
    if not os.path.exists(path):
        raise DataError('%s not found' % path)
    try:
        check_arrays(path)
        serializers.load_npz(path, target)
    except (  # RuntimeError: a part seems to be encrypted
        *(OSError, EOFError, LookupError, RuntimeError, ValueError),
        *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
    ) as error:
        text = '%s cannot be loaded, it is damaged or another kind of file: %s'
        raise DataError(text % (path, error)) from error


def check_arrays(path):
    """Refuse an .npz file with objects: loading them would run whatever code they name.

    Chainer stores None as an object; that is the only one allowed.
    """
    with open(path, 'rb') as file:
        # NumPy takes a file that starts otherwise for a pickle, even if an archive follows.
        if file.read(4) != b'PK\3\4':
            raise ValueError('expected an archive of arrays')
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as file:
                try:
                    numpy.lib.format.read_array(file)
                except ValueError:  # an object, at which NumPy has stopped reading
                    if OnlyArrays(file).load().item() is not None:
                        raise


class OnlyArrays(pickle.Unpickler):
    """Read an array of objects that need nothing but NumPy to be made."""

    def find_class(self, module, name):
        modules = 'numpy', 'numpy.core.multiarray', 'numpy._core.multiarray', '_codecs'
        if module in modules and name in ('dtype', 'ndarray', '_reconstruct', 'encode'):
            if name == '_reconstruct':  # other versions of NumPy have it elsewhere
                return numpy.empty(0).__reduce__()[0]
            return super().find_class(module, name)
        raise ValueError('%s.%s is an object, expected numbers' % (module, name))
