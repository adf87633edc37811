#!/usr/bin/env python
"""Make data/qm9_sample.csv.gz from the files of the PyPI package qm9pack (1.0.3).

The sample is every 32.7th molecule of QM9, in QM9's order, with the digits of qm9pack's numbers.

    pip install qm9pack==1.0.3
    python make_sample.py            # write it
    python make_sample.py --check    # compare the shipped one with it
    python make_sample.py --all qm9.csv.gz    # all molecules in the same form
"""

import argparse
import gzip
import sys

import pandas
import train_qm9
from common.data import spread

N_MOLECULES = 4000


def main():
    parser = argparse.ArgumentParser(description='Make the shipped sample of QM9.')
    parser.add_argument(
        '--check', action='store_true', help='write nothing, compare the shipped sample'
    )
    parser.add_argument('--all', metavar='FILE', help='write all molecules, there')
    args = parser.parse_args()
    paths = train_qm9.qm9pack_files()
    if not paths:
        sys.exit('qm9pack is not installed: pip install qm9pack==1.0.3')
    names = {'Index': 'index', 'SMILES': 'smiles'}
    names.update({column: name for name, (_, column, _) in train_qm9.TARGETS.items()})
    # As text, so that no digit is touched.
    parts = [
        pandas.read_csv(path, usecols=list(names), dtype=str, keep_default_na=False)
        for path in paths
    ]
    table = pandas.concat(parts, ignore_index=True)[list(names)].rename(columns=names)
    print('%d molecules in qm9pack' % len(table))
    if not args.all:
        table = table.iloc[spread(len(table), N_MOLECULES)]
    text = table.to_csv(index=False).replace('\r\n', '\n').encode('ascii')
    if args.check:
        # The text, not the file: compressors differ between versions of zlib.
        with gzip.open(train_qm9.SAMPLE) as f:
            same = f.read() == text
        print('the shipped sample is %s' % ('the same' if same else 'DIFFERENT'))
        sys.exit(0 if same else 1)
    path = args.all or train_qm9.SAMPLE
    with open(path, 'wb') as f:
        f.write(gzip.compress(text, mtime=0))  # no time, so that equal text makes an equal file
    print('%d molecules written to %s' % (len(table), path))


if __name__ == '__main__':
    main()
