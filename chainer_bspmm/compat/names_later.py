"""Names of a package whose modules are imported when a name is first used."""

import importlib
import sys


def names_later(package, places):
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    `places`: name -> the module of the package that has it, or the name itself if that is a module.
    """

    def get(name):
        if name not in places:
            text = f'module {package!r} has no attribute {name!r}'
            # From the name and the module, Python suggests a similar name.
            raise AttributeError(text, name=name, obj=sys.modules[package])
        module = importlib.import_module(f'{package}.{places[name]}')
        return module if places[name] == name else getattr(module, name)

    def names():
        return sorted({*vars(sys.modules[package]), *places})

    return get, names
