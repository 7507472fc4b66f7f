"""Translation of errors of the hub's libraries into messages for the user."""

from typing import Any, Literal

from distill_runner.common.disk import FULL
from distill_runner.common.errors import Unavailable, UserError, brief, causes

Kind = Literal["model", "dataset"]
WORDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}


class NotThere(Exception):
    """Files of the hub are unavailable; ``problem`` says why in a message for the user.

    Args:
        network: whether the cause is not the user's mistake and may be gone later, such as a lost network.
    """

    def __init__(self, problem: str, remedy: str = "", network: bool = False) -> None:
        self.problem, self.remedy, self.network = problem, remedy, network
        super().__init__(problem)

    def of(self, key: str, value: Any, remedy: str) -> UserError:
        """Return the same problem as an error of ``key``; ``remedy`` is used if this error has no remedy."""
        return (Unavailable if self.network else UserError)(key, value, self.problem, self.remedy or remedy)


def is_offline(error: BaseException) -> bool:
    """Whether ``HF_HUB_OFFLINE`` prevented the request."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(cause, OfflineModeIsEnabled) for cause in causes(error))


def meaning(error: Exception, kind: Kind, name: str, revision: str | None) -> NotThere:
    """Return the ``NotThere`` that explains an error of the hub's libraries.

    Raises:
        OSError: ``error`` was caused by a full disk.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, NotThere):
        return error
    for cause in causes(error):
        if isinstance(cause, GatedRepoError):
            remedy = f"Accept at https://huggingface.co/{'datasets/' * (kind == 'dataset')}{name}, then: hf auth login"
            return NotThere("is gated: you must accept its terms and log in to download it", remedy)
        if isinstance(cause, RevisionNotFoundError):
            return NotThere(f"has no revision '{revision}'", "Its branches, tags and commits are on the hub's page.")
        if isinstance(cause, RepositoryNotFoundError | HFValidationError):
            return NotThere(f"neither a folder here nor a {WORDS[kind]} on the hub")
        if isinstance(cause, OSError) and cause.errno in FULL:
            raise cause
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            busy = " (its rate limit is reached)" if status == 429 else ""
            return NotThere(f"the hub answers {status}{busy}", "Repeat the command later to resume.", True)
    if is_offline(error):
        return NotThere("not downloaded before, and HF_HUB_OFFLINE forbids asking the hub")
    return NotThere(f"the hub cannot be reached ({brief(error)})", network=True)
