"""All terms by their ids: those of this folder, those of installed packages, and a user's own by their path."""

from distill_runner.common import outside
from distill_runner.common.errors import UserError, nearest
from distill_runner.methods.attention_relations import AttentionRelationLoss
from distill_runner.methods.attention_scores import AttentionScoreLoss
from distill_runner.methods.base import LossTerm
from distill_runner.methods.hidden_states import HiddenStateLoss
from distill_runner.methods.predictions import HardLabels, LogitMatching, NextSentence, SoftLabels, SoftLabelsPerClass
from distill_runner.methods.token_states import EmbeddingLoss, TokenStateLoss

TERMS: dict[str, type[LossTerm]] = {
    "hard_labels": HardLabels,
    "soft_labels": SoftLabels,
    "soft_labels_per_class": SoftLabelsPerClass,
    "logit_matching": LogitMatching,
    "hidden_states": HiddenStateLoss,
    "attention_relations": AttentionRelationLoss,
    "attention_scores": AttentionScoreLoss,
    "token_states": TokenStateLoss,
    "embeddings": EmbeddingLoss,
    "next_sentence": NextSentence,
}
"""Ids are part of keys in the store: a class may move, its id stays."""
GROUP = "distill_runner.terms"
"""Entry points of installed packages that bring terms: ``<id> = "<module>:<class>"``."""


def find_term(term: str) -> type[LossTerm]:
    """The class of a term.

    Args:
        term: an id, or ``<module>.<class>`` of a module that is installed or lies in the working folder.
    Raises:
        UserError: there is none, or its module cannot be imported; its key is relative to the term's.
    """
    if term in TERMS:
        return TERMS[term]
    path = term if "." in term else outside.entry_point(GROUP, term)
    if path is None:
        remedy = nearest(term, TERMS) + " Your own: <module>.<class>, such as my_terms.MyTerm."
        raise UserError(".term", term, "there is no such term", remedy.strip())
    found: type[LossTerm] = outside.load(".term", path, LossTerm)
    return found


def source_of(term: str) -> dict[str, str]:
    """What determines a term from outside beside its name and arguments: its source. Empty for one of this folder."""
    return {} if term in TERMS else {"source": outside.source_hash(find_term(term).__module__)}
