"""``chainermn.create_multi_node_evaluator`` with one result for the molecules of all ranks."""

import functools

import numpy

from chainer.backends import cuda


def create_multi_node_evaluator(actual_evaluator, communicator):
    """Let an evaluator report the results of all ranks' molecules; return the same evaluator.

    An Evaluator reports the mean over the ranks, weighted by the numbers of their molecules;
    ChainerMN's own function counts every rank once. A BatchEvaluator of Chainer Chemistry (ROC-AUC,
    PRC-AUC, R2) gets the predictions and labels of all ranks. A part may be empty.
    """
    evaluator, comm = actual_evaluator, communicator
    evaluator._mn_communicator = comm
    if hasattr(evaluator, 'metrics_fun'):
        evaluator.metrics_fun = {
            name: functools.partial(_of_all, comm, metric)
            for name, metric in evaluator.metrics_fun.items()
        }
        evaluate = _evaluate_together
    else:
        evaluate = _mean_of_ranks
    # The class's `evaluate` is looked up at each call, because `GraphUpdater` changes the class to
    # the one for captured evaluations.
    evaluator.evaluate = functools.partial(evaluate, evaluator, comm)
    return evaluator


def _n_molecules(evaluator):
    dataset = getattr(evaluator.get_iterator('main'), 'dataset', None)
    return len(dataset) if hasattr(dataset, '__len__') else 1


def _mean_of_ranks(evaluator, comm):
    weight = _n_molecules(evaluator)
    values = {}
    if weight:
        result = type(evaluator).evaluate(evaluator)
        values = {name: float(cuda.to_cpu(value)) for name, value in result.items()}
    results = comm.mpi_comm.allgather((weight, values))
    means = {}
    for name in dict.fromkeys(name for _, values in results for name in values):
        known = [(weight, values[name]) for weight, values in results if name in values]
        total = sum(weight for weight, _ in known)
        means[name] = sum(weight * value for weight, value in known) / total
    return means


def _evaluate_together(evaluator, comm):
    result = None
    if _n_molecules(evaluator):
        result = type(evaluator).evaluate(evaluator)
    else:
        for metric in evaluator.metrics_fun.values():
            metric(None, None)  # takes part, because the other ranks wait for this one
    results = comm.mpi_comm.allgather(result)
    return next(result for result in results if result is not None)


def _of_all(comm, metric, y, t):
    """Compute a metric from the predictions and labels of all ranks, in the ranks' order."""
    parts = [part for part in comm.mpi_comm.allgather((y, t)) if part[0] is not None]
    return metric(
        *(numpy.concatenate([cuda.to_cpu(array) for array in arrays]) for arrays in zip(*parts))
    )
