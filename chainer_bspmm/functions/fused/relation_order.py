"""The two orders of what has a row for every output channel and relation.

Chainer Chemistry's linear layers emit c * R + r, the relation as the minor index; the rows of
products with a matrix for each relation are r * out + c, the relation as the major one.
"""


def by_relation(parameter, n_relations):
    """Return rows c * R + r of W or b in the order r * out + c."""
    shape = (len(parameter) // n_relations, n_relations) + parameter.shape[1:]
    return parameter.reshape(shape).swapaxes(0, 1).reshape(parameter.shape)


def by_channel(parameter, n_relations):
    """Return rows r * out + c in the order c * R + r."""
    shape = (n_relations, len(parameter) // n_relations) + parameter.shape[1:]
    return parameter.reshape(shape).swapaxes(0, 1).reshape(parameter.shape)
