"""Whether link hooks are to run, such as Chainer Chemistry's VariableMonitorLinkHook."""

import chainer


def hooked(*links: chainer.Link) -> bool:
    """Return whether a hook is active for all links, or for one of these.

    Where it is, links are called one by one, as upstream calls them, instead of as parts of larger
    nodes: the results differ by rounding.
    """
    return bool(chainer._get_link_hooks()) or any(link.local_link_hooks for link in links)
