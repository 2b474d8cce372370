"""One quick request to the hub, before a library makes many slow ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Literal

NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""The form of a model's or data set's id."""

_WAIT_S = 5.0


def refusal(kind: Literal["model", "dataset"], name: str) -> str:
    """Return why the hub cannot give `name`. Return "" if it can, or if only the cache can.

    This makes one request without retries. If the hub does not answer, this process and its
    children use the cache alone from now on. Libraries then fail at once instead of after half a
    minute.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    api = hub.HfApi()
    try:
        info = (
            api.model_info(name, timeout=_WAIT_S)
            if kind == "model"
            else api.dataset_info(name, timeout=_WAIT_S)
        )
    except errors.GatedRepoError:
        terms = "accept them on its page, then run `hf auth login`"
        return f"the hub requires that you accept the terms of this {kind}: {terms}"
    except errors.RepositoryNotFoundError:
        return f"the hub has no such {kind}, or it is private and `hf auth login` is due"
    except errors.HFValidationError as error:
        return f"the hub has no such {kind}: {str(error).splitlines()[0]}"
    except Exception as error:  # noqa: BLE001 - each client version raises another error
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        cached = kind == "dataset" or isinstance(
            hub.try_to_load_from_cache(name, "config.json"), str
        )
        return (
            ""
            if cached
            else f"the hub does not answer ({type(error).__name__}: {str(error).splitlines()[0]})"
        )
    files = {s.rfilename for s in info.siblings or ()}
    return (
        "" if kind == "dataset" or "config.json" in files else "the hub's model has no config.json"
    )


def model_config(name: str) -> dict[str, Any]:
    """Return a model's config.json from the cache or the hub, or {} if neither has it now."""
    import huggingface_hub as hub

    try:
        config = json.loads(Path(hub.hf_hub_download(name, "config.json")).read_bytes())
    except Exception:  # noqa: BLE001 - transformers tries again and reports the error
        return {}
    return config if isinstance(config, dict) else {}
