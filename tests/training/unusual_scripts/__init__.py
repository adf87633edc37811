"""Unusual training scripts, as users write them; tests/training/test_unusual_scripts.py runs them.

Each script is a function of a `Bench` that trains something and returns what it counted. The files
are loaded as modules of a user's, anew for each run: their globals and classes start afresh.
"""
