"""`Resident`: the copy on a GPU of a sparse data set, made without being asked for."""

import operator
import weakref

import numpy

from chainer.backends import cuda
from chainer.datasets import SubDataset

from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.device_dataset import SHARE
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_example import locate
from chainer_bspmm.dataset.sparse_example import SparseExample
from chainer_bspmm.dataset.sparse_form import base_of
from chainer_bspmm.dataset.sparse_form import form_of
from chainer_bspmm.dataset.sparse_form import position_in_base


def molecules_of(dataset):
    """Return the molecules of a data set and their order; None if they are not kept sparse."""
    if isinstance(dataset, SparseDataset):
        return locate(dataset)
    if isinstance(dataset, SubDataset) and len(dataset) and isinstance(dataset[0], SparseExample):
        return locate(dataset[:])  # as made by Chainer's functions that split data sets
    form = form_of(base_of(dataset))
    order = form and position_in_base(dataset, numpy.arange(len(dataset)))
    return None if form is None or order is None else (form.molecules, order)


class Resident:
    """The copy on a GPU of a data set's molecules, of which batches are gathered there.

    Their arrays become read-only: the copy would not follow a change. All that train or predict
    with the same molecules share a copy.

    Args:
        dataset (object), device (chainer.backend.GpuDevice): where there is no copy, because the
            data set is not sparse, or needs more than `SHARE` allows of the free memory, batches
            stay where they are.
    """

    def __init__(self, dataset, device):
        self._copy = None
        found = molecules_of(dataset)
        if found is None or isinstance(found[0], DeviceMolecules) or device.xp is not cuda.cupy:
            return
        host = found[0]
        self._copy = _copies.get((id(host), device.name))
        if self._copy is None:
            try:
                self._copy = DeviceMolecules(host, device, device.device.mem_info[0] // SHARE)
            except ValueError:
                return
            _copies[id(host), device.name] = self._copy
        self._arrays = _arrays_of(host)
        for array in self._arrays:
            if array is not None:
                array.flags.writeable = False

    def of(self, molecules):
        """Return the copy of molecules; themselves without one, or if arrays were replaced."""
        copy = self._copy
        if copy is None or molecules is not copy.host:
            return molecules
        arrays = _arrays_of(molecules)
        is_same = len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))
        return copy if is_same else molecules


# (id of the molecules on the host, name of the device) -> DeviceMolecules, which hold the former.
_copies = weakref.WeakValueDictionary()


def _arrays_of(molecules):
    return (
        molecules.atoms,
        molecules.sizes,
        molecules.full_sizes,
        molecules.row_nnz,
        molecules.columns,
        molecules.data,
        *molecules.labels,
    )
