"""Nodes of the graph that do the work of several; private: links use them."""
