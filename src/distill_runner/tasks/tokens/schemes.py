"""Schemes of tags: BIO (IOB2), IOB1, BIOES and plain tags, and the entities that a sequence of tags marks.

Entities are counted as conlleval and seqeval's default mode count them. An entity is a run of words of one type. A word
continues the entity of the word before it if it has the same type, its role is inside or end, and the role before is
beginning or inside. Any other word with a type begins an entity, also an I without a B.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from distill_runner.common.errors import UserError, format_list

Scheme = Literal["bio", "iob1", "bioes", "plain"]
OUTSIDE = "O"
OUT, BEGIN, INSIDE, END, SINGLE = range(5)
"""Roles of a word: outside of entities; first, middle or last word of an entity; only word of an entity."""
LETTERS = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}
"""Prefix of a tag -> role; M is the inside of BMES, L and U are the end and the single word of BILOU."""
INVENTORIES = ("BI", "BIES", "BMES", "BILU")
"""Prefixes that a type has in the schemes, so that a type gets all of its tags even if the data lack one."""
_PREFIXED = re.compile(r"([BIMELSU])-(.+)", re.DOTALL)
_UNDERSCORED = re.compile(r"[BI]_(.+)", re.DOTALL)
_SUFFIXED = re.compile(r"(.+)-([BI])", re.DOTALL)


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
            UserError: some tags have prefixes and others do not, or the tags do not fit the scheme.
        """
        parsed = parse_tags(names)
        if parsed is None:
            if scheme not in (None, "plain"):
                problem = f"but the tags have no prefixes such as B- and I-: {format_list(list(names)[:6])}"
                raise UserError("task.scheme", scheme, problem, "task.scheme=null")
            pairs = [(OUT, "") if name == OUTSIDE else (INSIDE, name) for name in names]
            scheme = "plain"
        else:
            pairs = parsed
            has_ends = any(role in (END, SINGLE) for role, _ in pairs)
            own: Scheme = "bioes" if has_ends else "bio"
            if scheme is not None and (scheme == "plain" or (scheme == "bioes") != has_ends):
                problem = f"but the tags are {own.upper()}: {format_list(list(names)[:6])}"
                raise UserError("task.scheme", scheme, problem, "task.scheme=null")
            scheme = scheme or own
        type_names = tuple(dict.fromkeys(name for role, name in pairs if role != OUT))
        number = {name: index for index, name in enumerate(type_names)}
        roles = np.array([role for role, _ in pairs], dtype=np.int8)
        types = np.array([-1 if role == OUT else number[name] for role, name in pairs], dtype=np.int64)
        return cls(tuple(names), scheme, roles, types, type_names)

    @cached_property
    def outside(self) -> int | None:
        """Index of the tag O; None if there is none."""
        positions = np.flatnonzero(self.roles == OUT)
        return int(positions[0]) if len(positions) else None

    @cached_property
    def inside(self) -> np.ndarray:
        """For each tag, the tag of the word's other pieces, (C,): I- for B-, if there is such a tag."""
        index = {(int(role), int(kind)): i for i, (role, kind) in enumerate(zip(self.roles, self.types, strict=True))}
        return np.array(
            [
                index.get((INSIDE, int(kind)), i) if role == BEGIN else i
                for i, (role, kind) in enumerate(zip(self.roles, self.types, strict=True))
            ],
            dtype=np.int64,
        )

    def tags_of(self, span_type: str, length: int) -> list[str]:
        """Return the tags of an entity of ``length`` words."""
        index = {
            (int(role), int(kind)): name for role, kind, name in zip(self.roles, self.types, self.names, strict=True)
        }
        kind = self.type_names.index(span_type)
        first, last = (SINGLE, END) if self.scheme == "bioes" else (BEGIN, INSIDE)
        roles = [first] if length == 1 else [BEGIN, *[INSIDE] * (length - 2), last]
        return [index.get((role, kind), index.get((INSIDE, kind), "")) for role in roles]

    def starts(self, tags: np.ndarray, first_words: np.ndarray) -> np.ndarray:
        """Return whether each word begins an entity, (N,).

        Args:
            tags: (N,), tag of each word, of all sentences one after the other.
            first_words: (N,), whether the word is the first one of its sentence.
        """
        roles, types = self.roles[tags], self.types[tags]
        continues = np.zeros(len(tags), dtype=bool)
        continues[1:] = (
            np.isin(roles[1:], (INSIDE, END))
            & np.isin(roles[:-1], (BEGIN, INSIDE))
            & (types[1:] == types[:-1])
            & ~first_words[1:]
        )
        starts: np.ndarray = (roles != OUT) & ~continues
        return starts

    def entities(self, tags: np.ndarray, first_words: np.ndarray) -> np.ndarray:
        """Return the entities as rows (first word, last word + 1, type) in order, int64 (E, 3); as in ``starts``."""
        starts = np.flatnonzero(self.starts(tags, first_words))
        begins = np.concatenate([starts, [len(tags)]])
        # An entity ends where the next one begins, or at the first word outside before that.
        outside = np.concatenate([np.flatnonzero(self.roles[tags] == OUT), [len(tags)]])
        ends = np.minimum(begins[1:], outside[np.searchsorted(outside, starts)])
        sentence_ends = np.concatenate([np.flatnonzero(first_words), [len(tags)]])
        ends = np.minimum(ends, sentence_ends[np.searchsorted(sentence_ends, starts, side="right")])
        return np.stack([starts, ends, self.types[tags[starts]]], axis=1).astype(np.int64)

    def misfits(self, tags: np.ndarray, first_words: np.ndarray) -> np.ndarray:
        """Return the words whose tag may not follow the tag before it, or may not end a sentence, as indices."""
        allowed = self.transitions
        previous = np.concatenate([[-1], tags[:-1]])
        previous[first_words] = -1
        is_valid = allowed[previous, tags]
        last_words = np.concatenate([first_words[1:], [True]])[: len(tags)]
        is_valid &= ~last_words | allowed[tags, -1]
        return np.flatnonzero(~is_valid)

    @cached_property
    def transitions(self) -> np.ndarray:
        """Whether a tag may follow another, (C + 1, C + 1): rows are the previous tag, columns the next one.

        The last row is the beginning of a sentence, the last column its end.
        """
        size = len(self.names)
        allowed = np.ones((size + 1, size + 1), dtype=bool)
        if self.scheme == "plain":
            return allowed
        roles, types = np.append(self.roles, OUT), np.append(self.types, -1)
        same_type = types[:, None] == types[None, :]
        if self.scheme == "bio":
            is_open = np.isin(roles, (BEGIN, INSIDE))[:, None] & same_type
            return allowed & (is_open | (roles != INSIDE)[None, :])
        if self.scheme == "iob1":  # B only separates an entity from another one of its type
            return allowed & (((roles != OUT)[:, None] & same_type) | (roles != BEGIN)[None, :])
        opens, goes_on = np.isin(roles, (BEGIN, INSIDE)), np.isin(roles, (INSIDE, END))
        return np.where(opens[:, None], goes_on[None, :] & same_type, ~goes_on[None, :])


