"""Commits of the hub that a stage reads."""

from itertools import chain

from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.fingerprints import on_hub
from distill_runner.models.sources import commit, is_on_hub
from distill_runner.pipeline.stage_data import CORPUS
from distill_runner.pipeline.stages import STAGE, Stage


def hub_commits(stage: Stage) -> dict[str, str]:
    """Return the commit of each hub model and data set that the stage or its upstream stages read, by name."""
    config, found = stage.config, dict[str, str]()
    for upstream in stage.upstream:
        found |= hub_commits(upstream)
    for source in () if config.given else (config.model.source, stage.tokenizer):  # predictions have no model
        if source and source != CORPUS and not source.startswith(STAGE) and is_on_hub(source):
            found[source] = commit(source).sha
    parts = [mixture.parts.values() for mixture in (config.corpus, config.transfer) if mixture]
    data: list[Dataset] = [*filter(None, [config.task]), *chain(*parts)]
    places = (entry.placed(split)[0] for entry in data for split in sorted(entry.splits))
    return found | {_name(place): sha for place in places if (sha := on_hub(place))}


def _name(place: Dataset) -> str:
    return f"{place.dataset}@{place.revision}" if place.revision else place.dataset
