"""``moepad shard-bounds``: which rows each rank owns, and how many of them are real. Loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from moepad_cli import parse
from moepad_cli.commands._shard_strips import draw_strips
from moepad_cli.environment import environment
from moepad_cli.errors import FINDINGS, OK, UsageError, option_name
from moepad_cli.options import add_parameters, option, with_output
from repro.errors import PlanError
from repro.findings import Finding, make_finding
from repro.plan import DpRankPlan, PaddingPlan, Shard, plan_padding
from repro.report import Report, Row, Verdict, View

MAX_RANKS = 65_536
MAX_NOTES = 8
MAX_RUNS = 12
DP_PADDINGS = ("max-len", "sum-len")

_BATCH, _SERVER = "Batch", "Server"
_PARAMETERS = (
    option("tokens", help="Real tokens of each DP rank; 0 is an idle rank.", metavar="N,...", panel=_BATCH),
    option("bucket", help="Captured size of the graph.", metavar="N", panel=_BATCH),
    option("buckets", help="Captured sizes; the smallest that fits is taken.", metavar="N,...", panel=_BATCH),
    option(
        "raw_length",
        help="Padded length before the bucket (default: worked out from the tokens).",
        metavar="N",
        panel=_BATCH,
    ),
    option("attn_tp", help="Attention-TP size.", metavar="N", panel=_SERVER),
    option("replicated", help="Not sharded: all rows on every rank.", panel=_SERVER, default=False),
    option(
        "uneven", help="Cut shards as tensor_split does, not by floor division.", panel=_SERVER, default=False
    ),
    option(
        "align",
        help="Extra multiple that lengths are aligned to, e.g. the prefill-CP size (default: 1).",
        metavar="N",
        panel=_SERVER,
    ),
    option(
        "dp_padding",
        help="DP ranks padded to the longest (the default), or each to its own length.",
        choices=DP_PADDINGS,
        panel=_SERVER,
    ),
    option(
        "max_padding_factor",
        help="Run eagerly where the bucket is more than this many times the length.",
        metavar="X",
        panel=_SERVER,
    ),
)


def register(app: typer.Typer) -> None:
    add_parameters(shard_bounds, _PARAMETERS)
    app.command("shard-bounds")(with_output(main_table="shard_bounds", drawing=draw_strips)(shard_bounds))


def shard_bounds(**given: Any) -> Report:
    """Show the rows that each rank owns, and its count before and after the fix."""
    arguments = _arguments(given)
    try:
        plan = plan_padding(**arguments)
    except PlanError as err:
        if err.field == "bucket" and given["buckets"] is not None:
            raise UsageError(f"--buckets: {err.problem}") from err
        raise
    findings = tuple(_unowned(plan, rank) for rank in plan.ranks if rank.unowned_rows)
    sharded = arguments.pop("sharded")
    attn_tp = arguments.pop("attn_tp_size")
    return Report(
        command="shard-bounds",
        scenario={**arguments, "attn_tp": attn_tp, "replicated": not sharded},
        environment=environment(),
        findings=findings,
        tables={"shard_bounds": [_row(shard) for shard in plan.shards]},
        main_table="shard_bounds",
        verdict=_verdict(plan, findings),
        views=(_rank_view(plan), _sum_view(plan)),
        heading=(_heading(plan),),
        blamed=findings,
    )


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``plan_padding`` out of the options' texts."""
    tokens = parse.whole_numbers(_needed(given, "tokens", "20"), "--tokens", example="20")
    attn_tp = parse.whole_number(_needed(given, "attn_tp", "4"), "--attn-tp", least=1, example=4)
    if len(tokens) * attn_tp > MAX_RANKS:
        raise UsageError(
            f"--attn-tp: {len(tokens)} DP ranks of {attn_tp} attention-TP ranks are more than {MAX_RANKS}; "
            "give fewer"
        )
    if given["replicated"] and given["uneven"]:
        raise UsageError("--uneven: a --replicated forward is not cut into shards; give one of the two")
    arguments: dict[str, Any] = {
        "tokens": tokens,
        "attn_tp_size": attn_tp,
        "buckets": _buckets(given),
        "raw_length": None,
        "align": 1,
        "dp_padding": "max-len",
        "max_padding_factor": None,
        "sharded": not given["replicated"],
        "uneven": given["uneven"],
    }
    readers: dict[str, Callable[[str, str], Any]] = {
        "raw_length": lambda text, flag: parse.whole_number(text, flag, least=1, example=24),
        "align": lambda text, flag: parse.whole_number(text, flag, least=1, example=8),
        "dp_padding": lambda text, flag: parse.choice(text, flag, DP_PADDINGS),
        "max_padding_factor": lambda text, flag: parse.decimal(text, flag, least=1, example=2),
    }
    for name, read in readers.items():
        if given[name] is not None:
            arguments[name] = read(given[name], option_name(name))
    for name in ("align", "dp_padding"):
        if given["raw_length"] is not None and given[name] is not None:
            raise UsageError(
                f"{option_name(name)}: works out the length that --raw-length already says; give one of the two"
            )
    return arguments


