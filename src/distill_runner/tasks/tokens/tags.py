"""Tags of words: schemes (BIO, IOB1, BIOES, plain), the entities that a sequence of tags marks, and their scores.

Entities are those of conlleval and of seqeval's default mode. An entity is a run of words of one type. A word continues
the entity of the word before it if it has the same type, its role is inside or end, and the role before is beginning or
inside. Any other word with a type begins an entity, also an I without a B. It is right if its words and its type are.

Shapes: N words in S sentences, C tags, T types, E entities. ``bounds`` (S + 1,) has the first word of each sentence,
followed by N.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from distill_runner.common.errors import UserError, format_typed, override
from distill_runner.common.terminal import Undefined

Scheme = Literal["bio", "iob1", "bioes", "plain"]
OUTSIDE = "O"
OUT, BEGIN, INSIDE, END, SINGLE = range(5)
"""Roles of a word: outside of entities; first, middle or last word of an entity; only word of an entity."""
ROLES = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}
"""Prefix of a tag -> role; M is the inside of BMES, L and U are the end and the single word of BILOU."""
INVENTORIES = ("BI", "BIES", "BMES", "BILU")
"""Prefixes that a type has in the schemes, so that a type gets all of its tags even if the data lack one."""
SPELLINGS = tuple(form for mark in "-_/.:|" for form in (f"{{0}}{mark}{{1}}", f"{{1}}{mark}{{0}}"))
"""How tags are written, as formats of the letter of a role and of a type, the most usual first: B-PER, PER-B, B_PER."""
_ROLE = "(?P<B>b(egin(ning)?)?)|(?P<I>i(n(side)?)?|m)|(?P<E>e(nd)?|l(ast)?)|(?P<S>s(ingle)?|u(nit)?)"
_LOOKS_LIKE_ROLE = (
    re.compile(rf"\W*(?i:{_ROLE})[\W_]+(?P<type>.+?)\W*"),
    re.compile(rf"\W*(?P<type>.+?)[\W_]+(?i:{_ROLE})\W*"),
    re.compile(rf"(?i:{_ROLE})(?P<type>[A-Z].+)"),
)
"""Tags that name a role in another way than ``SPELLINGS``: b-PER, Begin-PER, PER(B), BPER. first_name names none."""
_LETTER = r"(B(egin(ning)?)?|I(nside)?|[MELSU])"
HAS_LETTER = re.compile(rf"\W*{_LETTER}[\W_].+|.+[\W_]{_LETTER}\W*", re.IGNORECASE | re.DOTALL)
_MISSPELLED = re.compile(r"[BI]|[BI]_.+|.+-[BI]", re.DOTALL)


@dataclass(frozen=True)
class TagSet:
    """Tags in the order of the model's outputs.

    Attributes:
        names: the tags.
        scheme: ``bio`` (IOB2), ``iob1``, ``bioes`` (also BMES and BILOU) or ``plain``.
        roles: (C,), role of each tag.
        types: (C,), index of the type of each tag in ``type_names``; -1 for O.
        type_names: types of entities, in the order of their first tag.
    """

    names: tuple[str, ...]
    scheme: Scheme
    roles: np.ndarray
    types: np.ndarray
    type_names: tuple[str, ...]

    @classmethod
    def from_names(cls, names: Sequence[str], scheme: Scheme | None = None) -> "TagSet":
        """Read the roles and types of tags.

        Args:
            scheme: scheme of the tags; None takes ``bioes`` or ``plain`` by their prefixes, and ``bio`` otherwise.
        Raises:
            UserError: some tags have prefixes and others do not, the tags do not fit the scheme, or without one they
                look like roles that are written in another way.
        """
        parsed = parse_tags(names)
        pairs = parsed or [(OUT, "") if name == OUTSIDE else (INSIDE, name) for name in names]
        own: Scheme = "bioes" if any(role in (END, SINGLE) for role, _ in pairs) else "bio"
        if parsed is None:
            own = "plain"
        if scheme not in (None, own) and (scheme, own) != ("iob1", "bio"):
            problem = f"but the tags are {own.upper()}: {format_typed(list(names)[:6])}"
            raise UserError("task.scheme", scheme, problem, override("task.scheme", None))
        if parsed is None and scheme is None:
            _require_types([name for name in names if name != OUTSIDE])
        type_names = tuple(dict.fromkeys(name for role, name in pairs if role != OUT))
        roles = np.array([role for role, _ in pairs], dtype=np.int8)
        types = np.array([-1 if role == OUT else type_names.index(name) for role, name in pairs], dtype=np.int64)
        return cls(tuple(names), scheme or own, roles, types, type_names)

    @cached_property
    def number(self) -> dict[str, int]:
        """Index of each tag."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def outside(self) -> int | None:
        """Index of the tag O; None if there is none."""
        return self.number.get(OUTSIDE)

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.roles.tolist(), self.types.tolist(), strict=True))

    @cached_property
    def _of_pair(self) -> dict[tuple[int, int], int]:
        return {pair: index for index, pair in enumerate(self._pairs)}

    @cached_property
    def inside(self) -> np.ndarray:
        """For each tag, the tag of the word's other pieces, (C,): I- for B-, if there is such a tag."""
        pairs = enumerate(self._pairs)
        tags = [self._of_pair.get((INSIDE, kind), tag) if role == BEGIN else tag for tag, (role, kind) in pairs]
        return np.array(tags, dtype=np.int64)

    def tags_of(self, span_type: str, length: int) -> list[int]:
        """Return the tags of an entity of ``length`` words."""
        kind = self.type_names.index(span_type)
        first, last = (SINGLE, END) if self.scheme == "bioes" else (BEGIN, INSIDE)
        roles = [first] if length == 1 else [BEGIN, *[INSIDE] * (length - 2), last]
        return [self._of_pair.get((role, kind), self._of_pair.get((INSIDE, kind), -1)) for role in roles]

    def entities(self, tags: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Return the entities in tags (N,) as rows (first word, last word + 1, type) in order, int64 (E, 3)."""
        roles, types = self.roles[tags], self.types[tags]
        goes_on = np.isin(roles, (INSIDE, END)) & ~first_words(bounds)
        goes_on[1:] &= (types[1:] == types[:-1]) & np.isin(roles[:-1], (BEGIN, INSIDE))
        begins = np.flatnonzero(~goes_on)
        rows = np.stack([begins, np.append(begins, len(tags))[1:], types[begins]], axis=1)
        return np.asarray(rows[rows[:, 2] >= 0])

    def misfits(self, tags: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Return the words whose tag may not follow the tag before it, or may not end a sentence, as indices."""
        is_first = first_words(bounds)
        is_last = np.append(is_first[1:], True)[: len(tags)]
        previous = np.where(is_first, -1, np.append(-1, tags)[: len(tags)])
        return np.flatnonzero(~self.transitions[previous, tags] | (is_last & ~self.transitions[tags, -1]))

    def recognize(self, tags: np.ndarray, bounds: np.ndarray) -> Scheme:
        """Return the scheme that sequences of tags follow, among those that have these prefixes.

        In IOB1, an entity begins with B only if it follows another one of its type directly.
        """
        if self.scheme not in ("bio", "iob1"):
            return self.scheme
        begins = self.entities(tags, bounds)[:, 0]
        follows = ~first_words(bounds)[begins] & (self.types[tags[begins]] == self.types[tags[begins - 1]])
        is_b = self.roles[tags[begins]] == BEGIN
        return "iob1" if (~is_b).any() and not (is_b & ~follows).any() else "bio"

    def viterbi(self, scores: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Return the most probable sequence of tags without forbidden transitions for each sentence, (N,).

        Args:
            scores: (N, C), log-probabilities of the tags of each word.
        """
        allowed = np.where(self.transitions, 0.0, -np.inf)
        best = np.zeros(len(scores), dtype=np.int64)
        for first, last in pairwise(np.asarray(bounds).tolist()):
            if first == last:
                continue
            total, back = scores[first] + allowed[-1, :-1], []
            for word in range(first + 1, last):
                paths = total[:, None] + allowed[:-1, :-1]
                back.append(paths.argmax(axis=0))
                total = paths.max(axis=0) + scores[word]
            best[last - 1] = (total + allowed[:-1, -1]).argmax()
            for word in range(last - 2, first - 1, -1):
                best[word] = back[word - first][best[word + 1]]
        return best

    @cached_property
    def transitions(self) -> np.ndarray:
        """Whether a tag may follow another, (C + 1, C + 1): rows are the previous tag, columns the next one.

        The last row is the beginning of a sentence, the last column its end.
        """
        roles, types = np.append(self.roles, OUT), np.append(self.types, -1)
        is_same = types[:, None] == types[None, :]
        is_open, goes_on = np.isin(roles, (BEGIN, INSIDE))[:, None], np.isin(roles, (INSIDE, END))[None, :]
        by_scheme: dict[str, np.ndarray] = {
            "plain": np.ones_like(is_same),
            "bio": (is_open & is_same) | ~goes_on,
            # B only separates an entity from another one of its type.
            "iob1": ((roles != OUT)[:, None] & is_same) | (roles != BEGIN)[None, :],
            "bioes": np.where(is_open, goes_on & is_same, ~goes_on),
        }
        return by_scheme[self.scheme]


def first_words(bounds: np.ndarray) -> np.ndarray:
    """Return whether each word is the first one of its sentence, (N,)."""
    is_first = np.zeros(int(bounds[-1]), dtype=bool)
    is_first[bounds[:-1][np.diff(bounds) > 0]] = True
    return is_first


def spelled_parts(name: str) -> dict[str, tuple[str, str]]:
    """Return the letter of the role and the type of a tag by the format of ``SPELLINGS`` that it may be written in."""
    parts = {}
    for form in SPELLINGS:
        mark, begins = form[3], form.startswith("{0}")
        letter, separator, kind = name.partition(mark) if begins else name.rpartition(mark)[::-1]
        if separator and kind and letter in ROLES:
            parts[form] = letter, kind
    return parts


def spelling(typed: Sequence[str]) -> tuple[str, list[tuple[str, str]]] | None:
    """Return how tags other than O are written, with the letter and type of each; None if they are plain.

    Another spelling than B-PER is taken only if a type has a beginning and another role of one scheme.

    Raises:
        UserError: only some tags name a role.
    """
    parts = [spelled_parts(name) for name in typed]
    for form in SPELLINGS:
        pairs = [own[form] for own in parts if form in own]
        letters, begun = {letter for letter, _ in pairs}, {kind for letter, kind in pairs if letter == "B"}
        # A type with a beginning and another role names roles; plain tags such as A-B and C-S do not.
        has_roles = any(kind in begun and letter != "B" for letter, kind in pairs)
        is_scheme = has_roles and any(letters <= {*own} for own in INVENTORIES)
        if pairs and len(pairs) == len(typed) and (is_scheme or (form == SPELLINGS[0] and not has_roles)):
            return form, pairs
        if has_roles:
            other = next((name for name, own in zip(typed, parts, strict=True) if form not in own), "")
            problem = f"has tags such as {form.format(*pairs[0])}, but also {other}, which is written in another way"
            problem = problem if other else f"has tags whose roles are of several schemes: {', '.join(sorted(letters))}"
            raise UserError("task.label", None, problem, "Write all tags as B-PER and I-PER, or none.")
    return None


def _require_types(typed: Sequence[str]) -> None:
    """Raise a UserError if two tags differ only in what looks like their roles, such as b-PER and i-PER."""
    for pattern in _LOOKS_LIKE_ROLE:
        tags = dict[str, dict[str, str]]()  # type -> role -> tag
        for match in filter(None, map(pattern.fullmatch, typed)):
            role = next(role for role in "BIES" if match[role])
            tags.setdefault(match["type"], {})[role] = match[0]
        for kind, own in tags.items():
            if len(own) > 1:
                problem = f"has {' and '.join([*own.values()][:2])}, which look like positions in one type"
                remedy = f"Write B-{kind} and I-{kind}, or if each is a type: " + override("task.scheme", "plain")
                raise UserError("task.label", None, problem, remedy)


def parse_tags(names: Sequence[str]) -> list[tuple[int, str]] | None:
    """Return role and type of tags that name roles; None if the tags are plain.

    Raises:
        UserError: only some tags name a role, or there is no type.
    """
    typed = [name for name in names if name != OUTSIDE]
    if (form_and_parts := spelling(typed)) is not None:
        pair_of = dict(zip(typed, form_and_parts[1], strict=True))
        return [(ROLES[pair_of[name][0]], pair_of[name][1]) if name in pair_of else (OUT, "") for name in names]
    prefixed = {name: parts[SPELLINGS[0]] for name in typed if SPELLINGS[0] in (parts := spelled_parts(name))}
    is_mixed = OUTSIDE in names and any(letter in "BI" for letter, _ in prefixed.values())
    are_misspelled = bool(typed) and all(map(_MISSPELLED.fullmatch, typed))
    if is_mixed or (are_misspelled and {"B", "I"} & {*typed} != {"I"}):  # I without B may be a type
        other = next(name for name in typed if name not in prefixed)
        problem = f"has tags without a prefix in front of a type, such as {other}"
        remedy = "Write all as B-PER and I-PER, or none; one type needs a name too."
        raise UserError("task.label", None, problem, remedy)
    return None


def complete_names(names: Iterable[str]) -> list[str]:
    """Return the tags of data in order: O first, then all tags that the scheme has for each type, sorted by type.

    A type of which the data have only single words thus gets its I- tag as well. Plain tags are only sorted.
    """
    names = list(dict.fromkeys(names))
    typed, parsed = [name for name in names if name != OUTSIDE], parse_tags(names)
    if parsed is None:
        return [OUTSIDE, *sorted(typed)] if OUTSIDE in names else sorted(typed)
    form, pairs = spelling(typed) or (SPELLINGS[0], [])
    letters = next((own for own in INVENTORIES if {letter for letter, _ in pairs} <= {*own}), "BIES")
    return [OUTSIDE, *(form.format(letter, kind) for kind in sorted({kind for _, kind in pairs}) for letter in letters)]


@dataclass(frozen=True)
class TagScores:
    """Tags of the words of a split, of the data and as predicted: indices (N,)."""

    gold: np.ndarray
    predicted: np.ndarray
    bounds: np.ndarray
    tagset: TagSet

    @cached_property
    def gold_entities(self) -> np.ndarray:
        """Entities of the data, (E, 3), as ``TagSet.entities`` returns them."""
        return self.tagset.entities(self.gold, self.bounds)

    @cached_property
    def predicted_entities(self) -> np.ndarray:
        """Predicted entities, as ``gold_entities``."""
        return self.tagset.entities(self.predicted, self.bounds)

    @cached_property
    def is_found(self) -> np.ndarray:
        """Whether each entity of the data is predicted, (E,)."""
        predicted = set(map(tuple, self.predicted_entities.tolist()))
        return np.array([tuple(entity) in predicted for entity in self.gold_entities.tolist()], dtype=bool)

    @cached_property
    def counts(self) -> np.ndarray:
        """Numbers of right, predicted and actual entities of each sentence and type, int64 (S, T, 3)."""
        counts = np.zeros((len(self.bounds) - 1, len(self.tagset.type_names), 3), dtype=np.int64)
        sources = self.gold_entities[self.is_found], self.predicted_entities, self.gold_entities
        for column, entities in enumerate(sources):
            np.add.at(counts, (self.sentence_of(entities[:, 0]), entities[:, 2], column), 1)
        return counts

    def summed_counts(self, metric: str) -> np.ndarray:
        """Return counts (S, 3 T) of sentences, whose sums give the metric: the mean over T of F1 of three sums.

        Precision, recall and accuracy are the F1 of counts in which predicted and actual are one number.
        """
        if metric == "accuracy":
            sizes, right = np.diff(self.bounds), np.append(0, np.cumsum(self.gold == self.predicted))
            return np.stack([np.diff(right[self.bounds]), sizes, sizes], axis=1)
        counts = self.counts if metric == "f1_macro" else self.counts.sum(axis=1, keepdims=True)
        counts = counts[:, :, {"precision": [0, 1, 1], "recall": [0, 2, 2]}.get(metric, [0, 1, 2])]
        if metric == "f1_macro":
            counts = counts[:, counts.sum(axis=(0, 2)) > 0]
        return counts.reshape(len(counts), -1)

    def metric(self, name: str) -> float:
        """Return one of ``TAG_METRICS``."""
        right, predicted, actual = self.summed_counts(name).sum(axis=0).reshape(-1, 3).T
        if not (predicted + actual).any():
            return Undefined(0.0, f"no entity is {ABSENT.get(name, 'predicted or present')}")
        return float((2 * right / (predicted + actual)).mean())

    def sentence_of(self, words: Any) -> Any:
        """Return the number of the sentence of a word, or of each word."""
        return np.searchsorted(self.bounds, words, side="right") - 1

    def by_type(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and number of entities of each type that is predicted or in the data."""
        rows, totals = {}, self.counts.sum(axis=0).tolist()
        for name, (right, predicted, actual) in zip(self.tagset.type_names, totals, strict=True):
            if predicted or actual:
                shares = {"precision": right / max(predicted, 1), "recall": right / max(actual, 1)}
                rows[name] = shares | {"f1": 2 * right / (predicted + actual), "support": actual}
        return rows


ABSENT = {"precision": "predicted", "recall": "present"}
TAG_METRICS = ("f1", "precision", "recall", "f1_macro", "accuracy")
"""Metrics of tags. ``f1``, ``precision`` and ``recall`` are micro averages over entities; ``accuracy`` is of words."""
