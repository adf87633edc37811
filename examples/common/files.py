"""The files in the folder of a run: settings, model, snapshot, result."""

import contextlib
import glob
import json
import os
import pickle
import re
import shutil
import tempfile
import zipfile
import zlib

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
from chainer import serializers
from common.data import DataError

MODEL_FILE = 'model.npz'
SETTINGS_FILE = 'settings.json'
SNAPSHOT_FILE = 'snapshot.npz'
RESULT_FILE = 'result.json'
FAILED_FILE = 'failed.csv'
LOG_FILE = 'log'  # LogReport's name
PLOT_FILE = 'learning_curve.png'
RUN_FILES = [
    MODEL_FILE,
    SETTINGS_FILE,
    SNAPSHOT_FILE,
    RESULT_FILE,
    FAILED_FILE,
    LOG_FILE,
    PLOT_FILE,
]
# Files that become invalid when the settings change.
STALE_FILES = [MODEL_FILE, SNAPSHOT_FILE, RESULT_FILE, PLOT_FILE]
# Folders of LogReport and of a file with this name, with eight characters of `tempfile`.
TEMPORARY = re.compile(re.escape(LOG_FILE) + r'[a-z0-9_]{8}|tmp(.+\..+)[a-z0-9_]{8}')
UNREADABLE = (  # of an archive that is damaged or another kind of file, when it is read
    OSError,
    EOFError,
    KeyError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)
DAMAGED = '%s cannot be loaded, it is damaged or another kind of file: %s'
COMPRESSED = '.gz', '.bz2', '.zip', '.xz', '.zst'  # endings that pandas knows
# Settings that earlier versions did not write.
EARLIER = {'layout': 'packed', 'padded_to': None, 'ranks': 1, 'skip_missing': False}


def make_folder(out):
    """Make the output folder of a run, if it does not exist."""
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise DataError('--out: cannot make the folder %s: %s' % (out, error.strerror)) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise DataError('--out: cannot write into the folder %s' % out)


def of_run(folder):
    """Return the paths of what a training writes into its folder."""
    return [os.path.join(folder, name) for name in RUN_FILES]


def is_one_of(path, others):
    """Tell whether a file that exists is one of some others, by whatever names."""
    return os.path.exists(path) and any(
        os.path.exists(other) and os.path.samefile(path, other) for other in others
    )


@contextlib.contextmanager
def replacing(path):
    """Give a path to write to; the file there takes the place of `path` only when it is whole."""
    if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout
        yield path
        return
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    # The prefix is that of Chainer's snapshots; the ending of the name may decide a compression.
    with tempfile.TemporaryDirectory(prefix='tmp' + name, dir=folder) as temporary:
        yield os.path.join(temporary, name)
        os.replace(os.path.join(temporary, name), path)


def table_file(path):
    """Return a context with what a table of pandas is written to: a file, or a path to compress.

    pandas before 1.5 swallows an error at the end, such as of a full disk, in files that it opens.
    """
    if path.endswith(COMPRESSED):
        return contextlib.nullcontext(path)
    return open(path, 'w', encoding='utf-8', newline='')


def write_json(path, value):
    """Write a dict to a readable file."""
    with replacing(path) as new, open(new, 'w') as f:
        json.dump(value, f, indent=1)
        f.write('\n')


def start_folder(out, settings):
    """Write the settings of a run to OUT/settings.json.

    The files of an earlier run with other settings are removed, and what a killed one has left.
    """
    remove_leftovers(out)
    path = os.path.join(out, SETTINGS_FILE)
    here = {'folder': os.path.abspath(out)}
    settings = {**settings, **here}
    before = os.path.exists(path) and {**load_settings(out, settings['script']), **here}
    if before and before != {**EARLIER, **settings}:
        of_ranks = glob.glob(glob.escape(os.path.join(out, SNAPSHOT_FILE)) + '.[0-9]*')
        for name in [*(os.path.join(out, name) for name in STALE_FILES), *of_ranks]:
            if os.path.exists(name):
                os.remove(name)
    write_json(path, settings)


def remove_leftovers(out):
    """Remove the temporary folders of a run that was killed: Chainer's and those of `replacing`."""
    for entry in list(os.scandir(out)):
        found = TEMPORARY.fullmatch(entry.name)
        if found and entry.is_dir(follow_symlinks=False):
            if set(os.listdir(entry)) <= {found[1] or 'log.json'}:
                shutil.rmtree(entry)


def check_not_longer(out, epochs, force):
    """Refuse to overwrite a run in a folder with one of fewer epochs, unless `force`."""
    if not force and n_epochs(out) > epochs:
        raise DataError(
            '--out: %s has a run of %d epochs, and this one would overwrite it with %d; use '
            'another folder, or --force' % (out, n_epochs(out), epochs)
        )


def n_epochs(out):
    """Return how many epochs the log of a run in a folder has; 0 where there is none."""
    try:
        with open(os.path.join(out, LOG_FILE)) as f:
            return int(json.load(f)[-1]['epoch'])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def load_settings(folder, script):
    """Read the settings that a run of `script` left in a folder."""
    path = os.path.join(folder, SETTINGS_FILE)
    try:
        with open(path) as f:
            settings = {**EARLIER, 'script': script, **json.load(f)}
    except FileNotFoundError:
        raise DataError(
            '%s not found: %s is not an output folder of %s' % (path, folder, script)
        ) from None
    except ValueError as error:
        raise DataError('%s cannot be read: %s' % (path, error)) from error
    before = settings.pop('folder', None)
    if before and os.path.isabs(settings['data']) and not os.path.exists(settings['data']):
        # The folder may have moved together with the data.
        near = os.path.join(folder, os.path.relpath(settings['data'], before))
        if os.path.exists(near):
            settings['data'] = os.path.abspath(near)
    return settings


def save_model(out, model):
    """Write the parameters, and the scaler of the labels if there is one, to OUT/model.npz."""
    path = os.path.join(out, MODEL_FILE)
    with replacing(path) as new:
        serializers.save_npz(new, model)
    return path


def check_snapshot(path):
    """Refuse a file that is no whole snapshot of a trainer before anything depends on it."""
    try:
        with zipfile.ZipFile(path) as file:
            file.getinfo('updater/iteration.npy')  # a model has none
            damaged = file.testzip()
    except (*UNREADABLE, RuntimeError) as error:  # the latter where a part seems encrypted
        raise DataError(DAMAGED % (path, error)) from error
    if damaged:
        raise DataError(DAMAGED % (path, damaged))


def load_npz(path, target):
    """Load a model or a trainer from its file."""
    try:
        serializers.load_npz(path, target)
    except UNREADABLE as error:
        raise DataError(DAMAGED % (path, error)) from error


def load_model(folder, task, settings, dense, device):
    """Load a trained model from a folder, into the sparse or into upstream's dense model."""
    path = os.path.join(folder, MODEL_FILE)
    if not os.path.exists(path):
        raise DataError('%s not found: the training in %s has not been finished' % (path, folder))
    model = task.build(settings, dense)
    load_npz(path, model)
    model.to_device(device)
    return model
