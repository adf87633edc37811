"""Kinds of objects and classes that `Reach` treats alike, and `is_of_user`."""

import abc
import argparse
import array
import builtins
import collections
import configparser
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import logging
import operator
import pathlib
import random
import re
import struct
import threading
import types
import typing
import uuid
import weakref
from typing import Any

import numpy

import chainer
from chainer.iterators import DaliIterator, MultiprocessIterator, MultithreadIterator, OrderSampler

from chainer_bspmm.compat.user_code import is_user_code

PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, numpy.generic)
# Classes whose objects cannot be changed, or only write to files and devices.
IGNORED = (
    *PLAIN,
    *(type(Ellipsis), type(NotImplemented), BaseException, io.IOBase, re.Pattern, re.Match),
    *(numpy.dtype, numpy.ufunc, numpy.finfo, numpy.iinfo),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, struct.Struct, random.SystemRandom),
    operator.itemgetter,
    *(types.CodeType, types.GenericAlias, types.UnionType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, type(vars(abc.ABC)['_abc_impl'])),
    type(vars(collections.namedtuple('AnyTuple', 'field'))['field']),
    *(type(threading.Lock()), type(threading.RLock())),
    *(logging.Handler, logging.Formatter, logging.Filter),
)
# Classes such as `Meter[float]`, which are called like the class `Meter`.
ALIASES = types.GenericAlias, type(typing.Iterable[int])
# Modules whose classes have objects that no run changes, or that only write.
CONSTANT = {
    *('dataclasses', 'typing', 'inspect', 'importlib', 'warnings'),
    *('_frozen_importlib', '_frozen_importlib_external', 'string', 'codecs', 'abc', 'types'),
}
# Names of classes of functions that were not written in Python.
NATIVE_FUNCTIONS = {
    *('cython_function_or_method', 'fused_cython_function', 'function'),
    '_ArrayFunctionDispatcher',
}
PLAIN_TYPES = frozenset(PLAIN)
ARRAYS = chainer.get_array_types()
CACHED = functools._lru_cache_wrapper
# Types that hold functions, in the attributes of `FUNCTIONS`.
WITH_FUNCTIONS = (
    *(property, classmethod, staticmethod, functools.cached_property, functools.partialmethod),
    CACHED,
)
FUNCTIONS = 'fget', 'fset', 'fdel', 'func', '__func__', '__wrapped__'
GENERATORS = numpy.random.RandomState, numpy.random.Generator, random.Random
FROZEN = tuple, frozenset
VIEWS = (*(type(view) for view in ({}.keys(), {}.values(), {}.items())),)
LISTS = list, set, collections.deque
BUFFERS = bytearray, array.array
# Classes that refer to objects without keeping them alive.
WEAK = (
    *(weakref.ReferenceType, *weakref.ProxyTypes),
    *(weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
)
# Classes of libraries all of whose attributes are followed, because a library's code reads them.
OPEN = (
    *(types.SimpleNamespace, argparse.Namespace),  # compared, and searched by `in`
    *(collections.ChainMap, collections.UserDict, collections.UserList, enum.Enum),
    *(logging.Logger, logging.LoggerAdapter, logging.Manager, configparser.RawConfigParser),
    *(chainer.Reporter, chainer.reporter.Summary, chainer.reporter.DictSummary),
    *(chainer.Distribution, chainer.initializer.Initializer, OrderSampler),
    *(chainer.FunctionNode, chainer.FunctionHook, chainer.LinkHook, chainer.training.Extension),
    *(chainer.datasets.TransformDataset, chainer.datasets.SubDataset),
    *(chainer.datasets.TupleDataset, chainer.datasets.DictDataset),
    chainer.datasets.ConcatenatedDataset,
    *(kind for kind in vars(chainer.training.triggers).values() if isinstance(kind, type)),
    *(kind for kind in vars(chainer.optimizer_hooks).values() if isinstance(kind, type)),
)
RECORDS = threading.local, *OPEN
# Classes of Chainer whose objects every step changes. Attributes that code reads are watched.
OF_TRAINING = (
    *(chainer.training.Trainer, chainer.training.Updater, chainer.dataset.Iterator),
    *(chainer.Optimizer, chainer.optimizer.Hyperparameter),
)
# Classes among these that do a step, by a method in `STEPS`.
OF_STEPS = chainer.training.Trainer, chainer.training.Updater, chainer.Optimizer
STEPS = {'update', 'update_core', 'run'}
# Iterators whose examples come from other threads and processes, or a GPU.
PREFETCHING = MultithreadIterator, MultiprocessIterator, DaliIterator
# Iterators that a copy can replace. Copies of other iterators would read from the same source.
COPYABLE = *(type(iter(of)) for of in ([], (), range(1), '', 'é')), itertools.count
# Modules of classes from whose objects a read removes data for good, such as queues.
DRAINED = {
    *('queue', '_queue', 'socket', 'mmap', 'sqlite3', 'subprocess'),
    *('multiprocessing.queues', 'multiprocessing.connection'),
}
# Libraries whose code is not followed, because much of their state is not Python's.
FOREIGN = {
    *('torch', 'tensorflow', 'jax', 'pandas', 'sklearn', 'rdkit', 'matplotlib', 'tqdm', 'IPython'),
    *('pydantic', 'pydantic_core'),
    *('pytest', '_pytest', 'ipykernel', 'tensorboardX', 'wandb', 'mlflow', 'mpi4py'),
    *('absl', 'loguru', 'rich'),
}
# Modules of base classes that call no method of a subclass except special methods and `forward`.
QUIET = {
    *('builtins', 'abc', 'typing', 'enum', 'collections', 'argparse', 'types'),
    *('chainer.link', 'chainer.device_resident'),
}
# The modules in QUIET, and modules of base classes that have no attributes.
STATELESS = {*QUIET, 'collections.abc', 'contextlib', 'chainer.dataset.dataset_mixin'}
# Methods that links and optimizers call.
CALLED = {'forward', 'cleargrads', 'zerograds', 'params', 'namedparams'}
MAKERS = {'__init__', '__new__', '__post_init__'}  # run only when code calls the class
UNCALLED = {'__repr__', '__del__', '__reduce__', '__getstate__', '__setstate__'}
OF_EVERY_CLASS = {
    *('__dict__', '__weakref__', '__module__', '__doc__', '__slots__', '__annotations__'),
    *('__qualname__', '__firstlineno__', '__static_attributes__'),
}
# Among these are the graph that a node belongs to, and the arrays that it retains.
OF_EVERY_NODE = {*vars(chainer.FunctionNode)}
OF_EVERY_LINK = {*vars(chainer.Chain()), '_local_link_hooks'}
OF_EVERY_PARAMETER = {*vars(chainer.Parameter(0.0)), '_has_chainerx_array'}
OF_EVERY_CACHE = {*vars(functools.lru_cache(chainer.as_array))}
BUILTINS = frozenset(vars(builtins))
# Attributes of an optimizer and an update rule that updates change, and that no check puts back.
COUNTED = {'t', 'epoch'}
UPDATED = {'t', '_state', '_fp32_param'}
# Names by which code reads the environment: of `os` and `os.path`, and of methods of a path.
ENVIRONMENT = {'environ', 'environb', 'getenv', 'getenvb', 'expandvars', 'expanduser'}
# Functions of libraries that read all attributes of an object.
READERS = {'asdict', 'astuple', 'dump', 'dumps', 'getmembers', 'pformat', 'pprint'}


def is_of_user(module: Any) -> bool:
    """Return whether the code of a module, given its name, is followed."""
    if not isinstance(module, (str, type(None))):  # a class of Cython has a descriptor instead
        return False
    return is_user_code(module) and (module or '').partition('.')[0] not in FOREIGN
