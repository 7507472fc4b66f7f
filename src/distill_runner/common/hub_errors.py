"""What an error of the hub's libraries means, in a user's words."""

from typing import Any, Literal

from distill_runner.common.errors import Unavailable, UserError, brief, causes

Kind = Literal["model", "dataset"]
WORDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}


class NotThere(Exception):
    """Why files of the hub cannot be had, in a user's words.

    Args:
        network: whether it is no mistake of the user's, and may be otherwise later.
    """

    def __init__(self, problem: str, remedy: str = "", network: bool = False) -> None:
        self.problem, self.remedy, self.network = problem, remedy, network
        super().__init__(problem)

    def of(self, key: str, value: Any, remedy: str) -> UserError:
        """The same of a configuration key; ``remedy`` where there is no better one."""
        return (Unavailable if self.network else UserError)(key, value, self.problem, self.remedy or remedy)


def is_offline(error: BaseException) -> bool:
    """Whether HF_HUB_OFFLINE kept a request from being made."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(cause, OfflineModeIsEnabled) for cause in causes(error))


def meaning(error: Exception, kind: Kind, name: str, revision: str | None) -> NotThere:
    """What an error of the hub's libraries means."""
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
            remedy = f"Accept them at https://huggingface.co/{'datasets/' * (kind == 'dataset')}{name}: hf auth login"
            return NotThere("is gated: the hub gives it to those who have accepted its terms", remedy)
        if isinstance(cause, RevisionNotFoundError):
            return NotThere(f"has no revision '{revision}'", "Its branches, tags and commits are on the hub's page.")
        if isinstance(cause, RepositoryNotFoundError | HFValidationError):
            return NotThere(f"neither a folder here nor a {WORDS[kind]} on the hub")
        if isinstance(cause, OSError) and cause.errno in (28, 122):
            raise cause
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            busy = " (its limit of requests is reached)" if status == 429 else ""
            return NotThere(f"the hub answers {status}{busy}", "The same command later goes on from here.", True)
    if is_offline(error):
        return NotThere("not downloaded before, and HF_HUB_OFFLINE forbids asking the hub")
    return NotThere(f"the hub cannot be reached ({brief(error)})", network=True)
