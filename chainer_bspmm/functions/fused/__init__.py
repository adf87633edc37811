"""Private nodes that do the work of several, all of them `functions.node.FusedNode`; for links."""