def parse_tags(names: Iterable[str]) -> list[tuple[int, str]] | None:
    """Return role and type of tags with prefixes; None if the tags are plain.

    Raises:
        UserError: some tags have prefixes and others do not, or the role is at the end of the tags.
    """
    names = list(names)
    typed = [name for name in names if name != OUTSIDE]
    matches = [_PREFIXED.fullmatch(name) for name in typed]
    if typed and all(matches):
        pairs = {name: (LETTERS[match[1]], match[2]) for name, match in zip(typed, matches, strict=True) if match}
        return [pairs.get(name, (OUT, "")) for name in names]
    if typed and all(map(_SUFFIXED.fullmatch, typed)):
        problem = f"has B and I at the end of the tags, such as {typed[0]}"
        raise UserError("task.label", None, problem, "Write them in front of the type: B-PER, I-PER.")
    is_bare = "B" in typed and {*typed} <= {"B", "I"} and OUTSIDE in names
    if is_bare or (typed and all(map(_UNDERSCORED.fullmatch, typed))):
        problem = f"has prefixes without a type behind a hyphen, such as {typed[0]}"
        raise UserError("task.label", None, problem, "Write B-PER and I-PER; entities of one type need a type, too.")
    if any(match and match[1] in "BI" for match in matches) and OUTSIDE in names:
        plain = next(name for name, match in zip(typed, matches, strict=True) if not match)
        prefixed = next(name for name, match in zip(typed, matches, strict=True) if match)
        problem = f"has tags with and without a prefix: {prefixed} and {plain}"
        raise UserError("task.label", None, problem, f"Is {plain} a mistake? Repair it, or remove the prefixes.")
    return None


