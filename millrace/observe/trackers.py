"""Trackers outside the run: wandb, MLflow, Trackio, Prometheus. None can stop or delay the run.

A sink hands its rows to a tracker in a thread.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import psutil

from millrace.config import plugins
from millrace.config.trainer_keys import LOGGERS
from millrace.errors import INSTALL, MissingDependency, bad_value, redact
from millrace.observe.files import flat
from millrace.process.files import replace_file

Row = dict[str, float]


class Tracker(Protocol):
    """A tracker is made, written and closed in one thread. Each call may fail or hang."""

    where: str
    """Where a user finds the run."""

    def write(self, version: int, row: Row) -> None: ...

    def close(self, complete: bool) -> None: ...


class Background:
    """A sink that hands rows to a tracker in a thread.

    `write` never waits. `close` waits for at most `close_s`. Neither raises.

    A tracker that cannot start tries again until the run ends. Rows wait for it. A row is dropped
    if the tracker refuses it, and if too many rows wait.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Tracker],
        note: Callable[[str], None],
        *,
        most_rows: int = 1000,
        close_s: float = 10.0,
        share: float = 1.0,
        pause_s: float = 0.0,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """`abandon` is called if the tracker does not end in time.

        Rows that wait are written together. Then the thread rests for `pause_s` or longer, so that
        writing takes at most `share` of a processor. It does not rest while a tenth of `most_rows`
        wait, or at the end.
        """
        self.name, self.dropped = name, 0
        self._start, self._note, self._abandon = start, note, abandon
        self._most_rows, self._close_s = most_rows, close_s
        self._share, self._pause_s = share, pause_s
        self._rows: SimpleQueue[tuple[int, Row] | None] = SimpleQueue()
        self._closing, self._complete, self._warned = threading.Event(), False, False
        self._end = 0.0
        self._unwritten = 0
        """Rows that wait, with the one that the tracker writes."""
        self._lock = threading.Lock()
        # Python's exit would wait for the thread of an executor, also if the tracker hangs.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, version: int, row: Row) -> None:
        with self._lock:
            full = self._unwritten >= self._most_rows
            self.dropped += full
            self._unwritten += not full
        if full:
            self._warn(f"{self._most_rows} rows wait for it")
        else:
            self._rows.put((version, row))

    def idle(self) -> bool:
        """Return whether the tracker has written every row."""
        return not self._unwritten

    def finish(self, complete: bool) -> None:
        """Ask the tracker to end, and do not wait for it."""
        if not self._closing.is_set():
            self._complete = complete
            self._rows.put(None)
            self._closing.set()
            self._end = time.monotonic() + self._close_s

    def close(self, complete: bool = True) -> None:
        """Wait for the tracker until `close_s` after it was first asked to end."""
        self.finish(complete)
        self._thread.join(max(0.0, self._end - time.monotonic()))
        late = ""
        if self._thread.is_alive():
            late, self._warned = f" It did not end within {self._close_s:g} s.", True
            self._abandon()
        if (lost := self.dropped + self._unwritten) or late:
            self._note(
                f"{self.name}:{late} It lacks {lost} rows of this run. metrics.jsonl has them."
            )

    def _work(self) -> None:
        tracker, spent_s = self._open(), 0.0
        while tracker is not None and (item := self._rows.get()) is not None:
            begin = time.thread_time()
            failed = not self._works(tracker.write, *item)
            with self._lock:
                self._unwritten -= 1
                self.dropped += failed
            spent_s += time.thread_time() - begin
            if self._rows.empty() or spent_s >= self._share * self._pause_s:
                if self._unwritten <= self._most_rows // 10:
                    self._closing.wait(max(self._pause_s, spent_s * (1 / self._share - 1)))
                spent_s = 0.0
        if tracker is not None:
            self._works(tracker.close, self._complete)

    def _works(self, call: Callable[..., None], *args: object) -> bool:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - the boundary to a library
            self._warn(text_of(error))
            return False
        return True

    def _open(self) -> Tracker | None:
        """Start the tracker. Returns None if that fails until the run ends."""
        wait_s = 1.0
        while True:
            try:
                tracker = self._start()
            except BaseException as error:  # noqa: BLE001 - the boundary to a library
                self._warn(text_of(error))
            else:
                self._note(f"{self.name}: {tracker.where}")
                return tracker
            if self._closing.wait(wait_s):
                return None
            wait_s = min(60.0, 2 * wait_s)

    def _warn(self, why: str) -> None:
        """Print the first problem of the run. Later ones only count dropped rows."""
        if not self._warned:
            self._warned = True
            self._note(f"warning: {self.name} does not work: {why}. The run does not wait for it.")


