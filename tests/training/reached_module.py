"""A user's module, for test_reach.py."""

step, weight, unused = 0, 1.0, 0


def count():
    global step
    step += 1
    return step
