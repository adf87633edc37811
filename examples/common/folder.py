"""The folder of a run: it belongs to one run, which writes settings, snapshots, models, results."""

import codecs
import contextlib
import io
import json
import os
import pickle
import re
import zipfile
import zlib

import numpy
from chainer import serializers
from common import data
from common.data import DataError
from common.tasks import converter_of

MODEL_FILE = 'model.npz'
BEST_FILE = 'best_model.npz'
SETTINGS_FILE = 'settings.json'
FAILED_FILE = 'failed.csv'
TEST_FILE = 'test.csv'  # the test molecules, as they were read
KNOWN_FILE = 'training.csv'  # canonical SMILES of the training molecules
PREDICTIONS_FILE = 'predictions.csv'  # of the model, unless --out of a prediction names another
SNAPSHOT_FILE = 'snapshot_%s.%d'  # step, rank
SNAPSHOT = re.compile(r'snapshot_([1-9][0-9]*)\.(0|[1-9][0-9]*)')
RUN_FILES = (
    *(SETTINGS_FILE, MODEL_FILE, BEST_FILE, FAILED_FILE, TEST_FILE, KNOWN_FILE),
    *('log', 'result.json', 'learning_curve.png', 'fit.png', PREDICTIONS_FILE),
)
# All other settings decide the model or the data: a resumed run must have the same.
MAY_CHANGE = ('data', 'epoch', 'patience', 'device', 'updater', 'communicator')


def refuse_file(out):
    """Refuse an output folder that is a file, or a link that leads nowhere."""
    if os.path.lexists(out) and not os.path.isdir(out):
        found = 'the file %s' if os.path.exists(out) else '%s, a link that leads nowhere'
        raise DataError('--out: expected a folder, got ' + found % out)


def check(out, force, resume=False, source=''):
    """Refuse an output folder that is not empty, unless the options allow it.

    Also refuses that `force` removes the file of data, `source`, if there is one.
    """
    refuse_file(out)
    has_snapshot = bool(steps(out, 0))
    if resume and not has_snapshot:
        raise DataError('--resume: the folder %s has no snapshot' % out)
    if resume or not os.path.isdir(out) or not os.listdir(out):
        return
    if not os.path.exists(os.path.join(out, SETTINGS_FILE)):
        raise DataError(
            '--out: the folder %s has files that are not of a run, which --force does not remove; '
            'expected a new one' % out
        )
    if not force:
        raise DataError(
            '--out: the folder %s is not empty; expected a new one, %s--force to start again in it'
            % (out, '--resume to continue its run, or ' if has_snapshot else 'or ')
        )
    for path in files_of_run(out):
        if data.is_input(path, source):
            raise DataError('--force would remove %s, which --data reads; copy it elsewhere' % path)


def files_of_run(out):
    """Return the paths of a folder that have the name of a file of a run."""
    names = [name for name in os.listdir(out) if name in RUN_FILES or SNAPSHOT.fullmatch(name)]
    return [os.path.join(out, name) for name in sorted(names)]


def remove_run(out):
    """Remove the files that a run has written, unless a folder has the name of such a file."""
    paths = files_of_run(out)
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            text = '--force removes files of a run, and %s is a folder; move it elsewhere'
            raise DataError(text % path)
    for path in paths:
        os.remove(path)


def start_run(out, settings, force):
    """Make the folder of a run and claim it with its settings; `force` removes an earlier run.

    If several runs start at the same time, only one of them creates the file of settings.
    """
    path = os.path.join(out, SETTINGS_FILE)
    os.makedirs(out, exist_ok=True)
    if force and os.path.exists(path):
        load_settings(out, settings['script'])  # refuses files that no run has written
        remove_run(out)
    try:
        with open(path, 'x') as file:
            json.dump(settings, file, indent=1)
    except FileExistsError:
        raise DataError('--out: another run has just started in the folder %s' % out) from None


def refuse_changes(out, before, settings):
    """Refuse to continue a run with other settings, except for `MAY_CHANGE`."""
    for name, value in settings.items():
        if name in MAY_CHANGE or before.get(name, value) == value:
            continue
        if name == 'digest':
            raise DataError(
                '--resume: the molecules, their labels or their order differ from those of the '
                'run in %s' % out
            )
        text = '--resume: %s was %r in the run in %s, and is %r now; both must be the same'
        raise DataError(text % (name, before[name], out, value))


