"""The judge: an engine's observation against the truth. The only place where findings are made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from repro.case import Case
from repro.engines.protocol import Observation, RankObservation
from repro.errors import NotVerifiedError
from repro.findings import Finding, make_finding
from repro.hypotheses import explain_counts
from repro.routers import ROUTER_NAMES, WEIGHT_DTYPES
from repro.truth import RowTruth, ShardTruth, Truth, another_choice

MOST_ROWS_QUOTED = 3


@dataclass(frozen=True)
class RankOutcome:
    """One rank's rows gone wrong: numbers of the DP rank's padded batch."""

    dp_rank: int
    attn_tp_rank: int
    num_token_non_padded: int | None
    lost: tuple[int, ...]
    leaked: tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """Findings about one engine in one case.

    ``expert_counts`` holds the routes that reach each logical expert over all ranks. ``not_checked`` says in
    words what could not be compared.
    """

    findings: tuple[Finding, ...]
    outcomes: tuple[RankOutcome, ...]
    expert_counts: tuple[int, ...]
    not_checked: tuple[str, ...]


def row_ranges(rows: Iterable[int]) -> str:
    """Row numbers as inclusive ranges: ``[0, 1, 2, 5]`` is ``"0-2,5"``."""
    ranges: list[list[int]] = []
    for row in sorted(rows):
        if ranges and row == ranges[-1][1] + 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def rows_of(ranges: str | None) -> set[int]:
    """The inverse of ``row_ranges``; None is no row."""
    rows: set[int] = set()
    for part in (ranges or "").split(","):
        if part:
            first, _, last = part.partition("-")
            rows.update(range(int(first), int(last or first) + 1))
    return rows


def judge(case: Case, truth: Truth, observation: Observation, engine: str) -> Judgement:
    """Compare what the engine did with the truth; ``engine`` is what findings call it.

    Raises:
        NotVerifiedError: an observation of the wrong shape, dtype or ranks, of which nothing can be said.
    """
    shards = {(shard.dp_rank, shard.attn_tp_rank): shard for shard in truth.shards}
    seen = {(rank.dp_rank, rank.attn_tp_rank): rank for rank in observation.ranks}
    if seen.keys() != shards.keys() or len(seen) != len(observation.ranks):
        raise NotVerifiedError(f"engine {engine}: did not answer once for every rank of the plan")
    judges = [_ShardJudge(case, truth, shards[key], seen[key], engine) for key in shards]
    findings = [finding for shard_judge in judges for finding in shard_judge.findings()]
    findings += _judge_counts(case, truth, seen, engine)
    findings += _judge_unowned(case, truth, engine)
    findings.sort(key=lambda f: (f.code, f.dp_rank or 0, f.attn_tp_rank or 0))
    counts = sum((shard_judge.routes() for shard_judge in judges), Counter[int]())
    return Judgement(
        tuple(findings),
        tuple(shard_judge.outcome() for shard_judge in judges),
        tuple(counts[expert] for expert in range(case.scenario.experts)),
        tuple(_not_checked(case, truth, sum(shard_judge.ambiguous for shard_judge in judges))),
    )


def _not_checked(case: Case, truth: Truth, ambiguous: int) -> Iterator[str]:
    scenario = case.scenario
    if scenario.eplb != "none" and truth.out_of_range:
        yield (
            f"what the remap makes of ids outside 0..{scenario.experts - 1}: "
            f"rows with one went in as experts 0..{scenario.top_k - 1}"
        )
    if ambiguous:
        yield f"the routing of {ambiguous} real rows, which rounding decides"
    if scenario.redundant_experts:
        yield "which replica of an expert a row goes to"
    if scenario.platform == "hip" and (scenario.eplb != "none" or scenario.num_fused_shared_experts):
        yield "which ids in range masked rows hold (hip, with a remap or shared experts)"


class _ShardJudge:
    """One shard. Rows are numbered from the shard's first, until they are told of."""

    def __init__(
        self, case: Case, truth: Truth, shard: ShardTruth, seen: RankObservation, engine: str
    ) -> None:
        self._case, self._shard, self._seen, self._engine = case, shard, seen, engine
        self._routing = truth.routing[shard.dp_rank]
        self._hip = case.scenario.platform == "hip"
        self._num_physical = len(case.layer.physical_to_logical)
        self._num_ids = self._num_physical + case.scenario.num_fused_shared_experts
        self._check_form()
        ids, weights = seen.topk_ids, seen.topk_weights
        real = torch.tensor(shard.real, dtype=torch.bool)
        if self._hip:
            # A masked row may hold any id that is in range: its zero weights are what takes it out.
            masked_columns = weights == 0
            plain = case.scenario.eplb == "none" and not case.scenario.num_fused_shared_experts
            stays_in = ~(masked_columns & (ids == 0) if plain else masked_columns)
            # A true weight may be zero as well.
            lost = masked_columns.all(dim=1) & self._rows_where(lambda row: any(row.weights))
        else:
            # A router of one's own may give -1 itself; that is no mask.
            masked_columns = (ids == -1) & ~self._rows_where(lambda row: -1 in row.ids).unsqueeze(1)
            stays_in = ~masked_columns
            lost = masked_columns.any(dim=1)
        self._out_of_range = self._rows_where(lambda row: row.out_of_range)
        self._masked_columns = masked_columns
        self._leaked = _numbers(~real & stays_in.any(dim=1))
        self._lost = _numbers(real & lost)
        self.ambiguous = 0
        self._rerouted = self._find_rerouted()

    def _check_form(self) -> None:
        ids, weights = self._seen.topk_ids, self._seen.topk_weights
        columns = self._case.scenario.top_k + self._case.scenario.num_fused_shared_experts
        shape = (len(self._shard.rows), columns)
        problem = None
        if tuple(ids.shape) != shape or tuple(weights.shape) != shape:
            problem = f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)}, not {shape}"
        elif ids.dtype not in (torch.int32, torch.int64):
            problem = f"ids of {ids.dtype}, not int32 or int64"
        elif weights.dtype not in WEIGHT_DTYPES:
            problem = f"weights of {weights.dtype}, not {', '.join(map(str, WEIGHT_DTYPES))}"
        if problem:
            raise NotVerifiedError(
                f"engine {self._engine}: DP rank {self._shard.dp_rank}, attention-TP rank "
                f"{self._shard.attn_tp_rank} gave {problem}"
            )

    def _rows_where(self, holds: Callable[[RowTruth], bool]) -> torch.Tensor:
        """[R] bool: real rows of which the truth says so."""
        rows = zip(self._shard.rows, self._shard.real, strict=True)
        return torch.tensor([real and holds(self._routing[row]) for row, real in rows], dtype=torch.bool)

    def _find_rerouted(self) -> list[int]:
        lost = set(self._lost)
        real = [i for i, is_real in enumerate(self._shard.real) if is_real and i not in lost]
        near = _near(self._promised_dtype())
        rerouted = []
        ids, weights = self._seen.topk_ids[real].tolist(), self._seen.topk_weights[real].double().tolist()
        for i, row_ids, row_weights in zip(real, ids, weights, strict=True):
            row = self._routing[self._shard.rows[i]]
            logical = [self._logical(physical) for physical in row_ids]
            if row.out_of_range:
                continue
            if row.ambiguous:
                self.ambiguous += 1
                continue
            if row.tied:
                routed = [expert for expert in logical if expert < self._case.scenario.experts]
                row = another_choice(row, routed, self._case.scenario) or row
            if not _same_routing(row, logical, row_weights, near):
                rerouted.append(i)
        return rerouted

    def _promised_dtype(self) -> torch.dtype:
        """Of the weights: what the scenario says, or for a router of one's own what was seen."""
        scenario = self._case.scenario
        if scenario.branch != "custom":
            return torch.float32
        if scenario.router not in ROUTER_NAMES:
            return self._seen.topk_weights.dtype
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            scenario.weight_dtype
        ]

    def _logical(self, physical: int) -> int:
        """The logical expert of a physical id; shared experts follow the logical ones; others stay as they are."""
        if 0 <= physical < self._num_physical:
            return self._case.layer.physical_to_logical[physical]
        if self._num_physical <= physical < self._num_ids:
            return self._case.scenario.experts + physical - self._num_physical
        return physical

    def outcome(self) -> RankOutcome:
        return RankOutcome(
            self._shard.dp_rank,
            self._shard.attn_tp_rank,
            self._seen.num_token_non_padded,
            self._rows(self._lost),
            self._rows(self._leaked),
        )

    def routes(self) -> Counter[int]:
        """Routes that carry weight to each logical expert; a replicated forward is counted on one rank only."""
        if not self._case.plan.sharded and self._shard.attn_tp_rank:
            return Counter()
        used = self._seen.topk_ids[~self._masked_columns].tolist()
        return Counter(map(self._logical, used))

    def findings(self) -> list[Finding]:
        """Everything about this shard alone; counts are explained for the whole DP rank elsewhere."""
        found = []
        platform = "zero weights" if self._hip else "id -1"
        if self._seen.error is not None:
            text = f"raised when given num_token_non_padded: {self._seen.error}"
            found.append(self._finding("PAD004", text, seen=self._seen.error))
        if self._leaked:
            text = f"{_plural(self._leaked, 'pad row keeps', 'pad rows keep')} experts"
            found.append(
                self._finding("PAD001", text, self._leaked, expected=platform, seen=self._quote(self._leaked))
            )
        if self._lost:
            text = f"{_plural(self._lost, 'real row loses', 'real rows lose')} experts"
            found.append(
                self._finding("PAD002", text, self._lost, expected="routed", seen=self._quote(self._lost))
            )
        found += self._contract_findings()
        if self._rerouted:
            found.append(self._rerouted_finding())
        return found + self._count_findings()

    def _contract_findings(self) -> Iterator[Finding]:
        ids, weights = self._seen.topk_ids, self._seen.topk_weights
        # Masked rows may hold anything; only rows that reach dispatch are held to it. A CUDA row may be masked
        # in part.
        reach = torch.tensor(self._shard.real, dtype=torch.bool)
        reach[self._leaked] = True
        if self._hip:
            reach[self._lost] = False
        sentinel = torch.zeros_like(ids, dtype=torch.bool) if self._hip else self._masked_columns
        outside = ((ids < 0) | (ids >= self._num_ids)) & ~sentinel
        # HIP kernels index with the ids of masked rows too.
        yield from self._range_findings(_numbers((reach | self._hip) & outside.any(dim=1)))
        # What an engine made of an id that no expert has says nothing more.
        duplicate = _duplicates(ids, sentinel | outside) & ~self._out_of_range.unsqueeze(1)
        for code, columns, text in (
            ("PAD009", duplicate, "an expert twice"),
            ("PAD010", ~weights.isfinite() & ~sentinel, "weights that are not finite"),
        ):
            rows = _numbers(reach & columns.any(dim=1))
            if rows:
                message = f"{_plural(rows, 'row holds', 'rows hold')} {text}"
                yield self._finding(code, message, rows, seen=self._quote(rows))

    def _range_findings(self, outside: Sequence[int]) -> Iterator[Finding]:
        """PAD008: ``outside`` are rows with such ids as seen; those that the router gave itself come beside."""
        by_router = _numbers(self._out_of_range)
        rows = [row for row in outside if row not in by_router]
        texts = []
        if by_router:
            texts.append(
                f"the router itself gives {_plural(by_router, 'real row', 'real rows')} "
                f"ids outside 0..{self._case.scenario.experts - 1}"
            )
        if rows:
            texts.append(f"{_plural(rows, 'row holds', 'rows hold')} ids outside 0..{self._num_ids - 1}")
        if texts:
            seen = [self._truth_of(row) for row in by_router[:MOST_ROWS_QUOTED]] or self._quote(rows)
            yield self._finding("PAD008", "; ".join(texts), sorted(by_router + rows), seen=seen)

    def _rerouted_finding(self) -> Finding:
        text = f"{_plural(self._rerouted, 'real row has', 'real rows have')} other experts or weights than "
        if self._case.routes_alone is None:
            text += "the row's own logits give"
        else:
            text += "the router gives that row alone: it looks at other rows (PAD011), or the engine is wrong"
        expected = [self._truth_of(i) for i in self._rerouted[:MOST_ROWS_QUOTED]]
        seen = [{**row, "ids": [self._logical(i) for i in row["ids"]]} for row in self._quote(self._rerouted)]
        return self._finding("PAD019", text, self._rerouted, expected=expected, seen=seen)

    def _count_findings(self) -> list[Finding]:
        found = []
        count, rows = self._seen.num_token_non_padded, len(self._shard.rows)
        if count is not None and not 0 <= count <= rows:
            text = f"count {count} where the shard has {rows} rows"
            found.append(self._finding("PAD017", text, expected=f"0 to {rows}", seen=count))
        if self._case.plan.ranks[self._shard.dp_rank].num_tokens == 0 and (count or self._leaked):
            read = "no count" if count is None else f"count {count}"
            text = f"an idle DP rank has {read}, {len(self._leaked)} rows routed"
            found.append(self._finding("PAD018", text, self._leaked, expected=0, seen=count))
        return found

    def _rows(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._shard.rows[i] for i in numbers)

    def _quote(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The first rows as evidence, with physical ids."""
        return [
            _row_as_json(
                self._shard.rows[i], self._seen.topk_ids[i].tolist(), self._seen.topk_weights[i].tolist()
            )
            for i in numbers[:MOST_ROWS_QUOTED]
        ]

    def _truth_of(self, number: int) -> dict[str, Any]:
        """What a real row should have, with logical ids."""
        row = self._shard.rows[number]
        truth = self._routing[row]
        return _row_as_json(row, truth.ids, truth.weights)

    def _finding(
        self,
        code: str,
        message: str,
        numbers: Sequence[int] = (),
        *,
        expected: object = None,
        seen: object = None,
    ) -> Finding:
        return make_finding(
            code,
            engine=self._engine,
            fault=self._case.fault,
            dp_rank=self._shard.dp_rank,
            attn_tp_rank=self._shard.attn_tp_rank,
            rows=row_ranges(self._rows(numbers)) if numbers else None,
            expected=expected,
            seen=seen,
            message=message,
        )


def _row_as_json(row: int, ids: Sequence[int], weights: Sequence[float]) -> dict[str, Any]:
    """Weights are text where JSON has no number for them."""
    return {"row": row, "ids": list(ids), "weights": [w if math.isfinite(w) else str(w) for w in weights]}


def _plural(rows: Sequence[int], one: str, many: str) -> str:
    return f"{len(rows)} {one if len(rows) == 1 else many}"


def _numbers(flags: torch.Tensor) -> list[int]:
    return flags.nonzero().flatten().tolist()


def _duplicates(ids: torch.Tensor, no_expert: torch.Tensor) -> torch.Tensor:
    """[R, K] bool, columns in the order of their ids: the id is an expert's and stands in the row already."""
    order = ids.sort(dim=1)
    again = torch.zeros_like(no_expert)
    again[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    return again & ~no_expert.gather(1, order.indices)


def _near(dtype: torch.dtype) -> tuple[float, float]:
    """How far a weight of this dtype may be from the truth, relative and absolute: two roundings."""
    limits = torch.finfo(dtype)
    return max(2 * limits.eps, 1e-5), 2 * limits.smallest_normal * limits.eps


def _same_routing(
    row: RowTruth, ids: Sequence[int], weights: Sequence[float], near: tuple[float, float]
) -> bool:
    """Whether the columns hold the row's experts, each with its weight, in any order."""
    expected = sorted(zip(row.ids, row.weights, strict=True))
    seen = sorted(zip(ids, weights, strict=True))
    return [expert for expert, _ in expected] == [expert for expert, _ in seen] and all(
        math.isclose(want, got, rel_tol=near[0], abs_tol=near[1]) or (want != want and got != got)
        for (_, want), (_, got) in zip(expected, seen, strict=True)
    )


def _judge_counts(
    case: Case, truth: Truth, seen: dict[tuple[int, int], RankObservation], engine: str
) -> list[Finding]:
    """PAD003: a finding for each rank with a wrong count, all of a DP rank explained together."""
    found = []
    for rank in case.plan.ranks:
        shards = [shard for shard in truth.shards if shard.dp_rank == rank.dp_rank]
        expected = [shard.num_token_non_padded for shard in shards]
        counts = [seen[shard.dp_rank, shard.attn_tp_rank].num_token_non_padded for shard in shards]
        read = [(want, got) for want, got in zip(expected, counts, strict=True) if got is not None]
        if all(want == got for want, got in read):
            continue
        why = explain_counts(case.scenario, case.plan, rank, counts)
        for shard, want, got in zip(shards, expected, counts, strict=True):
            if got is not None and want != got:
                found.append(
                    make_finding(
                        "PAD003",
                        engine=engine,
                        fault=case.fault,
                        dp_rank=rank.dp_rank,
                        attn_tp_rank=shard.attn_tp_rank,
                        expected=expected,
                        seen=counts,
                        message=f"count {got}, real rows {want}: {why}",
                    )
                )
    return found


def _judge_unowned(case: Case, truth: Truth, engine: str) -> list[Finding]:
    """PAD005: rows of the bucket that no shard owns; an error where one of them is real."""
    found = []
    for rank, rows in zip(case.plan.ranks, truth.unowned, strict=True):
        if rows:
            lost = sum(row < rank.num_tokens for row in rows)
            found.append(
                make_finding(
                    "PAD005",
                    engine=engine,
                    fault=case.fault,
                    dp_rank=rank.dp_rank,
                    rows=row_ranges(rows),
                    expected=0,
                    seen=len(rows),
                    severity="error" if lost else "warning",
                    message=f"{rank.padded_num_tokens} rows over {case.plan.attn_tp_size} attention-TP ranks "
                    f"leave {len(rows)} rows to no rank, {lost} of them real",
                )
            )
    return found
