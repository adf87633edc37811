"""Linear maps that gates decide on: steps of gated recurrent units, and gated linear layers."""