def text_of(error: BaseException) -> str:
    """Return the first line of an error, without secrets and without the password of a URL."""
    line = next(iter(redact(str(error)).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: " + re.sub(r"//[^/\s]+@", "//***@", line)[:200]


@dataclass(frozen=True, slots=True)
class About:
    """The name and the configuration of a run, and its ids in its trackers."""

    folder: Path
    project: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    resumed: bool = False
    ids: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if self.resumed and self._file.is_file():
            # After a damaged file, the trackers start new runs.
            with suppress(OSError, TypeError, ValueError):
                self.ids.update(json.loads(self._file.read_text()))

    @property
    def _file(self) -> Path:
        return self.folder / "trackers.json"

    def save(self) -> None:
        """Write the ids for the next attempt. A link in the file's place is replaced."""
        with self._lock:
            replace_file(self._file, json.dumps(self.ids) + "\n")


class Wandb:
    """Weights & Biases, online or with WANDB_MODE=offline.

    wandb's steps must rise. Rows of validations and of a resume do not rise. So each row has the
    figure `version`, and it is the x-axis.
    """

    def __init__(self, about: About) -> None:
        wandb = _quiet_wandb()
        settings = wandb.Settings(
            console="off", silent=True, finish_timeout=8, finish_timeout_raises=True
        )
        self._run = wandb.init(
            project=about.project,
            name=about.name,
            id=about.ids.setdefault("wandb", secrets.token_hex(4)),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(about.folder),
            settings=settings,
        )
        self._run.config.update(about.config, allow_val_change=True)
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")
        self.where = self._run.url or f"wandb sync {self._run.settings.sync_dir}"

    def write(self, version: int, row: Row) -> None:
        self._run.log({**row, "version": version})

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


def _quiet_wandb() -> Any:
    """Import wandb without its reports of its own errors. They need the network, also at exit."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb


def _end_wandb() -> None:
    """End wandb's process a second after the main thread. Python's exit waits for it forever.

    Its file has every row that it got. `wandb sync` sends them.
    """

    def work() -> None:
        threading.main_thread().join()
        time.sleep(1)
        while True:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if child.name().startswith("wandb-core"):
                        child.kill()
            time.sleep(0.1)

    threading.Thread(target=work, name="end-wandb", daemon=True).start()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI.

    Its parameters cannot change. A changed key becomes a tag.
    """

    def __init__(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        for logger in ("alembic", "mlflow"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        self._client, self._metric = MlflowClient(), Metric
        self._run = self._open(about)
        data = self._client.get_run(self._run).data
        known = data.params | data.tags  # a tag is newer
        given = {_mlflow_name(key): str(v)[:500] for key, v in flat(about.config)}
        new = [Param(key, value) for key, value in given.items() if key not in data.params]
        changed = [RunTag(k, v) for k, v in given.items() if known.get(k, v) != v]
        for i in range(0, len(new), 100):  # a server takes no more at once
            self._client.log_batch(self._run, params=new[i : i + 100])
        for i in range(0, len(changed), 100):
            self._client.log_batch(self._run, tags=changed[i : i + 100])
        self.where = f"experiment {about.project}, run {self._run}"

    def _open(self, about: About) -> str:
        """Return the id of this run there, or of a new one."""
        from mlflow.exceptions import MlflowException

        if "mlflow" in about.ids:
            try:
                self._client.update_run(about.ids["mlflow"], status="RUNNING")
                return about.ids["mlflow"]
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # another server has it
                    raise
        found = self._client.get_experiment_by_name(about.project)
        experiment = found.experiment_id if found else self._client.create_experiment(about.project)
        run: str = self._client.create_run(experiment, run_name=about.name).info.run_id
        about.ids["mlflow"] = run
        return run

    def write(self, version: int, row: Row) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(k), v, now, version) for k, v in row.items()]
        for i in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[i : i + 1000])

    def close(self, complete: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if complete else "KILLED")


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: @ becomes _at_, as in verl.

    If another character is lost, the name gets a checksum. So no two names become one.
    """
    known = name.replace("@", "_at_")
    kept = re.sub(r"[^\w\-. :/]", "_", known)
    return kept if kept == known else f"{kept}_{zlib.crc32(name.encode()):08x}"


class Trackio:
    """Trackio: a local database, or TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.

    It continues a run by its name, so the name has a random end.
    """

    def __init__(self, about: About) -> None:
        import trackio

        for name, module in list(sys.modules.items()):  # stdout belongs to --json
            if name.partition(".")[0] == "trackio":
                vars(module)["print"] = lambda *text, **options: None
        name = about.ids.setdefault("trackio", f"{about.name}-{secrets.token_hex(3)}")
        self._run = trackio.init(
            about.project,
            name,
            config=about.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # they sample in threads of this process
            auto_log_cpu=False,
        )
        self.where = f"trackio show --project {about.project}, run {name}"

    def write(self, version: int, row: Row) -> None:
        self._run.log(dict(row), step=version)

    def close(self, complete: bool) -> None:
        self._run.finish()


class Prometheus:
    """The newest row and the newest validation at http://127.0.0.1:PORT/metrics."""

    def __init__(self, about: About) -> None:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily

        self._gauge, self._name = GaugeMetricFamily, about.name
        self._rows: dict[str, Row] = {}
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]  # a Collector by its shape
        self._server, _ = start_http_server(about.port, addr="127.0.0.1", registry=registry)
        self.where = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def collect(self) -> Iterator[Any]:
        """Yield each figure under a name that Prometheus accepts. A label has the exact one."""
        for row in [*self._rows.values()]:
            for name, value in row.items():
                known = re.sub(r"[^a-zA-Z0-9_]", "_", name)
                gauge = self._gauge(f"millrace_{known}", name, labels=("run", "metric"))
                gauge.add_metric((self._name, name), value)
                yield gauge

    def write(self, version: int, row: Row) -> None:
        kind = "val/" if all(name.startswith("val/") for name in row) else ""
        self._rows[kind] = {f"{kind}version": float(version), **row}

    def close(self, complete: bool) -> None:
        self._server.shutdown()
        self._server.server_close()


