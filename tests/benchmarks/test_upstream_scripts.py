"""Scripts in the style of Chainer Chemistry's, which are not here, run in both ways."""

import json

import pytest

from benchmarks import upstream_scripts

TRAIN = """#!/usr/bin/env python
from __future__ import print_function

import argparse
import os

import chainer
import numpy
from chainer import functions as F

from chainer_chemistry import datasets as D
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
from chainer_chemistry.utils import run_train

parser = argparse.ArgumentParser()
method_list = ['rsgcn', 'relgcn', 'schnet']
parser.add_argument('--method', '-m', choices=method_list)
parser.add_argument('--label', '-l')
for short, name in (('-e', '--epoch'), ('-b', '--batch'), ('-u', '--unit'), ('-c', '--conv')):
    parser.add_argument(short, name, type=int)
args = parser.parse_args()
dataset = D.get_qm9(preprocess_method_dict[args.method](), labels=args.label)
scaler = StandardScaler()
scaler.fit(numpy.array([example[-1] for example in dataset]))
predictor = set_up_predictor(args.method, args.unit, args.conv, 1, scaler)
regressor = Regressor(predictor, lossfun=F.mean_squared_error, device=-1)
run_train(regressor, dataset, batch_size=args.batch, epoch=args.epoch, out='result',
          converter=dataset.converter)
regressor.save_pickle(os.path.join('result', 'regressor.pkl'))
"""
PREDICT = """
import argparse
import os

from chainer_chemistry import datasets as D
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.models.prediction import Regressor

parser = argparse.ArgumentParser()
for short, name in ('-m', '--method'), ('-l', '--label'):
    parser.add_argument(short, name)
args = parser.parse_args()
dataset = D.get_qm9(preprocess_method_dict[args.method](), labels=args.label)
regressor = Regressor.load_pickle(os.path.join('result', 'regressor.pkl'))


def inputs(batch, device=None):
    return dataset.converter(batch, device=device)[:-1]


assert regressor.predict(dataset, converter=inputs).shape == (len(dataset), 1)
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / 'checkout' / 'examples' / 'qm9'
    folder.mkdir(parents=True)
    (folder / 'train_qm9.py').write_text(TRAIN)
    (folder / 'predict_qm9.py').write_text(PREDICT)
    return tmp_path / 'checkout'


@pytest.mark.slow  # what is edited in the scripts is compared below
def test_scripts_in_upstreams_style(checkout, tmp_path, capsys):
    arguments = ['--checkout', str(checkout), '--examples', 'qm9']
    upstream_scripts.main([*arguments, '--commit', 'abc', '--out', str(tmp_path)])
    result = json.loads((tmp_path / 'upstream_scripts.json').read_text())
    ran = {'train_qm9.py': None, 'predict_qm9.py': None}
    found = result['examples']['qm9']
    assert list(found) == ['rsgcn', 'relgcn', 'schnet']
    assert found['rsgcn'] == found['relgcn'] == {'unchanged': ran, 'two lines': ran}
    assert found['schnet']['unchanged'] == ran
    assert list(found['schnet']['two lines']) == ['train_qm9.py']
    refusal = found['schnet']['two lines']['train_qm9.py']
    assert refusal.startswith('ValueError: ') and refusal.count(' / ') == 1
    assert 'no adjacency matrix' in refusal
    assert 'qm9 schnet, two lines, train_qm9.py: ValueError: ' in capsys.readouterr().out
    assert len(result['scripts']['examples/qm9/train_qm9.py']) == 64


def test_edits():
    edited = upstream_scripts.with_two_lines(TRAIN, 'rsgcn')
    assert edited.splitlines()[:3] == TRAIN.splitlines()[:2] + ['import chainer_bspmm']
    assert 'Regressor(chainer_bspmm.sparsify(predictor), lossfun' in edited
    assert 'converter=chainer_bspmm.concat_mols)' in edited and 'dataset.converter' not in edited
    edited = upstream_scripts.with_two_lines(PREDICT, 'rsgcn')
    assert edited.startswith('import chainer_bspmm\n') and 'sparsify' not in edited
    assert 'return chainer_bspmm.concat_mols(batch, device=device)[:-1]' in edited
    edited = upstream_scripts.with_two_lines(PREDICT, 'relgcn_sparse')
    assert (
        'chainer_bspmm.dataset.to_sparse(batch, 4), device))(batch, device=device)[:-1]' in edited
    )
    chosen = 'converter_method_dict[key] = own\nconverter = converter_method_dict[method]\n'
    edited = upstream_scripts.with_two_lines(chosen, 'nfp')
    assert edited == 'import chainer_bspmm\n' + chosen.replace(
        'converter_method_dict[method]', 'chainer_bspmm.concat_mols'
    )
    with pytest.raises(ValueError, match='found nothing to edit'):
        upstream_scripts.with_two_lines('print(1)', 'rsgcn')


def test_a_script_without_methods():
    with pytest.raises(ValueError, match='no method_list'):
        upstream_scripts.methods_of('methods = []')
