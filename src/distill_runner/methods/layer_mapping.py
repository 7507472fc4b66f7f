"""Configuration of which teacher layers each student layer learns from (``LayerMapping``) and how ALP weighs them.

A mapping is a list with one entry per student layer: the list of teacher layers, counted from 1, that the student layer
is compared with. The entry is empty for a layer that is not supervised.
In this module m is the number of student layers and n the number of teacher layers.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema


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

    All rules but ``top`` and ``explicit`` need a student with fewer layers than the teacher.

    Args:
        rule: name of the rule; the choices ``mapping=<name>`` explain each rule by an example.
        layer: teacher layer, counted from 1. Required by the rule ``layer``; optional for ``top``, where the teacher's
            last layer is the default. No other rule takes it.
        layers: mapping of the rule ``explicit``: one list of teacher layers per student layer, ``[]`` for a layer that
            is not supervised. No other rule takes it.
        supervise_last: whether the student's last layer is supervised too. The rule ``top`` ignores it; ``explicit``
            refuses it.
    Raises:
        UserError: a key is missing, or belongs to another rule.
    """

    rule: Annotated[
        Literal["skip", "no", "po", "all", "layer", "last", "group_top", "top", "explicit"],
        Reading(
            '12 layers to 6 gives teacher layers 1, 3, 5, 7, 9: "only every other layer is skipped"', "ALP-KD", "skip"
        ),
        Reading("if the layers do not divide evenly, bucket sizes differ by one, larger first", "ALP-KD", "no"),
        Reading("if the layers do not divide evenly, bucket sizes differ by one, larger first", "ALP-KD", "po"),
        Reading("with more than two student layers it applies to every supervised layer", "ALP-KD Table 3", "layer"),
        Reading("bounds of groups that do not divide evenly are rounded down", "internal representations", "group_top"),
    ]
    layer: int | None = None
    layers: list[list[int]] | None = None
    supervise_last: bool = False

    @model_validator(mode="after")
    def _keys_of_the_rule(self) -> "LayerMapping":
        for key, rule, value in (("layer", "layer", self.layer), ("layers", "explicit", self.layers)):
            if self.rule == rule and value is None:
                raise UserError(f"mapping.{key}", None, f"mapping={rule} needs it", _EXAMPLES[rule])
            if self.rule not in (rule, "top" if key == "layer" else rule) and value is not None:
                problem = f"mapping={self.rule} does not use it"
                raise UserError(f"mapping.{key}", value, problem, _EXAMPLES[rule])
        if self.rule == "explicit" and self.supervise_last:
            problem = "mapping=explicit does not use it: its list shows what is supervised"
            raise UserError("mapping.supervise_last", True, problem, _EXAMPLES["explicit"])
        return self

    def between(self, student_layers: int, teacher_layers: int) -> list[list[int]]:
        """Return the mapping for a student and a teacher with these numbers of layers: one entry per student layer.

        Raises:
            UserError: the mapping does not fit these depths.
        """
        m, n = student_layers, teacher_layers
        if self.layers is not None:
            return _checked(self.layers, m, n)
        if self.rule == "top":
            layer = n if self.layer is None else self.layer
            _in_range("mapping.layer", layer, [layer], n)
            return [*([] for _ in range(m - 1)), [layer]]
        if m >= n:
            raise UserError(
                "student.num_layers",
                m,
                f"mapping={self.rule} needs a student shallower than the teacher, which has {n} layers",
                f"Take student.num_layers below {n}, or mapping=explicit.",
            )
        count = m if self.supervise_last else m - 1
        return self._derived(count, m, n) + [[]] * (m - count)

    def _derived(self, count: int, m: int, n: int) -> list[list[int]]:
        match self.rule:
            case "skip":
                return [[1 + j * (n // count)] for j in range(count)]
            case "no":
                return _buckets(n, count)
            case "po":
                buckets = _buckets(n, count)
                return [bucket + after[:1] for bucket, after in zip(buckets, [*buckets[1:], []], strict=False)]
            case "all":
                return [list(range(1, n + 1)) for _ in range(count)]
            case "last":
                return [[n - m + j] for j in range(1, count + 1)]
            case "group_top":
                return [[j * n // m] for j in range(1, count + 1)]
        assert self.layer is not None
        _in_range("mapping.layer", self.layer, [self.layer], n)
        return [[self.layer] for _ in range(count)]


def single(layers: list[list[int]]) -> dict[int, int]:
    """Return the teacher layer of each supervised student layer, for methods that compare layers one to one.

    Raises:
        UserError: a student layer has several teacher layers.
    """
    for j, entry in enumerate(layers, start=1):
        if len(entry) > 1:
            raise UserError(
                "mapping",
                entry,
                f"this method compares student layer {j} with one teacher layer, not with {len(entry)}",
                "Take mapping=skip, last or layer, or a method that combines layers: method=ckd or alp.",
            )
    return {j: entry[0] for j, entry in enumerate(layers, start=1) if entry}


_EXAMPLES = {
    "layer": "For one teacher layer: mapping=layer mapping.layer=6",
    "explicit": "For a list of your own: mapping=explicit 'mapping.layers=[[1],[5],[9],[]]'",
}


def _buckets(n: int, count: int) -> list[list[int]]:
    """Divide layers 1..n into ``count`` consecutive buckets whose sizes differ by at most 1, larger buckets first."""
    buckets, start = [], 1
    for j in range(count):
        size = n // count + (j < n % count)
        buckets.append(list(range(start, start + size)))
        start += size
    return buckets


def _checked(layers: list[list[int]], m: int, n: int) -> list[list[int]]:
    key = "mapping.layers"
    if len(layers) != m:
        raise UserError(
            key,
            layers,
            f"has {len(layers)} entries, but the student has {m} layers",
            "Give one list per student layer, [] for a layer that is not supervised.",
        )
    for entry in layers:
        _in_range(key, layers, entry, n)
        if len(set(entry)) < len(entry):
            raise UserError(key, layers, f"{entry} names a teacher layer twice")
    return layers


def _in_range(key: str, value: object, entry: list[int], n: int) -> None:
    for k in entry:
        if not 1 <= k <= n:
            raise UserError(key, value, f"there is no teacher layer {k}", f"The teacher has layers 1 to {n}.")


class Attention(Schema):
    """Attention of a student layer over its teacher layers, by which ALP weighs them.

    Args:
        kind: ``dot`` takes the states as they are, without parameters (ALP-KD Eq. 5). ``kqv`` trains projections to
            keys, queries and values (appendix, Table 4).
        heads: number of attention heads of ``kqv``, 1 by default. It must divide the student's width.
        values: value projections of ``kqv``: ``per_layer``, the default, is a separate projection for each teacher
            layer; ``shared`` is one projection for all teacher layers.
        scale: ``sqrt_dim`` divides the scores by the square root of a head's width; ``none`` leaves them unscaled.
        normalize: whether queries and keys, but not values, are L2-normalised, so that the scores are cosines.
    Raises:
        UserError: ``heads`` or ``values`` is set with ``kind=dot``.
    """

    kind: Annotated[
        Literal["dot", "kqv"], Reading("no projection after the attention heads", "ALP-KD appendix", "kqv")
    ] = "dot"
    heads: int | None = Field(None, ge=1)
    values: Annotated[
        Literal["per_layer", "shared"] | None,
        Reading(
            'a separate projection for each layer: "a dedicated value vector for each key"',
            "ALP-KD appendix",
            "per_layer",
        ),
    ] = None
    scale: Annotated[
        Literal["none", "sqrt_dim"],
        Reading("Eq. 5 has no scale; Vaswani et al., whom the appendix follows, have one", "ALP-KD Eq. 5"),
    ] = "none"
    normalize: Annotated[bool, Reading("queries and keys are not normalised", "ALP-KD Eq. 5")] = False

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_kind(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("kind") == "kqv":
            return {"heads": 1, "values": "per_layer", **given}
        for key in ("heads", "values"):
            if given.get(key) is not None:
                problem = "attention.kind=dot does not use it"
                raise UserError(f"attention.{key}", given[key], problem, "Take attention=kqv1 or kqv4.")
        return given
