"""The model of the scripts beside this file: build, save, load, predict."""
import argparse
import contextlib
import io
import json
import os

import chainer_bspmm  # first: lets Chainer import on today's Python and NumPy
import chainer
import chainer.functions as F
from chainer import serializers
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
from qm9_data import DataError
from qm9_data import target_names

METHODS = ['rsgcn']
MODEL_FILE = 'model.npz'
SETTINGS_FILE = 'settings.json'


def scaled_error(scaler, lossfun):
    """Return `lossfun` of the errors in units of each target's standard deviation.

    The predictor answers in the targets' own units, where one rotational constant in GHz would
    outweigh all energies in hartree.
    """
    def error(y, t):
        return lossfun(scaler.transform(y), scaler.transform(t))
    return error


def build_regressor(settings, dense, scaler):
    """Build upstream's model, and swap in the sparse products unless `dense`.

    Args:
        settings (dict): 'method', 'label', 'unit_num', 'conv_layers'.
        dense (bool): keep upstream's dense model.
        scaler (StandardScaler): fitted to the training labels, or about to be loaded.

    Returns:
        Regressor: its log value 'mae' is in the target's unit for one target, and in standard
        deviations for all of them together.
    """
    n_targets = len(target_names(settings['label']))
    # Upstream's dropout of one half is for classification; in a regression it is mostly noise.
    with contextlib.redirect_stdout(io.StringIO()):  # upstream prints what it sets up
        predictor = set_up_predictor(settings['method'], settings['unit_num'],
                                     settings['conv_layers'], n_targets, label_scaler=scaler,
                                     conv_kwargs={'dropout_ratio': 0.})
    if not dense:
        predictor = chainer_bspmm.sparsify(predictor)
    mae = F.mean_absolute_error
    if n_targets > 1:
        mae = scaled_error(scaler, mae)
    return Regressor(predictor, lossfun=scaled_error(scaler, F.mean_squared_error),
                     metrics_fun={'mae': mae})


def converter_of(dense):
    """Return the converter that goes with the model: padded for the dense one, packed otherwise."""
    return dense_concat_mols if dense else chainer_bspmm.concat_mols


def start_folder(out, settings, files):
    """Write the settings of a run to OUT/settings.json.

    What an earlier run with other settings left there under the names `files` is removed: the
    settings would no longer describe it.
    """
    path = os.path.join(out, SETTINGS_FILE)
    if os.path.exists(path) and load_settings(out) != settings:
        for name in files:
            if os.path.exists(os.path.join(out, name)):
                os.remove(os.path.join(out, name))
    with open(path, 'w') as f:
        json.dump(settings, f, indent=1, sort_keys=True)
        f.write('\n')


def load_settings(folder):
    """Read the settings that a run left in a folder."""
    path = os.path.join(folder, SETTINGS_FILE)
    try:
        with open(path) as f:
            return json.load(f)
    except FileNotFoundError:
        raise DataError('%s not found: %s is no output folder of train_qm9.py'
                        % (path, folder)) from None


def save_model(out, regressor):
    """Write the parameters, and the scaler of the labels, to OUT/model.npz."""
    serializers.save_npz(os.path.join(out, MODEL_FILE), regressor)


def load_model(folder, dense, device):
    """Load what train_qm9.py left in a folder, into the sparse or into upstream's dense model.

    Returns:
        tuple: (Regressor on the device, settings (dict)).
    """
    settings = load_settings(folder)
    path = os.path.join(folder, MODEL_FILE)
    if not os.path.exists(path):
        raise DataError('%s not found: the training in %s has not been finished' % (path, folder))
    regressor = build_regressor(settings, dense, StandardScaler())
    serializers.load_npz(path, regressor)
    regressor.to_device(device)
    return regressor, settings


def predict(regressor, dataset, dense, batchsize):
    """Predict the targets of a data set.

    Args:
        regressor (Regressor): the model.
        dataset (dataset): of (atoms, adj[, labels]).
        dense (bool): whether the model is upstream's dense one.
        batchsize (int): molecules a batch.

    Returns:
        numpy.ndarray: (M, T) float32, in the targets' units.
    """
    convert = converter_of(dense)

    def inputs_only(batch, device=None):
        return tuple(convert([example[:2] for example in batch], device))

    return regressor.predict(dataset, batchsize=batchsize, converter=inputs_only)


def get_device(specifier):
    """Return the Chainer device of `--device`: a negative number is the CPU, another a GPU."""
    try:
        return chainer.get_device(
            int(specifier) if specifier.lstrip('-').isdigit() else specifier)
    except Exception as error:
        raise DataError('--device %s cannot be used: %s: %s' % (
            specifier, type(error).__name__, error)) from error


def at_least(kind, bound):
    """Return a converter of command line values that refuses those below `bound`."""
    def convert(text):
        value = kind(text)
        if value < bound:
            raise argparse.ArgumentTypeError('got %s, expected at least %s' % (text, bound))
        return value
    convert.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return convert
