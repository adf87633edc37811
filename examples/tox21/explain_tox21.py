#!/usr/bin/env python
"""Draw saliency: the atoms that decide a prediction of a model that train_tox21.py made.

    python explain_tox21.py --in-dir result --smiles 'Oc1ccc(cc1)C(C)(C)c1ccc(O)cc1' --assay NR-ER
    python explain_tox21.py --in-dir result --smiles CCO Nc1ccccc1 --calculator occlusion --out why

Writes an SVG and a PNG picture of each molecule into a folder, red where an atom raises the score
of the assay (the logit of its probability) and blue where it lowers it, and the numbers to
saliency.csv.
"""

import os

import train_tox21  # before common: puts its folder on sys.path
from common import arguments, data, folder, prediction, training
from common.data import DataError

import numpy
import pandas
from chainer import functions
from chainer_chemistry.link_hooks import VariableMonitorLinkHook
from chainer_chemistry.saliency.calculator import GradientCalculator, OcclusionCalculator
from chainer_chemistry.saliency.calculator import IntegratedGradientsCalculator
from chainer_chemistry.saliency.visualizer.visualizer_utils import abs_max_scaler, red_blue_cmap
from rdkit import Chem
from rdkit.Chem.Draw import rdMolDraw2D

CALCULATORS = {
    'gradient': (GradientCalculator, {'multiply_target': True}),
    'integrated': (IntegratedGradientsCalculator, {'steps': 25}),
    'occlusion': (OcclusionCalculator, {'slide_axis': 1}),
}
SIZE = 500, 375  # pixels, of a molecule of up to 40 atoms


def saliency(model, dataset, column, name, converter, batchsize):
    """Return (n_molecules, largest) numbers, one for each atom, and 0 past a molecule's last atom.

    `column`: column of the assay; `name`: a key of `CALCULATORS`.
    """
    kind, options = CALCULATORS[name]

    def score(*batch):
        scores = model.predictor(*batch)[:, column : column + 1]
        # The gradient of the sum contains the gradient of each molecule's score.
        return scores if kind is OcclusionCalculator else functions.sum(scores)

    monitor = VariableMonitorLinkHook(model.predictor.graph_conv.embed)
    device = model.device.device.id if model.xp is not numpy else -1
    calculator = kind(model, monitor, eval_fun=score, device=device, **options)
    samples = calculator.compute(
        dataset, batchsize=batchsize, converter=converter, show_progress=False
    )
    return calculator.aggregate(samples, method='raw', ch_axis=3)


def draw(mol, values, path, legend):
    """Draw a molecule to an .svg or .png file, its atoms coloured by their values."""
    is_svg = path.endswith('.svg')
    scale = max(1, mol.GetNumAtoms() / 40) ** 0.5  # a larger molecule gets a larger picture
    width, height = (int(scale * pixels) for pixels in SIZE)
    drawer = (rdMolDraw2D.MolDraw2DSVG if is_svg else rdMolDraw2D.MolDraw2DCairo)(width, height)
    colors = {i: red_blue_cmap(value) for i, value in enumerate(abs_max_scaler(values).tolist())}
    rdMolDraw2D.PrepareAndDrawMolecule(
        drawer, mol, legend, list(colors), highlightAtomColors=colors, highlightBonds=[]
    )
    drawer.FinishDrawing()
    text = drawer.GetDrawingText()
    with data.replacing(path) as new, open(new, 'w' if is_svg else 'wb') as file:
        file.write(text)


@data.writing('into the folder of --out')
def run():
    """Explain, and write pictures and numbers."""
    parser = arguments.make_parser('Saliency of the atoms for a model trained on Tox21.')
    arguments.add_trained_arguments(
        parser, 'train_tox21.py', out='folder to write (IN_DIR/saliency)'
    )
    parser.add_argument('--smiles', nargs='+', required=True, help='molecules')
    assays = train_tox21.ASSAYS
    parser.add_argument(
        '--assay', default=assays[0], choices=assays, help='assay whose score is explained'
    )
    parser.add_argument(
        '--calculator',
        default='gradient',
        choices=CALCULATORS,
        help='gradient times input, integrated gradients, or occlusion of an atom',
    )
    args = parser.parse_args()
    out = os.path.join(args.in_dir, 'saliency') if args.out is None else args.out
    folder.refuse_file(out)
    if os.path.isdir(out) and os.listdir(out) and not args.force:
        text = '--out: the folder %s is not empty; expected a new one, or --force to write into it'
        raise DataError(text % out)
    settings, task, model, converter = prediction.load(args, train_tox21)
    dataset, molecules = prediction.from_smiles(args.smiles, settings, task)
    if not len(dataset):
        data.report_failures(molecules)
        raise DataError(prediction.NONE_USED)
    os.makedirs(out, exist_ok=True)
    data.report_failures(molecules, os.path.join(out, folder.FAILED_FILE))
    column = assays.index(args.assay)
    found = saliency(model, dataset, column, args.calculator, converter, args.batchsize)
    probabilities = task.predict(model, dataset, converter, args.batchsize)[:, column]
    rows = []
    used = numpy.flatnonzero((molecules.reason == '').to_numpy()).tolist()
    for i, values, probability in zip(used, found, probabilities):
        smiles = molecules.smiles.iloc[i]
        # The canonical SMILES gives atoms the order that they have in the model.
        mol = Chem.MolFromSmiles(Chem.CanonSmiles(smiles, useChiral=False))
        values = values[: mol.GetNumAtoms()]
        for extension in ('svg', 'png'):
            path = os.path.join(out, '%d.%s' % (i + 1, extension))
            legend = '%s: probability %.2f\nred raises it, blue lowers it, full colour: %.2g'
            draw(mol, values, path, legend % (args.assay, probability, abs(values).max()))
        rows += [
            (i + 1, smiles, atom.GetIdx(), atom.GetSymbol(), value)
            for atom, value in zip(mol.GetAtoms(), values.tolist())
        ]
    table = pandas.DataFrame(rows, columns=['molecule', 'smiles', 'atom', 'element', 'saliency'])
    data.write_table(os.path.join(out, 'saliency.csv'), table)
    print('Pictures of %d molecule(s), and saliency.csv: %s' % (len(found), out))
    return 0


if __name__ == '__main__':
    training.main(run)
