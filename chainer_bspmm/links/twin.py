"""What every sparse twin of a Chainer Chemistry link takes over from it."""
from chainer import serializers


def take_over(twin, link):
    """Finish a twin that owns the child links of `link`: device, hooks, the same paths.

    Args:
        twin (chainer.Link): the sparse link, its children registered.
        link (chainer.Link): the link whose place it takes.

    Returns:
        chainer.Link: ``twin``.

    Raises:
        ValueError: ``link`` has parameters or persistent values that the twin does not know, which
            would be lost from snapshots.
    """
    extra = sorted(_paths(link) - _paths(twin))
    if extra:
        raise ValueError('model: expected the parameters of %s alone, got also %s'
                         % (type(link).__name__, ', '.join(extra)))
    for name, hook in list(link.local_link_hooks.items()):
        twin.add_hook(hook, name)
    twin.to_device(link.device)
    return twin


def _paths(link):
    snapshot = serializers.DictionarySerializer()
    snapshot.save(link)
    return set(snapshot.target)
