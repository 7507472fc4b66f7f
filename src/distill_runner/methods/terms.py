"""Look-up of loss terms: built-in terms and terms of installed packages by id, a user's own terms by path."""

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
"""Built-in terms by id. Ids are part of keys in the store: a class may move, but its id must not change."""
GROUP = "distill_runner.terms"
"""Entry point group in which installed packages register loss terms: ``<id> = "<module>:<class>"``."""


def find_term(term: str) -> type[LossTerm]:
    """Return the class of a term.

    Args:
        term: id, or ``<module>.<class>`` with a module that is installed or is in the working folder.
    Raises:
        UserError: there is no such term, it is no concrete ``LossTerm``, or its module cannot be imported. The error's
            key is relative to the key of the term.
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
    """Return the hash of the source of a term from outside this package, as part of its spec; empty if built in."""
    return {} if term in TERMS else {"source": outside.source_hash(find_term(term).__module__)}
