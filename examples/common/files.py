"""The files in the folder of a run: settings, model, snapshot, result."""

import glob
import json
import os
import pickle
import zipfile

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
from chainer import serializers
from common.data import DataError

MODEL_FILE = 'model.npz'
SETTINGS_FILE = 'settings.json'
SNAPSHOT_FILE = 'snapshot.npz'
RESULT_FILE = 'result.json'
FAILED_FILE = 'failed.csv'
LOG_FILE = 'log'  # LogReport's name
# Files that become invalid when the settings change.
STALE_FILES = [MODEL_FILE, SNAPSHOT_FILE, RESULT_FILE]


def make_folder(out):
    """Make the output folder of a run, if it does not exist."""
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise DataError('--out: cannot make the folder %s: %s' % (out, error.strerror)) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise DataError('--out: cannot write into the folder %s' % out)


def write_json(path, value):
    """Write a dict to a readable file."""
    with open(path, 'w') as f:
        json.dump(value, f, indent=1)
        f.write('\n')


def start_folder(out, settings):
    """Write the settings of a run to OUT/settings.json.

    The files of an earlier run with other settings are removed.
    """
    path = os.path.join(out, SETTINGS_FILE)
    if os.path.exists(path) and load_settings(out, settings['script']) != settings:
        of_ranks = glob.glob(glob.escape(os.path.join(out, SNAPSHOT_FILE)) + '.[0-9]*')
        for name in [*(os.path.join(out, name) for name in STALE_FILES), *of_ranks]:
            if os.path.exists(name):
                os.remove(name)
    write_json(path, settings)


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
            # Settings that earlier versions did not write.
            earlier = {'script': script, 'layout': 'packed', 'padded_to': None, 'ranks': 1}
            return {**earlier, **json.load(f)}
    except FileNotFoundError:
        raise DataError(
            '%s not found: %s is not an output folder of %s' % (path, folder, script)
        ) from None
    except ValueError as error:
        raise DataError('%s cannot be read: %s' % (path, error)) from error


def save_model(out, model):
    """Write the parameters, and the scaler of the labels if there is one, to OUT/model.npz."""
    path = os.path.join(out, MODEL_FILE)
    serializers.save_npz(path, model)
    return path


def load_npz(path, target):
    """Load a model or a trainer from its file."""
    try:
        serializers.load_npz(path, target)
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise DataError(
            '%s cannot be loaded, it is damaged or another kind of file: %s' % (path, error)
        ) from error


def load_model(folder, task, settings, dense, device):
    """Load a trained model from a folder, into the sparse or into upstream's dense model."""
    path = os.path.join(folder, MODEL_FILE)
    if not os.path.exists(path):
        raise DataError('%s not found: the training in %s has not been finished' % (path, folder))
    model = task.build(settings, dense)
    load_npz(path, model)
    model.to_device(device)
    return model
