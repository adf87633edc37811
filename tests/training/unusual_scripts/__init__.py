"""Unusual training scripts, as users write them; tests/training/test_unusual_scripts.py runs them.

Each script is a function of a `Bench` that trains something and returns its counters. Each run
loads the file as a new module of a user's, so that globals and classes start afresh.
"""
