"""Stand-ins for packages that have no build for CPUs: all their names can be imported, and say what they are when called."""

import sys
import types


class Absent(types.ModuleType):
    """A name of an absent package; as far as Python can tell, a submodule, a class or a function."""

    __path__ = ()

    def __getattr__(self, name):
        return look_up(self.__name__, name)

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self.__name__} does not exist on CPUs (tests/sglang_cpu)")


def look_up(package, name):
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{package}.{name}"
    return sys.modules.get(full) or Absent(full)


def declare(package, submodules):
    """Makes `import package.submodule` possible."""
    for name in submodules:
        sys.modules[f"{package}.{name}"] = Absent(f"{package}.{name}")
