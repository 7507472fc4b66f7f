"""Whether the hub has something, found out by one short request: its libraries would retry for half a minute."""

from functools import lru_cache
from typing import Literal

from distill_runner.common.errors import brief

SECONDS_TO_ANSWER = 5.0


@lru_cache
def why_unreachable(kind: Literal["model", "dataset"], name: str, revision: str | None) -> str | None:
    """Why ``name`` cannot be fetched, in a user's words; ``None`` if it can. It may still be in the local cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        ask(name, revision=revision, timeout=SECONDS_TO_ANSWER)
    except GatedRepoError:
        return "the hub gives it only to those who have accepted its terms (hf auth login)"
    except (RepositoryNotFoundError, HFValidationError):
        return f"neither a folder here nor a {'model' if kind == 'model' else 'data set'} on the hub"
    except OfflineModeIsEnabled:
        return "not downloaded before, and HF_HUB_OFFLINE forbids asking the hub"
    except Exception as error:
        return f"the hub cannot be reached ({brief(error)})"
    return None
