"""Findings, and the catalogue of their codes. Every claim that the program prints is a Finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One claim with its evidence.

    ``rows`` are row numbers of the DP rank's padded batch, as ranges (``"5-15,20"``), or None where the
    finding is not about rows. ``expected`` and ``seen`` are JSON values; what they hold depends on the code.
    ``case`` names the case of a suite.
    """

    code: str
    name: str
    severity: Severity
    engine: str
    fault: str
    dp_rank: int | None
    attn_tp_rank: int | None
    rows: str | None
    expected: Any
    seen: Any
    message: str
    case: str | None = None


@dataclass(frozen=True)
class FindingKind:
    """One code of the catalogue.

    ``evidence`` says what ``rows``, ``expected`` and ``seen`` of such a finding hold. ``checked_by`` names
    the commands that look for it; it is empty where this version looks for it nowhere.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    evidence: str
    checked_by: tuple[str, ...]

    @property
    def page(self) -> str:
        """The Markdown page of this code, read from the package's data at each access."""
        from importlib.resources import files

        return files("repro").joinpath("catalogue", f"{self.code}.md").read_text(encoding="utf-8")


_RUNS = ("repro", "check", "compare")

# Codes are never reused; new ones go to the end.
_KINDS = (
    FindingKind(
        "PAD001",
        "pad-row-routed",
        "error",
        "A pad row still has experts when its ids leave the routing step.",
        "rows: the leaked pad rows; expected: the sentinel of a masked row, in words; "
        "seen: ids and weights of the first leaked rows.",
        _RUNS,
    ),
    FindingKind(
        "PAD002",
        "real-row-masked",
        "error",
        "A row that holds a token was masked as if it were padding.",
        "rows: the lost real rows; expected: that they are routed; "
        "seen: ids and weights of the first lost rows.",
        _RUNS,
    ),
    FindingKind(
        "PAD003",
        "local-count-wrong",
        "error",
        "The count of real rows that the graph read is not the one of this rank's shard.",
        "rows: none; expected and seen: the counts of all attention-TP ranks of the DP rank, "
        "as [16, 4, 0, 0] and [5, 5, 5, 5].",
        _RUNS,
    ),
    FindingKind(
        "PAD004",
        "mask-rejected",
        "error",
        "A routing branch raised when it was given the count of real rows.",
        "rows: none; expected: none; seen: the exception's type and message.",
        _RUNS,
    ),
    FindingKind(
        "PAD005",
        "bucket-not-divisible",
        "error",
        "The attention-TP size does not divide the bucket, so its last rows belong to no shard.",
        "rows: the rows without an owner; expected: 0 of them; seen: how many there are.",
        (*_RUNS, "shard-bounds"),
    ),
    FindingKind(
        "PAD006",
        "expert-buffer-overflow",
        "error",
        "More rows are sent to an expert or from a rank than its buffer holds.",
        "rows: none; expected: the buffer's capacity in rows; seen: the rows that arrive.",
        (),
    ),
    FindingKind(
        "PAD007",
        "expert-load-skewed-by-pads",
        "warning",
        "Pads change how the load is spread over the experts.",
        "rows: none; expected: the rows of each expert without pads; seen: those with pads.",
        (),
    ),
    FindingKind(
        "PAD008",
        "expert-id-out-of-range",
        "error",
        "An expert id is neither an expert nor the sentinel of a masked row.",
        "rows: the rows with such an id; expected: none; seen: ids and weights of the first such rows.",
        _RUNS,
    ),
    FindingKind(
        "PAD009",
        "duplicate-expert-id",
        "error",
        "A row that is not masked has the same expert more than once.",
        "rows: the rows with a repetition; expected: none; seen: ids and weights of the first such rows.",
        _RUNS,
    ),
    FindingKind(
        "PAD010",
        "non-finite-weight",
        "error",
        "A weight of a routed row is NaN or infinite.",
        "rows: the rows with such a weight; expected: none; "
        "seen: ids and weights of the first such rows, NaN and infinity as text.",
        _RUNS,
    ),
    FindingKind(
        "PAD011",
        "router-not-row-wise",
        "error",
        "What pad rows hold changes the routing of real rows.",
        "rows: the real rows that change; expected: ids and weights with one filling of the pads; "
        "seen: those with another.",
        (),
    ),
    FindingKind(
        "PAD012",
        "pad-value-leak",
        "error",
        "What pad rows hold changes the output of real rows whose routing is the same.",
        "rows: the real rows that change; expected: the largest difference allowed; seen: the largest found.",
        (),
    ),
    FindingKind(
        "PAD013",
        "observer-counts-pads",
        "warning",
        "A recorder, a load balancer's statistics or a capture of routed experts includes pads.",
        "rows: none; expected: the recorded rows that are real; seen: the rows that were recorded.",
        (),
    ),
    FindingKind(
        "PAD014",
        "expert-id-dtype",
        "error",
        "The expert ids have another integer type than their producer writes or their consumer reads.",
        "rows: none; expected: the type that is written or read; seen: the type of the ids.",
        (),
    ),
    FindingKind(
        "PAD015",
        "host-value-in-capture",
        "error",
        "A number read on the host during capture became a constant of the graph.",
        "rows: none; expected: this batch's value; seen: the value from capture.",
        (),
    ),
    FindingKind(
        "PAD016",
        "stale-count-in-replay",
        "error",
        "A replay read the count that an earlier batch left in the buffer.",
        "rows: none; expected: this batch's count; seen: the earlier batch's count.",
        (),
    ),
    FindingKind(
        "PAD017",
        "count-exceeds-rows",
        "error",
        "The count of real rows is larger than the rows it is meant for.",
        "rows: none; expected: the counts that the rows of the shard allow; seen: the count.",
        _RUNS,
    ),
    FindingKind(
        "PAD018",
        "idle-rank-counted",
        "error",
        "A DP rank without tokens has a count above zero or rows that were routed.",
        "rows: the routed rows, if any; expected: 0; seen: the count that was read, if one was.",
        _RUNS,
    ),
    FindingKind(
        "PAD019",
        "real-row-rerouted",
        "error",
        "A real row that was not masked has other experts or weights than its own logits give.",
        "rows: the rerouted real rows; expected: the logical ids and weights that the first of them "
        "should have; seen: those they have.",
        _RUNS,
    ),
)

CATALOGUE: dict[str, FindingKind] = {kind.code: kind for kind in _KINDS}


def make_finding(
    code: str,
    *,
    engine: str,
    fault: str,
    message: str,
    dp_rank: int | None = None,
    attn_tp_rank: int | None = None,
    rows: str | None = None,
    expected: Any = None,
    seen: Any = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding with the name of its code, and the catalogue's severity unless another is given.

    Raises:
        ValueError: the catalogue has no such code.
    """
    kind = CATALOGUE.get(code)
    if kind is None:
        raise ValueError(f"{code!r} is not a finding code; known are PAD001 to {_KINDS[-1].code}")
    return Finding(
        code=code,
        name=kind.name,
        severity=kind.severity if severity is None else severity,
        engine=engine,
        fault=fault,
        dp_rank=dp_rank,
        attn_tp_rank=attn_tp_rank,
        rows=rows,
        expected=expected,
        seen=seen,
        message=message,
    )
