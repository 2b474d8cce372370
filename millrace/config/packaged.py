"""The recipes inside the package, by name, and the folder of what millrace downloads."""

from __future__ import annotations

import difflib
import os
import re
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from millrace.errors import ConfigError, bad_value

FOLDER = Path(__file__).parent.parent / "recipes"


@cache
def packaged() -> dict[str, Path]:
    """Return every packaged recipe by its name, such as algorithms/dapo."""
    paths = sorted(FOLDER.rglob("*.yaml"), key=lambda p: (len(p.relative_to(FOLDER).parts), p))
    return {p.relative_to(FOLDER).with_suffix("").as_posix(): p for p in paths}


def named(name: str) -> Path | None:
    """Return the packaged recipe with this name, or None.

    `name` is the whole name, or its last part if no other recipe has that part.
    """
    name = name.removesuffix(".yaml")
    if name in packaged():
        return packaged()[name]
    matches = _ending(name)
    return packaged()[matches[0]] if len(matches) == 1 else None


def find(given: Path, folder: Path, key: str = "RECIPE", owner: str = "") -> Path:
    """Return the file of a recipe: a path relative to `folder`, or a packaged name.

    A file wins over a packaged recipe of the same name. A name that ends with .yaml is a file
    alone: a recipe of the user's in another folder must not become a packaged one. Raises
    ConfigError if neither exists. `owner` then names the recipe that inherits this one.
    """
    if (path := folder / given).is_file():
        return path
    if given.suffix != ".yaml" and (recipe := named(str(given))) is not None:
        return recipe
    raise _unknown(given, folder, key, f"{given}{owner}")


def summary(path: Path) -> str:
    """Return the first line of a recipe's head comment."""
    return path.read_text().partition("\n")[0].lstrip("# ")


def hides(path: Path) -> str:
    """Return a note for the error of a file that hides a packaged recipe, or ""."""
    own = named(path.name)
    if own is None or own == path:
        return ""
    return f" (this file hides the packaged recipe {_name_of(own)})"


def _unknown(given: Path, folder: Path, key: str, shown: str) -> ConfigError:
    if "=" in shown and key == "RECIPE":
        return bad_value(key, shown, "a recipe comes before the settings", f"quickstart {shown}")
    if (folder / given / "config.yaml").is_file():
        return bad_value(key, shown, "is a folder, not a recipe", f"{given}/config.yaml")
    if (folder / given).is_dir():
        fix = f"the file of a recipe; for a model, quickstart model.path={given}"
        return bad_value(key, shown, "is a folder, not a recipe", fix)
    where = f"no such file (from {folder.resolve()})"
    matches = _ending(str(given).removesuffix(".yaml"))
    if len(matches) > 1:
        rule = f"{where}, and the name fits several packaged recipes"
        return bad_value(key, shown, rule, " or ".join(matches))
    full = {name.rpartition("/")[2]: name for name in packaged()}
    files = [p.name for p in (folder / given).parent.glob("*.yaml")]
    rule = f"{where}, and no packaged recipe has this name"
    if (recipe := named(str(given))) is not None:
        rule = f"{where}; a packaged recipe has a name without .yaml"
        fix = _name_of(recipe)
    elif near := difflib.get_close_matches(given.name, files, 1, 0.7):
        fix = str(given.parent / near[0])
    elif close := difflib.get_close_matches(given.name.removesuffix(".yaml"), full, 3, 0.6):
        fix = " or ".join(full[name] for name in close)
    else:
        fix = "the path of a YAML file, or a name that `millrace recipes` lists"
    return bad_value(key, shown, rule, fix)


def _ending(name: str) -> list[str]:
    """Return the packaged names whose last part is `name`."""
    return [full for full in packaged() if full.rpartition("/")[2] == name]


def _name_of(path: Path) -> str:
    return next(name for name, own in packaged().items() if own == path)


VARIABLE = "MILLRACE_CACHE"
"""The environment variable that names another folder than the user's cache."""


def cache_folder() -> Path:
    """Return $MILLRACE_CACHE, or millrace's folder in the user's cache."""
    if named := os.environ.get(VARIABLE, "").strip():
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(cache or "~/.cache").expanduser().absolute() / "millrace"


def model_folder(name: str) -> Path:
    """Return the folder of a model that `millrace get-model NAME` gets."""
    return cache_folder() / name


def resolved(override: str) -> str:
    """Return the value of an override with the folders that `${model:NAME}` means."""
    return re.sub(r"\$\{model:([\w.-]+)\}", lambda found: str(model_folder(found[1])), override)


OmegaConf.register_resolver("model", lambda name: str(model_folder(name)), replace=True)