def write_json(path, content):
    """Write a dict; numbers that are not finite become null, as JSON asks."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    with data.replacing(path) as new, open(new, 'w') as file:
        json.dump(finite, file, indent=1)


@contextlib.contextmanager
def reading_settings(folder):
    """Turn an error of settings that no run has written into a DataError."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        path = os.path.join(folder, SETTINGS_FILE)
        raise DataError('%s cannot be read, or is not of a run: %s' % (path, error)) from error


def load_settings(folder, script):
    """Read the settings that a run of `script`, a name or a path, left in a folder."""
    script = os.path.basename(script)
    path = os.path.join(folder, SETTINGS_FILE)
    if not os.path.exists(path):
        text = '%s not found: expected the folder of a run of %s'
        raise DataError(text % (path, script))
    with reading_settings(folder):
        with open(path) as file:
            settings = json.load(file)
        found = settings['script']
    if found != script:
        raise DataError('%s is a folder of %s, expected one of %s' % (folder, found, script))
    return settings


def load_run(folder, source):
    """Load the settings of a run of the module `source`, and make the objects that they decide.

    Returns (settings, task, model without its parameters, converter).
    """
    settings = load_settings(folder, source.__file__)
    with reading_settings(folder):
        # A model that was trained dense predicts in folded batches: the results are equal.
        layout = 'folded' if settings['layout'] == 'dense' else settings['layout']
        converter = converter_of(layout, settings['padded_to'])
        task = source.task_of(settings)
        return settings, task, task.build(settings, dense=False), converter


def steps(out, rank):
    """Return the steps after which a rank has taken the snapshots in a folder."""
    names = os.listdir(out) if os.path.isdir(out) else []
    files = [name for name in names if os.path.isfile(os.path.join(out, name))]
    matches = [match for match in map(SNAPSHOT.fullmatch, files) if match]
    return [int(match.group(1)) for match in matches if int(match.group(2)) == rank]


def remove_snapshots(out, last, n_kept):
    """Remove all but the last snapshots of the rank that has just written the file `last`."""
    rank = int(SNAPSHOT.fullmatch(last).group(2))
    for step in sorted(steps(out, rank))[:-n_kept]:
        os.remove(os.path.join(out, SNAPSHOT_FILE % (step, rank)))


def load_snapshot(out, trainer, ranks):
    """Load the last snapshot that all ranks have; a kill may have left some without the newest."""
    step = max(ranks.common(steps(out, ranks.rank)), default=0)
    load_npz(os.path.join(out, SNAPSHOT_FILE % (step, ranks.rank)), trainer)


def load_npz(path, target):
    """Load a model or a trainer from its file, which may contain nothing but arrays and None.

    Loading other objects would run any code that they name. Chainer stores None as an object.
    """
    if not os.path.exists(path):
        raise DataError('%s not found' % path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            arrays = {name[: -len('.npy')]: read_array(archive.read(name)) for name in names}
        serializers.NpzDeserializer(arrays).load(target)
    except (  # RuntimeError: a part seems to be encrypted
        *(OSError, EOFError, LookupError, RuntimeError, ValueError),
        *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
    ) as error:
        text = '%s cannot be loaded, it is damaged or another kind of file: %s'
        raise DataError(text % (path, error)) from error


def read_array(content):
    """Read the array of an .npy file: numbers, or an object array of None."""
    file = io.BytesIO(content)
    try:
        return numpy.lib.format.read_array(file)
    except ValueError:  # an object, at which NumPy has stopped reading
        array = OnlyNone(file).load()
        if array.item() is not None:
            raise
        return array


class OnlyNone(pickle.Unpickler):
    """Unpickler of arrays of None, which calls only functions that make NumPy's arrays.

    Functions are found by their names, whatever modules a file names: `_reconstruct` has moved
    between versions of NumPy.
    """

    def find_class(self, module, name):
        found = {
            '_reconstruct': numpy.empty(0).__reduce__()[0],
            'ndarray': numpy.ndarray,
            'dtype': numpy.dtype,
            'encode': codecs.encode,
        }
        if name not in found:
            raise ValueError(
                'it contains the object %s.%s, and loading objects may run code' % (module, name)
            )
        return found[name]
