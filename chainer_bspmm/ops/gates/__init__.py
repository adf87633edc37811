"""Gated linear maps: steps of gated recurrent units, and gated linear layers."""
