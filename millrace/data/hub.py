"""The hub: one quick question, before a library asks it many slow ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Literal

NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""What can be the id of a model or data set."""

_WAIT_S = 5.0


def refusal(kind: Literal["model", "dataset"], name: str) -> str:
    """Why `name` cannot be had from the hub; empty if it can, or if all that is left to ask is this machine's cache.

    One request, without retries. A hub that does not answer is not asked again: from here on this process and its children
    take what is cached, and libraries refuse the rest at once instead of after half a minute.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    api = hub.HfApi()
    try:
        info = (
            api.model_info(name, timeout=_WAIT_S)
            if kind == "model"
            else api.dataset_info(name, timeout=_WAIT_S)
        )
    except errors.GatedRepoError:
        return f"the hub keeps the {kind} for those who accepted its terms: do so on its page, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        return f"the hub has no such {kind}, or it is private and `hf auth login` is due"
    except errors.HFValidationError as error:
        return f"the hub has no such {kind}: {str(error).splitlines()[0]}"
    except Exception as error:  # noqa: BLE001 - each version of the client has its own way to say that nobody answers
        _stay_offline()
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
    """A model's config.json, from the cache or the hub; empty if neither gives it now."""
    import huggingface_hub as hub

    try:
        found = json.loads(Path(hub.hf_hub_download(name, "config.json")).read_bytes())
    except Exception:  # noqa: BLE001 - transformers asks again, and says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def _stay_offline() -> None:
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
