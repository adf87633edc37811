"""Link hooks, which run when a link is called, and thus not for a link that is not called."""

import chainer
from chainer.link_hooks import TimerHook
from chainer_chemistry.link_hooks import VariableMonitorLinkHook


def hooked(*links: chainer.Link) -> bool:
    """Return whether a hook is active, for all links or for one of these: they must be called."""
    if chainer._get_link_hooks():
        return True
    for link in links:
        # Objects that are not links count as hooked: the call will refuse them.
        if getattr(link, 'local_link_hooks', True):
            return True
    return False


def refuse_hooks(link: chainer.Link) -> None:
    """Raise ValueError if hooks are active that the call of a link would run.

    Of the hooks that are active for all links, a TimerHook is accepted, since it changes no result
    and only lacks the time of this link. So is a VariableMonitorLinkHook of another link.
    """
    names = list(link.local_link_hooks)
    for name, hook in chainer._get_link_hooks().items():
        is_of_another = type(hook) is VariableMonitorLinkHook and hook.target_link is not link
        if type(hook) is not TimerHook and not is_of_another:
            names.append(name)
    if names:
        raise ValueError(
            '%s: expected no link hooks, because the link itself is not called on sparse batches, '
            'got %s' % (link.name or 'a layer', ', '.join(names))
        )