def complete_names(names: Iterable[str]) -> list[str]:
    """Return the tags of data in order: O first, then all tags that the scheme has for each type, sorted by type.

    A type of which the data have only single words thus gets its I- tag as well. Plain tags are only sorted.
    """
    names = list(dict.fromkeys(names))
    parsed = parse_tags(names)
    outside = [OUTSIDE] if OUTSIDE in names or parsed is not None else []
    if parsed is None:
        return outside + sorted(name for name in names if name != OUTSIDE)
    letters = {name[0] for name in names if name != OUTSIDE}
    inventory = next((letters_of for letters_of in INVENTORIES if letters <= set(letters_of)), "BIES")
    types = sorted({kind for role, kind in parsed if role != OUT})
    return outside + [f"{letter}-{kind}" for kind in types for letter in inventory]


def recognize(tagset: TagSet, tags: np.ndarray, first_words: np.ndarray) -> Scheme:
    """Return the scheme that sequences of tags follow, among those that have the prefixes of ``tagset``.

    In IOB1, an entity begins with B only if it follows another one of its type directly.
    """
    if tagset.scheme not in ("bio", "iob1"):
        return tagset.scheme
    begins = np.flatnonzero(tagset.starts(tags, first_words))
    roles, types = tagset.roles[tags], tagset.types[tags]
    follows = np.zeros(len(begins), dtype=bool)
    later = begins > 0
    previous_words = begins[later] - 1
    follows[later] = (types[previous_words] == types[begins[later]]) & ~first_words[begins[later]]
    is_b = roles[begins] == BEGIN
    return "iob1" if (~is_b).any() and not (is_b & ~follows).any() else "bio"


def viterbi(scores: np.ndarray, sentences: np.ndarray, tagset: TagSet) -> np.ndarray:
    """Return the most probable sequence of tags without forbidden transitions for each sentence, (N,).

    Args:
        scores: (N, C), log-probabilities of the tags of each word.
        sentences: (S + 1,), first word of each sentence, followed by N.
        tagset: tags with the allowed transitions.
    """
    allowed = np.where(tagset.transitions, 0.0, -np.inf)
    lengths = np.diff(sentences)
    best = np.zeros(len(scores), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    if not len(order):
        return best
    begins, sizes = np.asarray(sentences)[:-1][order], lengths[order]
    total = scores[begins] + allowed[-1, :-1]  # (n, C), of the sentences that are longer than the current position
    back: list[np.ndarray] = []
    finals = np.empty(len(order), dtype=np.int64)
    for position in range(sizes[0]):
        active = int((sizes > position).sum())
        if position:
            paths = total[:active, :, None] + allowed[None, :-1, :-1]
            back.append(paths.argmax(axis=1))
            total = paths.max(axis=1) + scores[begins[:active] + position]
        ending = np.flatnonzero(sizes[:active] == position + 1)
        finals[ending] = (total[ending] + allowed[:-1, -1]).argmax(axis=1)
    for row, (begin, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
        tag = int(finals[row])
        for position in range(size - 1, -1, -1):
            best[begin + position] = tag
            if position:
                tag = int(back[position - 1][row, tag])
    return best
