"""Mapping from student layers to the teacher layers that each of them learns from.

A mapping is a list with one entry per student layer: the list of teacher layers, counted from 1, that the student layer
is compared with. The entry is empty for a layer that is not supervised.
In this module m is the number of student layers and n the number of teacher layers.
"""

import random
from typing import Annotated, Literal

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, override, quantity
from distill_runner.common.schema import Assumption, Schema


class LayerMapping(Schema):
    """Rule that derives a mapping for any pair of depths, or an explicit mapping.

    The rules come from ALP-KD (Eqs. 3-6, experiments), internal representations and MiniLMv2.

    There are c supervised student layers: c = m with ``supervise_last``, and otherwise c = m - 1, without the last one.

    - ``skip``: teacher layers 1, 1 + s, 1 + 2s, ... with s = floor(n / c), the first layer of each of c equal
      buckets (PKD). An example where c does not divide n: 12 to 6 layers gives 1, 3, 5, 7, 9.
    - ``no``: c consecutive buckets without overlap. If c does not divide n, their sizes differ by 1, and the larger
      buckets come first.
    - ``po``: like ``no``, but each bucket also contains the first layer of the next bucket.
    - ``all``: every supervised student layer learns from all teacher layers.
    - ``layer``: every supervised student layer learns from the single teacher layer ``layer`` (PKD-1, PKD-6 and PKD-12
      of ALP-KD's Table 3, all with m = 2).
    - ``last``: the layers just below the top, n - m + 1, n - m + 2, ... (PKD's "last": 12 to 3 layers gives 10, 11).
    - ``group_top``: teacher layer j * n / m for student layer j, the top layer of each of m equal groups (internal
      representations). If m does not divide n, the bounds of the groups are rounded down.
    - ``top``: the student's last layer, regardless of ``supervise_last``, learns from the single teacher layer
      ``layer`` (MiniLMv2).
    - ``explicit``: the mapping ``layers``.
    - ``reverse``: ``skip`` upside down: the deepest supervised student layer learns from the lowest layer (Yu et al.
      2025).
    - ``same``: every supervised student layer learns from one teacher layer, ``layer`` or by default the middle one of
      ``skip``; of an even number, the upper of the two in the middle (Yu et al. 2025, "all to one").
    - ``random``: c teacher layers drawn from ``seed``, in the order of the draw (Yu et al. 2025). With ``sort`` and
      ``every_epoch`` it is the mapping of RAIL-KD (Haidar et al. 2022).

    The last three are controls, which ask whether the choice of layers matters. All rules but ``top`` and ``explicit``
    need a student with fewer layers than the teacher.

    Args:
        rule: name of the rule; the choices ``mapping=<name>`` explain each rule by an example.
        layer: teacher layer, counted from 1. Required by the rule ``layer``; optional for ``top``, where the teacher's
            last layer is the default, and for ``same``. No other rule takes it.
        layers: mapping of the rule ``explicit``: one list of teacher layers per student layer, ``[]`` for a layer that
            is not supervised. No other rule takes it.
        supervise_last: whether the student's last layer is supervised too. The rule ``top`` ignores it; ``explicit``
            refuses it.
        seed: seed of the rule ``random``, which needs it. Tables take runs that differ in it for seeds of one row.
        sort: whether the drawn layers rise with the student layers.
        every_epoch: whether each epoch draws anew. The draw depends only on ``seed`` and the epoch, so that training
            resumes with the same layers.
    Raises:
        UserError: a key is missing, or belongs to another rule.
    """

    rule: Annotated[
        Literal[
            "skip", "no", "po", "all", "layer", "last", "group_top", "top", "explicit", "reverse", "same", "random"
        ],
        Assumption(
            '12 layers to 6 gives teacher layers 1, 3, 5, 7, 9: "only every other layer is skipped"', "ALP-KD", "skip"
        ),
        Assumption("if the layers do not divide evenly, bucket sizes differ by one, larger first", "ALP-KD", "no"),
        Assumption("if the layers do not divide evenly, bucket sizes differ by one, larger first", "ALP-KD", "po"),
        Assumption("with more than two student layers it applies to every supervised layer", "ALP-KD Table 3", "layer"),
        Assumption(
            "bounds of groups that do not divide evenly are rounded down", "internal representations", "group_top"
        ),
    ]
    layer: int | None = None
    layers: list[list[int]] | None = None
    supervise_last: bool = False
    seed: int | None = None
    sort: bool = False
    every_epoch: bool = False

    @model_validator(mode="after")
    def _keys_of_the_rule(self) -> "LayerMapping":
        for key, (rule, *optional) in _RULES_OF_KEYS.items():
            is_default = (value := getattr(self, key)) == type(self).model_fields[key].default
            if self.rule == rule and value is None:
                raise UserError(f"mapping.{key}", None, f"mapping={rule} needs it", _EXAMPLES[rule])
            if self.rule not in (rule, *optional) and not is_default:
                raise UserError(f"mapping.{key}", value, f"mapping={self.rule} does not use it", _EXAMPLES[rule])
        if self.rule == "explicit" and self.supervise_last:
            problem = "mapping=explicit does not use it: its list shows what is supervised"
            raise UserError("mapping.supervise_last", True, problem, _EXAMPLES["explicit"])
        return self

    @property
    def name(self) -> str:
        """Name for tables: the rule, with the teacher layer if one is set, and ``rail`` for the mapping of RAIL-KD."""
        if self.rule == "random":
            flags = [key for key in ("sort", "every_epoch") if getattr(self, key)]
            return "rail" if flags == ["sort", "every_epoch"] else " ".join(["random", *flags])
        return self.rule if self.layer is None else f"{self.rule}:{self.layer}"

    def teacher_layers(self, num_student: int, num_teacher: int, epoch: int = 0) -> list[list[int]]:
        """Return the mapping for a student and a teacher with these numbers of layers: one entry per student layer.

        Args:
            epoch: epoch of the student, counted from 0; it matters only with ``every_epoch``.
        Raises:
            UserError: the mapping does not fit these depths.
        """
        m, n = num_student, num_teacher
        if self.layers is not None:
            return _check_explicit(self.layers, m, n)
        if self.rule == "top":
            layer = n if self.layer is None else self.layer
            _require_layers("mapping.layer", layer, [layer], n)
            return [*([] for _ in range(m - 1)), [layer]]
        if m >= n:
            remedy = override("student.num_layers", n - 1) + f" or another number below {n}."
            raise UserError(
                "student.num_layers",
                m,
                f"mapping={self.rule} needs a student shallower than the teacher, which has {quantity(n, 'layer')}",
                remedy,
            )
        count = m if self.supervise_last else m - 1
        layers = [[1 + j * (n // count)] for j in range(count)]  # of the rule skip
        match self.rule:
            case "reverse":
                layers.reverse()
            case "random":
                layers = [[k] for k in self._draw(count, n, epoch)]
            case "same" if self.layer is None:
                layers = [layers[count // 2]] * count if count else []
            case "no" | "po":  # buckets whose sizes differ by at most 1, larger ones first
                layers = [part.tolist() for part in np.array_split(np.arange(1, n + 1), count)] if count else []
                if self.rule == "po":
                    layers = [bucket + upper[:1] for bucket, upper in zip(layers, [*layers[1:], []], strict=False)]
            case "all":
                layers = [list(range(1, n + 1)) for _ in range(count)]
            case "last":
                layers = [[n - m + j] for j in range(1, count + 1)]
            case "group_top":
                layers = [[j * n // m] for j in range(1, count + 1)]
            case "layer" | "same":
                assert self.layer is not None
                _require_layers("mapping.layer", self.layer, [self.layer], n)
                layers = [[self.layer] for _ in range(count)]
        return layers + [[]] * (m - count)

    def _draw(self, count: int, n: int, epoch: int) -> list[int]:
        # Python guarantees that random() gives the same numbers in all of its versions, unlike sample() and shuffle().
        draw = random.Random(f"{self.seed}/{epoch if self.every_epoch else 0}").random
        ranks = {k: draw() for k in range(1, n + 1)}
        layers = sorted(ranks, key=lambda k: ranks[k])[:count]
        return sorted(layers) if self.sort else layers


def one_to_one(layers: list[list[int]]) -> dict[int, int]:
    """Return the teacher layer of each supervised student layer, for methods that compare layers one to one.

    Raises:
        UserError: a student layer has several teacher layers.
    """
    for j, entry in enumerate(layers, start=1):
        if len(entry) > 1:
            problem = f"this method compares student layer {j} with one teacher layer, not with {len(entry)}"
            remedy = override("mapping", "skip") + ", or a method that combines layers: " + override("method", "ckd")
            raise UserError("mapping", entry, problem, remedy)
    return {j: entry[0] for j, entry in enumerate(layers, start=1) if entry}


_RULES_OF_KEYS = {
    "layer": ("layer", "top", "same"),
    "layers": ("explicit",),
    "seed": ("random",),
    "sort": ("random",),
    "every_epoch": ("random",),
}
"""Keys by the rules that take them; the first one of these needs it, if it has no default."""
_EXAMPLES = {
    "layer": "For one teacher layer: " + override("mapping", "layer", "mapping.layer", 6),
    "random": "For layers drawn at random: " + override("mapping", "random", "mapping.seed", 1),
    "explicit": "For a list of your own: " + override("mapping", "explicit", "mapping.layers", [[1], [5], [9], []]),
}


def _check_explicit(layers: list[list[int]], m: int, n: int) -> list[list[int]]:
    key = "mapping.layers"
    if len(layers) != m:
        raise UserError(
            key,
            layers,
            f"has {len(layers)} entries, but the student has {quantity(m, 'layer')}",
            "Give one list per student layer, [] for a layer that is not supervised.",
        )
    for entry in layers:
        _require_layers(key, layers, entry, n)
        if len(set(entry)) < len(entry):
            raise UserError(key, layers, f"{entry} names a teacher layer twice")
    return layers


def _require_layers(key: str, value: object, entry: list[int], n: int) -> None:
    for k in entry:
        if not 1 <= k <= n:
            raise UserError(key, value, f"there is no teacher layer {k}", f"The teacher has layers 1 to {n}.")
