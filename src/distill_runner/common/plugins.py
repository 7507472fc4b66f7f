"""Python code from outside this package: a user's module in the working folder, or an installed module."""

import ast
import hashlib
import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, resolve_name
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from distill_runner.common.errors import UserError, suggestion
from distill_runner.common.process import import_from_working_folder


def load_class(key: str, path: str, base: type) -> Any:
    """Return the class that ``path`` names as ``<module>.<name>``; modules in the working folder are found too.

    Args:
        key: the configuration key, for messages.
        base: the class that the returned class must be a subclass of.
    Raises:
        UserError: the module or class does not exist, the module cannot be imported, or the class is abstract or is no
            subclass of ``base``.
    """
    module_name, _, name = path.rpartition(".")
    module = _import_module(key, path, module_name)
    subclass = getattr(module, name, None)
    if subclass is None:
        classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, base)]
        names = [cls.__name__ for cls in classes if cls is not base]
        raise UserError(key, path, f"the module {module_name} has no class {name}", suggestion(name, names))
    if not (isinstance(subclass, type) and issubclass(subclass, base)):
        remedy = f"Only subclasses of {base.__module__}.{base.__name__} are accepted."
        raise UserError(key, path, f"is not a {base.__name__}", remedy)
    if inspect.isabstract(subclass):
        missing = ", ".join(sorted(getattr(subclass, "__abstractmethods__", ())))
        raise UserError(key, path, "is abstract", f"Take a subclass that defines {missing}.")
    return subclass


def _import_module(key: str, path: str, module_name: str) -> ModuleType:
    import_from_working_folder()
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_error(key, path, error) from error
        remedy = f"Put {error.name}.py into the current folder, or install the package that contains it."
        raise UserError(key, path, f"there is no module {error.name}", remedy) from error
    except Exception as error:
        raise _import_error(key, path, error) from error


def _import_error(key: str, path: str, error: Exception) -> UserError:
    """Return the error to show when a user's module raises ``error`` on import, with file and line."""
    frame = extract_tb(error.__traceback__)[-1]
    place = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        place = error.filename or "", error.lineno
    problem = f"its module cannot be imported: {type(error).__name__}: {error}"
    return UserError(key, path, problem.splitlines()[0], f"In {place[0]}, line {place[1]}.")


def entry_point(group: str, name: str) -> str | None:
    """Return the path ``<module>.<name>`` that an installed package has registered under ``name``; None if none has."""
    point = next(iter(entry_points(group=group, name=name)), None)
    return f"{point.module}.{point.attr}" if point else None


def source_hash(module_name: str) -> str:
    """Return a hash of the source of a module and of the modules next to it that it imports, directly or indirectly."""
    files: dict[str, bytes] = {}
    queue = [module_name]
    while queue:
        name = queue.pop()
        file = _plugin_file(name, module_name)
        if file is not None and name not in files:
            files[name] = file.read_bytes()
            queue += _imports(files[name], name, is_package=file.name == "__init__.py")
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name])
    return digest.hexdigest()[:16]


def _plugin_file(name: str, origin: str) -> Path | None:
    """Return the source file of module ``name`` if its top-level package is that of ``origin`` or is next to it.

    Packages in ``site-packages`` do not count as being next to each other.
    """
    try:
        specs = [find_spec(module) for module in (name, name.partition(".")[0], origin.partition(".")[0])]
    except (ImportError, ValueError):
        return None
    files = [Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None for spec in specs]
    if not all(files):
        return None
    file, package, origin_package = (file for file in files if file)
    if name.partition(".")[0] == origin.partition(".")[0]:
        return file
    folder = _root(package)
    return file if folder == _root(origin_package) and folder.name != "site-packages" else None


def _root(file: Path) -> Path:
    """Return the folder that contains a top-level module or package."""
    return file.parents[1] if file.name == "__init__.py" else file.parent


def _imports(source: bytes, name: str, is_package: bool) -> Iterator[str]:
    """Yield the imported names that may be modules."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
