"""Where in a list of versions the verdict changes, found by looking at few of them.

The verdict of a version has one text for each case, None where that case was not verified. A version has *changed*
if some case that was verified at the first version has another text there. None is never another text: a case that
is not verified says nothing for its version and nothing against it.

A version that has not changed counts as *alike* only while at least one of the cases by which the changed version
is told was verified there. Otherwise it could be on either side: it is stepped over, as is one that has no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from repro.errors import NotVerifiedError

CaseVerdicts = Sequence[str | None]
"""One text a case, in the same order for every version; None: not verified."""


@dataclass(frozen=True)
class BisectResult:
    """``asked`` and ``failed`` are in the order in which they were asked: verdicts, and why there is none.

    ``alike`` is the last version known to be like the first one, ``changed`` the first known not to be; both are
    None where no case verified at both ends differs.
    """

    versions: tuple[str, ...]
    asked: Mapping[str, CaseVerdicts]
    failed: Mapping[str, str]
    alike: str | None = None
    changed: str | None = None

    @property
    def suspects(self) -> tuple[str, ...]:
        """The versions of which one is the first that changed: ``changed`` alone where nothing hides it."""
        if self.alike is None or self.changed is None:
            return ()
        return self.versions[self.versions.index(self.alike) + 1 : self.versions.index(self.changed) + 1]

    @property
    def moved(self) -> tuple[int, ...]:
        """The cases whose verdict at ``changed`` is not that of the first version."""
        if self.changed is None:
            return ()
        return _moved(self.asked[self.versions[0]], self.asked[self.changed])

    def has_changed(self, version: str) -> bool | None:
        """None for a version that was not asked, or that could be on either side."""
        if version not in self.asked:
            return None
        verdicts = self.asked[version]
        if _moved(self.asked[self.versions[0]], verdicts):
            return True
        told_by = self.moved or range(len(verdicts))
        return None if all(verdicts[case] is None for case in told_by) else False


def bisect_versions(versions: Sequence[str], verdict_of: Callable[[str], CaseVerdicts]) -> BisectResult:
    """The first of ``versions`` whose verdict is not that of ``versions[0]``.

    Both ends are asked first; the last is not where nothing is verified at the first. Then, always, the one in the
    middle of those not yet asked between the last alike and the first changed, so that the nearest neighbours of
    one stepped over come next. As with any bisection, of several changes one is found, not always the first.

    Each version is asked at most once. Of n versions, s of which are stepped over, at most
    2 + ceil(log2(n - 1)) + s are asked; more only where a version stops being alike, since an earlier one turned
    out to have changed in other cases.

    Args:
        versions: distinct names, at least two.
        verdict_of: may raise NotVerifiedError, for a version that has no verdict.
    """
    first, last = versions[0], versions[-1]
    asked: dict[str, CaseVerdicts] = {}
    failed: dict[str, str] = {}

    def ask(version: str) -> CaseVerdicts:
        try:
            asked[version] = tuple(verdict_of(version))
        except NotVerifiedError as err:
            failed[version] = str(err)
        return asked.get(version, ())

    good = ask(first)
    if all(text is None for text in good) or not _moved(good, ask(last)):
        return BisectResult(tuple(versions), asked, failed)
    low, high = 0, len(versions) - 1
    while between := [v for v in versions[low + 1 : high] if v not in asked and v not in failed]:
        version = between[len(between) // 2]
        if _moved(good, ask(version)):
            high = versions.index(version)
        low = _last_alike(versions[:high], asked, _moved(good, asked[versions[high]]))
    return BisectResult(tuple(versions), asked, failed, versions[low], versions[high])


def _moved(good: CaseVerdicts, other: CaseVerdicts) -> tuple[int, ...]:
    """Cases verified on both sides whose texts differ; ``other`` may be empty, which has none."""
    return tuple(
        case
        for case, (old, new) in enumerate(zip(good, other, strict=bool(other)))
        if old is not None and new is not None and old != new
    )


def _last_alike(before: Sequence[str], asked: Mapping[str, CaseVerdicts], moved: Sequence[int]) -> int:
    """Of the versions before the first changed one, the last that verified one of the cases that moved."""
    verified = (
        number
        for number, version in enumerate(before)
        if version in asked and any(asked[version][case] is not None for case in moved)
    )
    return max(verified)
