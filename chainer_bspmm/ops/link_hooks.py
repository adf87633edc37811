"""Link hooks, which run when a link is called, and thus not for a link that is not called."""

import weakref

import chainer

from chainer_bspmm.compat.user_code import warn

_told: weakref.WeakSet = weakref.WeakSet()  # classes of hooks of which a warning has told


def hooked(*links: chainer.Link) -> bool:
    """Return whether a hook is active, for all links or for one of these: they must be called."""
    if chainer._get_link_hooks():
        return True
    for link in links:
        # Objects that are not links count as hooked: the call will refuse them.
        if getattr(link, '_local_link_hooks', True):
            return True
    return False


def expect_no_hooks(link: chainer.Link) -> None:
    """Refuse hooks of a link that is not called, and warn once of a class of hooks of all links.

    A hook of all links is not refused, because most of them only observe. One that has a
    `target_link`, as a VariableMonitorLinkHook does, concerns no other link.
    """
    name = link.name or 'a layer'
    hooks = link._local_link_hooks  # the public property would set this attribute
    if hooks:
        raise ValueError(
            '%s: expected no link hooks, because the link itself is not called on sparse batches, '
            'got %s' % (name, ', '.join(hooks))
        )
    for hook in chainer._get_link_hooks().values():
        if type(hook) not in _told and getattr(hook, 'target_link', link) is link:
            _told.add(type(hook))
            warn(
                'the link hook %s is active for all links, but on sparse batches it misses layers '
                'whose parameters a larger operation reads, such as %s. If it has to see them, or '
                "changes results, leave sparsify out and keep upstream's converter"
                % (hook.name, name)
            )
