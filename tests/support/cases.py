"""Cases of parametrized tests."""

import itertools


def pairs(*parameters):
    """Return few combinations of values in which every pair of values of two parameters occurs.

    Nearly every fault that needs several parameters needs two of them: a dtype and a width, but not
    a dtype, a width and an activation. Deterministic: all processes of a run collect the same.

    Args:
        parameters: the values of each parameter.

    Returns:
        list[tuple]: cases, a value of each parameter.
    """
    candidates = list(itertools.product(*(range(len(values)) for values in parameters)))
    of_two = {case: set(itertools.combinations(enumerate(case), 2)) for case in candidates}
    left = set().union(*of_two.values())
    chosen = []
    while left:
        best = max(candidates, key=lambda case: len(of_two[case] & left))  # the first of them
        left -= of_two[best]
        chosen.append(tuple(values[i] for values, i in zip(parameters, best)))
    return chosen