def _needed(given: Mapping[str, Any], name: str, example: str) -> str:
    value: str | None = given[name]
    if value is None:
        flag = option_name(name)
        raise UsageError(f"{flag}: missing; give e.g. {flag} {example}")
    return value


def _buckets(given: Mapping[str, Any]) -> tuple[int, ...]:
    bucket, buckets = given["bucket"], given["buckets"]
    if bucket is not None and buckets is not None:
        raise UsageError("--bucket: cannot be given together with --buckets; give one of the two")
    if buckets is not None:
        return parse.whole_numbers(buckets, "--buckets", least=1)
    return (parse.whole_number(_needed(given, "bucket", "64"), "--bucket", least=1),)


def _row(shard: Shard) -> Row:
    return {
        "dp_rank": shard.dp_rank,
        "attn_tp_rank": shard.attn_tp_rank,
        "row_start": shard.row_start,
        "row_end": shard.row_end,
        "real_rows": shard.real_rows,
        "pad_rows": shard.pad_rows,
        "count_bucket": shard.count_bucket,
        "count_raw": shard.count_raw,
        "real_rows_masked": shard.real_rows_masked,
        "pads_routed": shard.pads_routed,
    }


def _unowned(plan: PaddingPlan, rank: DpRankPlan) -> Finding:
    rows = rank.unowned_rows
    real = len(range(rows.start, min(rank.num_tokens, rows.stop)))
    named = _rows_text(rows.start, rows.stop)
    return make_finding(
        "PAD005",
        engine="plan",
        fault="count",
        dp_rank=rank.dp_rank,
        rows=named,
        expected=0,
        seen=len(rows),
        severity="error" if real else "warning",
        message=f"{rank.padded_num_tokens} rows are not a multiple of attention TP {plan.attn_tp_size}: "
        f"no shard owns rows {named}, {real} real and {len(rows) - real} pad",
    )


def _verdict(plan: PaddingPlan, findings: Sequence[Finding]) -> Verdict:
    wrong = [rank for rank in plan.ranks if any(shard.count_raw != shard.real_rows for shard in rank.shards)]
    number = len(plan.ranks)
    reader = "an eager prefill" if all(rank.eager for rank in wrong) else "a prefill graph"
    before = (
        f"{reader} of a pre-fix engine reads wrong counts on {len(wrong)} of {number} DP ranks"
        if wrong
        else "pre-fix counts are right too, for this length and bucket"
    )
    if findings:
        summary = f"rows without an owner on {len(findings)} of {number} DP ranks"
        return Verdict("findings", FINDINGS, summary, (before,))
    owned = "every row has one owner" if plan.sharded else "every attention-TP rank holds all rows"
    return Verdict("ok", OK, owned, (before,))


