"""Many cases on one engine or two: what each came to, and what all of them say together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from repro.case import Case, make_case, not_tried, route_alone, with_ids_in_range
from repro.engines import Engine, Observation, stop_engine
from repro.errors import NotVerifiedError
from repro.findings import Finding
from repro.judge import Judgement, judge
from repro.report import Status, Verdict
from repro.routers import RouterError
from repro.suite import SuiteCase
from repro.truth import Truth, find_truth

SAFE, NOT_VERIFIED = "safe", "not verified"
MOST_CASES_NAMED = 3


@dataclass(frozen=True)
class CaseResult:
    """One case on one engine. Either ``judgement`` is there, or ``reason`` says why it is not."""

    case: SuiteCase
    engine: str
    judgement: Judgement | None
    reason: str = ""
    not_tried: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        if self.judgement is None:
            return ()
        return tuple(replace(finding, case=self.case.name) for finding in self.judgement.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(finding.code for finding in self.findings))

    @property
    def verdict(self) -> str:
        """``safe``, ``not verified``, or the finding codes."""
        if self.judgement is None:
            return NOT_VERIFIED
        return " ".join(self.codes) or SAFE


def check_cases(
    cases: Sequence[SuiteCase], engines: Sequence[Engine], *, device: str = "cpu"
) -> list[tuple[CaseResult, ...]]:
    """Each case on each engine: the engines side by side, each in a thread of its own.

    The result has a row a case, in their order, and in it a result an engine.
    """
    # An engine may have to load its code anew for another platform.
    names = [engine.name for engine in engines]
    if len(names) > len(set(names)):
        names = [f"{name} ({side})" for name, side in zip(names, ("before", "after"), strict=True)]
    order = sorted(range(len(cases)), key=lambda number: cases[number].scenario.platform)
    pools = [ThreadPoolExecutor(1, thread_name_prefix="moepad-engine") for _ in engines]
    rows: dict[int, tuple[CaseResult, ...]] = {}
    # The tensors are small: more threads would only take the processors from the engines.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        asked: list[tuple[int, Case, Truth, list[Future[Observation]]]] = []
        for number in order:
            case = make_case(cases[number].scenario, cases[number].fault, device)
            truth = find_truth(case.scenario, case.plan, case.batches, case.layer, route_alone(case))
            # A remap looks ids up: with one that no expert has, an engine may give no answer at all.
            remaps = case.scenario.eplb != "none"
            given = with_ids_in_range(case) if remaps and truth.out_of_range else case
            futures = [
                pool.submit(engine.observe, given) for pool, engine in zip(pools, engines, strict=True)
            ]
            asked.append((number, case, truth, futures))
        for number, case, truth, futures in asked:
            rows[number] = tuple(
                _result(cases[number], name, engine.name, case, truth, future)
                for name, engine, future in zip(names, engines, futures, strict=True)
            )
    except BaseException:
        # A thread that waits for a worker ends with it.
        for engine in engines:
            stop_engine(engine)
        raise
    finally:
        torch.set_num_threads(threads)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
    return [rows[number] for number in range(len(cases))]


def _result(
    suite_case: SuiteCase, label: str, engine: str, case: Case, truth: Truth, future: Future[Observation]
) -> CaseResult:
    try:
        judgement = judge(case, truth, future.result(), label)
    except NotVerifiedError as err:
        reason = str(err).removeprefix(f"{engine}: ").removeprefix("cannot verify: ")
        return CaseResult(suite_case, label, None, reason)
    except RouterError as err:
        return CaseResult(suite_case, label, None, err.problem)
    ranks = future.result().ranks
    if case.fault == "count" and any(rank.num_token_non_padded is None for rank in ranks):
        refused = next((rank.error for rank in ranks if rank.error), None)
        verified = judgement if judgement.findings else None
        return CaseResult(suite_case, label, verified, refused or "gave no count")
    return CaseResult(suite_case, label, judgement, not_tried=tuple(not_tried(case)))


def unverifiable(rows: Sequence[tuple[CaseResult, ...]]) -> str:
    """The one reason for which no case could be verified on any engine; empty where that is not so."""
    columns = [{(result.engine, result.reason) for result in column} for column in zip(*rows, strict=True)]
    verified = any(result.judgement is not None for row in rows for result in row)
    if verified or any(len(reasons) > 1 for reasons in columns):
        return ""
    lines = [f"{engine}: cannot verify: {reason}" for reasons in columns for engine, reason in reasons]
    return "; ".join(dict.fromkeys(lines))


@dataclass(frozen=True)
class SuiteChange:
    """A finding that the after side lost, gained or kept; ``unknown`` where the before side was not verified."""

    change: str
    finding: Finding


def suite_changes(rows: Sequence[tuple[CaseResult, ...]]) -> tuple[SuiteChange, ...]:
    """Findings of two engines, matched by case, code and rank; fixed ones first."""
    changes = []
    for before, after in rows:
        old, new = ({_place(f): f for f in result.findings} for result in (before, after))
        if after.judgement is not None:
            changes += [SuiteChange("fixed", f) for place, f in old.items() if place not in new]
        for place, finding in new.items():
            kind = "remaining" if place in old else "introduced"
            changes.append(SuiteChange("unknown" if before.judgement is None else kind, finding))
    order = ("fixed", "introduced", "remaining", "unknown")
    return tuple(sorted(changes, key=lambda change: order.index(change.change)))


def _place(finding: Finding) -> tuple[str, int | None, int | None]:
    return finding.code, finding.dp_rank, finding.attn_tp_rank


def check_verdict(results: Sequence[CaseResult]) -> Verdict:
    """1 where any case has a finding; else 3 where any could not be verified; else 0."""
    found = [result for result in results if result.findings]
    unverified = [result for result in results if result.judgement is None]
    number, engine = len(results), results[0].engine
    status: Status = "ok"
    summary, exit_code = f"{engine}: safe in {_of(number, number)}", 0
    if found:
        status, exit_code = "findings", 1
        summary = f"{engine}: findings in {_of(len(found), number)}"
    elif unverified:
        status, exit_code = "not-verified", 3
        summary = f"{engine}: not verified in {_of(len(unverified), number)}"
    return Verdict(status, exit_code, summary, tuple(_counts(results)), tuple(_not_checked(results)))


def suite_compare_verdict(rows: Sequence[tuple[CaseResult, ...]]) -> Verdict:
    """1 where the after side has a finding; else 3 where a case of either could not be verified; else 0."""
    before, after = ([row[side] for row in rows] for side in (0, 1))
    verdict = check_verdict(after)
    if not verdict.exit_code and any(result.judgement is None for result in before):
        old = check_verdict([result for result in before if result.judgement is None])
        verdict = replace(verdict, status=old.status, exit_code=old.exit_code, summary=old.summary)
    changes = [change.change for change in suite_changes(rows)]
    kinds = [
        kind
        for kind in ("fixed", "introduced", "remaining", "unknown")
        if kind != "unknown" or kind in changes
    ]
    lines = [
        *(f"before, {line}" for line in _counts(before)),
        *(f"after, {line}" for line in _counts(after)),
        "findings: " + ", ".join(f"{changes.count(kind)} {kind}" for kind in kinds),
    ]
    not_checked = dict.fromkeys([*_not_checked(before), *_not_checked(after)])
    return replace(verdict, lines=tuple(lines), not_checked=tuple(not_checked))


def _of(some: int, number: int) -> str:
    return f"{'all ' if some == number else f'{some} of '}{number} cases"


def _counts(results: Sequence[CaseResult]) -> list[str]:
    safe = sum(result.verdict == SAFE for result in results)
    found = sum(bool(result.findings) for result in results)
    codes = dict.fromkeys(sorted(code for result in results for code in result.codes))
    codes_of = f" ({', '.join(codes)})" if codes else ""
    unverified = sum(result.judgement is None for result in results)
    return [f"{results[0].engine}: {safe} safe, {found} with findings{codes_of}, {unverified} not verified"]


def _not_checked(results: Sequence[CaseResult]) -> list[str]:
    """Like reasons on one line, with the cases that they hold for."""
    cases: dict[str, list[str]] = {}
    for result in results:
        if result.judgement is None:
            cases.setdefault(result.reason, []).append(result.case.name)
    engine = results[0].engine
    lines = [f"{engine}: {reason}: {_some(names)}" for reason, names in cases.items()]
    others = [text for result in results if result.judgement for text in result.judgement.not_checked]
    tried = [text for result in results for text in result.not_tried]
    return [*lines, *(f"{text} ({engine})" for text in dict.fromkeys(others)), *dict.fromkeys(tried)]


def _some(names: Sequence[str]) -> str:
    """Names of cases, the first of them where they are many."""
    shown = "; ".join(names[:MOST_CASES_NAMED])
    more = len(names) - MOST_CASES_NAMED
    return f"{shown}; and {more} more cases" if more > 0 else shown
