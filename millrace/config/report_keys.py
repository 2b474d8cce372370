"""The keys of what a run leaves for its readers: metrics, accounts, trace, samples and report."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace.config.facts import Choices
from millrace.config.section import Section


class ObserveConfig(Section):
    metrics: Annotated[str, Choices(("",))] = ""
    """More metrics of each version: path.py:name of a function of your own.

    It gets the samples that trained the version. docs/own_algorithm.md explains it.
    """


class ReportConfig(Section):
    enable: bool = True
    """Write RUN/report.html at the end of the run."""
    trace: bool = True
    """Write RUN/trace/ as the run goes. Perfetto opens these files."""
    trace_mb: int = Field(512, ge=1)
    """MiB of the traces of all attempts. Beyond it, the trace ends."""
    trace_load: float = Field(0.005, gt=0, le=1)
    """Share of a core that the trace's thread may take: 0.01 is 1 %. Beyond it, the trace has one
    sample in 2, 4, ... 64. The states of devices stay exact. 1 has all samples."""
    samples: float = Field(1.0, ge=0, le=1)
    """Share of the samples whose texts are kept in RUN/samples/. 0 keeps none."""
    samples_mb: int = Field(512, ge=1)
    """MiB of RUN/samples/. Beyond it, no more samples are kept."""
    price: float = Field(0.0, ge=0)
    """Money that one device costs per hour. 0 prints no money."""
