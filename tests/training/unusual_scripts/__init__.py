"""Unusual training scripts, as users write them, for tests/training/test_unusual_scripts.py.

Each script is a function of a `Bench` that trains something and returns its counters. Each run
loads the file as a new module, so that globals and classes start afresh.
"""
