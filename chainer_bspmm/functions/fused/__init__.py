"""Private nodes for links, each a `functions.node.FusedNode` that combines several operations."""
