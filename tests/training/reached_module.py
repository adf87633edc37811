"""A module of a user's, as `test_reach` sees it."""

step, weight, unused = 0, 1.0, 0


def count():
    global step
    step += 1
    return step
