"""Cases of parametrized tests."""

import itertools


def pairs(*parameters):
    """Return few combinations of values in which every pair of values of two parameters occurs.

    Nearly every fault that depends on several parameters depends on two: on a dtype and a width,
    but not on a dtype, a width and an activation. The choice is deterministic, so that all
    processes of a run collect the same cases.

    Args:
        parameters: the values of each parameter.

    Returns:
        list[tuple]: cases, each with a value of every parameter.
    """
    candidates = list(itertools.product(*(range(len(values)) for values in parameters)))
    of_two = {case: set(itertools.combinations(enumerate(case), 2)) for case in candidates}
    left = set().union(*of_two.values())
    chosen = []
    while left:
        best = max(candidates, key=lambda case: len(of_two[case] & left))  # first if equal
        left -= of_two[best]
        chosen.append(tuple(values[i] for values, i in zip(parameters, best)))
    return chosen
