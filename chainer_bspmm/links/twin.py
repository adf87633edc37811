"""How a sparse link takes the place of a link of Chainer Chemistry."""

import chainer
from chainer import serializers


def twin_of(link, kind, *parts, **named_parts):
    """Return the sparse twin of a link; it owns that one's child links.

    Args:
        link (chainer.Link): the link whose place the twin takes: device, hooks, the same paths.
        kind (type): the twin's class, whose `_assemble` registers the child links that it gets.
        parts, named_parts: what `_assemble` takes.

    Raises:
        ValueError: ``link`` has parameters or persistent values that the twin does not know, which
            would be lost from snapshots.
    """
    twin = kind.__new__(kind)
    chainer.Chain.__init__(twin)
    twin._assemble(*parts, **named_parts)
    extra = sorted(_paths(link) - _paths(twin))
    if extra:
        raise ValueError(
            'model: expected the parameters of %s alone, got also %s'
            % (type(link).__name__, ', '.join(extra))
        )
    for name, hook in list(link.local_link_hooks.items()):
        twin.add_hook(hook, name)
    twin.to_device(link.device)
    return twin


def _paths(link):
    snapshot = serializers.DictionarySerializer()
    snapshot.save(link)
    return set(snapshot.target)