def _heading(plan: PaddingPlan) -> str:
    total = sum(rank.num_tokens for rank in plan.ranks)
    return f"{total} real tokens, DP {len(plan.ranks)}, attention TP {plan.attn_tp_size}"


def _rank_view(plan: PaddingPlan) -> View:
    headings = (
        *("DP\nrank", "attn-TP\nrank", "rows\nowned", "real\nrows", "pad\nrows"),
        *("bucket\ncount", "raw\ncount", "lost", "leaked"),
    )
    rows = [
        (
            *(shard.dp_rank, shard.attn_tp_rank, _rows_text(shard.row_start, shard.row_end)),
            *(shard.real_rows, shard.pad_rows, shard.count_bucket, shard.count_raw),
            *(shard.real_rows_masked, shard.pads_routed),
        )
        for shard in plan.shards
    ]
    note = (
        "bucket count: cut from the bucket, as the fix does; raw count: from the raw length\n"
        "lost, leaked: real rows masked, pad rows routed, where a graph reads the raw count"
    )
    return View("Rows and counts of each rank", headings, rows, note)


def _sum_view(plan: PaddingPlan) -> View:
    headings = (
        *("DP\nrank", "real\ntokens", "raw\nlength", "padded\nrows", "eager", "bucket\ncounts"),
        *("raw\ncounts", "lost", "leaked", "no\nowner"),
    )
    rows = [
        (
            *(rank.dp_rank, rank.num_tokens, rank.raw_length, rank.padded_num_tokens, rank.eager),
            *(
                sum(getattr(shard, name) for shard in rank.shards)
                for name in ("count_bucket", "count_raw", "real_rows_masked", "pads_routed")
            ),
            len(rank.unowned_rows),
        )
        for rank in plan.ranks
    ]
    notes = [line for rank in plan.ranks[:MAX_NOTES] for line in _in_words(rank)]
    if len(plan.ranks) > MAX_NOTES:
        notes.append(f"and {len(plan.ranks) - MAX_NOTES} more DP ranks")
    return View("Sums of each DP rank", headings, rows, "\n".join(notes))


def _in_words(rank: DpRankPlan) -> list[str]:
    real = [shard.real_rows for shard in rank.shards]
    counts = {"pre-fix": [shard.count_raw for shard in rank.shards]}
    if (by_floor := [shard.count_bucket for shard in rank.shards]) != real:
        counts["floor"] = by_floor
    lines = [_count_in_words(name, count, real, rank) for name, count in counts.items()]
    if rank.eager:
        lines.append("runs eagerly on its raw length, so that both counts are cut from the same rows")
    return [f"DP{rank.dp_rank}: {line}" for line in lines]


def _count_in_words(name: str, counts: Sequence[int], real: Sequence[int], rank: DpRankPlan) -> str:
    if list(counts) == list(real):
        return f"{name} counts {_runs(counts)} are the real rows of every shard"
    masked = sum(max(right - count, 0) for count, right in zip(counts, real, strict=True))
    routed = sum(
        max(min(count, shard.rows) - shard.real_rows, 0)
        for count, shard in zip(counts, rank.shards, strict=True)
    )
    harm = f"{masked} real rows masked, {routed} pads routed"
    return f"{name} counts {_runs(counts)} where {_runs(real)} are real: {harm}"


def _runs(counts: Sequence[int]) -> str:
    """``5,5,5,5``, or ``352 x7,236`` where there are many."""
    if len(counts) <= MAX_RUNS:
        return ",".join(map(str, counts))
    runs = [(value, len(list(group))) for value, group in itertools.groupby(counts)]
    texts = [f"{value} x{times}" if times > 1 else str(value) for value, times in runs[:MAX_RUNS]]
    return ",".join(texts) + (",..." if len(runs) > MAX_RUNS else "")


def _rows_text(start: int, end: int) -> str:
    if end <= start:
        return "-"
    return str(start) if end == start + 1 else f"{start}-{end - 1}"
