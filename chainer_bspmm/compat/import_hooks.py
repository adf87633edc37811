"""Import hook that repairs upstream modules as they are imported, and the table of the repairs."""

import contextlib
import importlib.abc
import sys

# Upstream module name -> functions that are called with the module right after its execution.
_repairs = {}
# Upstream module name -> context manager factories, entered while it is being executed.
_surroundings = {}
# Upstream module name -> explanation in the error if there is no such module.
_absences = {}


def repairs(module_name):
    """Register the decorated function, which takes an upstream module, as a repair of that module.

    If the module was imported and repaired before, the function is called at once.
    """

    def register(function):
        _repairs.setdefault(module_name, []).append(function)
        if _finder in sys.meta_path and module_name in sys.modules:
            function(sys.modules[module_name])
        return function

    return register


def surrounds(*module_names):
    """Register the decorated context manager around the execution of upstream modules."""

    def register(factory):
        for module_name in module_names:
            _surroundings.setdefault(module_name, []).append(factory)
        return factory

    return register


def explain_absence(module_name, text):
    """Add an explanation to the import error for an upstream module that no finder has."""
    _absences[module_name] = text


def repair(module):
    """Apply the repairs of one upstream module that has been executed."""
    for function in _repairs.get(module.__name__, ()):
        function(module)


class _RepairingFinder(importlib.abc.MetaPathFinder):
    """Find upstream modules by the other finders, and repair them once executed."""

    def find_spec(self, name, path, target=None):
        is_changed = name in _repairs or name in _surroundings
        if not is_changed and name not in _absences:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, 'find_spec'):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            if name in _absences:
                text = 'No module named %r: %s' % (name, _absences[name])
                raise ModuleNotFoundError(text, name=name)
            return None
        if not is_changed:
            return spec
        execute = spec.loader.exec_module

        def execute_and_repair(module):
            with contextlib.ExitStack() as stack:
                for factory in _surroundings.get(name, ()):
                    stack.enter_context(factory())
                execute(module)
            repair(module)

        spec.loader.exec_module = execute_and_repair
        return spec


_finder = _RepairingFinder()


def install():
    """Repair the upstream modules already imported, and others when they are imported."""
    already_imported = [sys.modules[name] for name in _repairs if sys.modules.get(name) is not None]
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for module in already_imported:
        repair(module)


def uninstall():
    """Stop repairing upstream modules that are imported from now on."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
