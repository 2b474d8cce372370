"""The keys of frozen models outside of the trainer: behind an endpoint, or in their processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from millrace.config.section import Rule, Section
from millrace.errors import bad_value


class EndpointConfig(Section):
    """An endpoint, the key to it, and the patience with it."""

    model: str = ""
    """Name of the model that the endpoint serves."""
    base_url: str = ""
    """Address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key. The key itself is in no configuration."""
    max_concurrency: int = Field(32, ge=1)
    """Most requests at a time."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Seconds that one request may take. A request that takes longer is tried again."""
    timeout_s: float = Field(180.0, gt=0)
    """Seconds that one answer may take, with all its retries."""
    max_retries: int = Field(5, ge=0)
    """Retries of a request after 429, 5xx, a time-out or a lost connection."""
    retry_wait_s: float = Field(1.0, gt=0)
    """Seconds before the first retry. It doubles with each retry. Retry-After goes first."""

    def rules(self, here: str) -> Iterator[Rule]:
        """Yield the rules. A value that may contain a secret is not shown."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            rule = "must be the name of an environment variable, not the key itself"
            fix = f"{here}api_key_env=OPENAI_API_KEY"
            raise bad_value(f"{here}api_key_env", "...", rule, fix)
        url, key = urlsplit(self.base_url), f"{here}base_url"
        if self.base_url and (url.scheme not in ("http", "https") or not url.hostname):
            rule = "is not an address with http:// or https://"
            shown = self.base_url.rpartition("@")[2]
            raise bad_value(key, shown, rule, f"{key}=http://localhost:8000/v1")
        if url.username or url.password or url.query:
            rule = "may contain a secret, which would be in the run's config.yaml"
            fix = f"an address alone, with the key in the variable of {here}api_key_env"
            raise bad_value(key, url.hostname, rule, fix)
        yield from super().rules(here)


class PlaceConfig(Section):
    """Processes with copies of a frozen model, and their devices."""

    num_workers: int = Field(1, ge=1)
    """Processes that hold one copy of the model each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers. auto means GPUs, if trainer.device and this machine have them.

    With trainer.runtime=ray the workers use the CPU alone, and auto is refused on a node with GPUs.
    """
    share: Literal["none", "trainer", "rollout"] = "none"
    """Whose GPUs the workers use. none gives each worker a GPU of its own.

    trainer and rollout load the model beside that side's own memory, on separate devices only.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights and of the computation."""

    def rules(self, here: str) -> Iterator[Rule]:
        yield (
            self.share != "none" and self.device == "cpu",
            "share",
            f"{here}device=cpu takes no GPU that could be shared",
            f"{here}share=none, or {here}device=cuda",
        )