NEEDS = {
    "mlflow": ("mlflow", "mlflow-skinny"),
    "prometheus": ("prometheus_client", "prometheus_client"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}
"""The module that each tracker of the package needs, and its name in INSTALL."""


def _makers(loggers: Sequence[str]) -> dict[str, Callable[[About], Tracker]]:
    """Return the class of each tracker that `loggers` names. Raises ConfigError."""
    names = [name for name in dict.fromkeys(loggers) if name not in LOGGERS.others]
    return {name: plugins.load("trainer.logger", name, LOGGERS.group) for name in names}


def check(loggers: Sequence[str]) -> None:
    """Raise MissingDependency without a library, and ConfigError without the key of wandb.

    Raise ConfigError too for a tracker of another package that cannot be used.
    """
    _makers(loggers)
    for name, (module, package) in NEEDS.items():
        if name in loggers and importlib.util.find_spec(module) is None:
            raise MissingDependency(
                f"trainer.logger={name} needs {package}, which is not installed here. "
                f"Fix: {INSTALL[package]}."
            )
    if "wandb" in loggers and not _wandb_may_start():
        fix = "WANDB_API_KEY=KEY in the environment, `wandb login`, or WANDB_MODE=offline"
        raise bad_value("trainer.logger", list(loggers), "wandb has no API key", fix)


def _wandb_may_start() -> bool:
    """Whether wandb has a key or needs none. Without this check it would ask at the terminal."""
    try:
        wandb = _quiet_wandb()
        mode = wandb.setup().settings.mode
        return mode not in ("online", "run") or wandb.login(prompt=False, verify=False)
    except Exception:  # noqa: BLE001 - its thread reports the error
        return True


SHARE = 0.008
"""The most of a processor that writing to one tracker takes while the run goes on."""

PAUSE_S = 5.0
"""The rest of a tracker after rows. Most of Trackio's cost is for each write, not for each row."""


def start(loggers: Sequence[str], about: About, note: Callable[[str], None]) -> list[Background]:
    """Start each tracker that `loggers` names, in a thread of its own."""

    def open_tracker(make: Callable[[About], Tracker]) -> Tracker:
        tracker = make(about)
        try:
            about.save()
        except OSError as error:
            note(f"warning: a resume will start new runs in the trackers: {text_of(error)}")
        return tracker

    found = []
    for name, make in _makers(loggers).items():
        begin, end = partial(open_tracker, make), _end_wandb if name == "wandb" else lambda: None
        found.append(Background(name, begin, note, share=SHARE, pause_s=PAUSE_S, abandon=end))
    return found


def dropped(trackers: Sequence[Background]) -> Row:
    """Return trackers/NAME/dropped for each tracker that dropped rows of this attempt."""
    return {f"trackers/{t.name}/dropped": float(t.dropped) for t in trackers if t.dropped}
