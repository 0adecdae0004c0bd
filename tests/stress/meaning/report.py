"""What a run of the fuzzer came to: how many cases, which checks they reached, and what broke a promise."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"(?<![A-Za-z])[-−+]?(?:\d[\d_.]*(?:e[-+]?\d+)?|nan|inf)(?![A-Za-z])|-?\b0x[0-9a-f]+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_LISTED = re.compile(r"([\[({]?#[\])}]?)(?:(?:, | )\1)+")


def normalized(sentence: str) -> str:
    """Return a sentence without its numbers and quotations: two refusals by the same check are equal then."""
    sentence = _NUMBER.sub("#", _QUOTED.sub("'…'", sentence))
    return _LISTED.sub(r"\1", sentence)[:200]


@dataclass(frozen=True)
class Finding:
    """A promise that was broken, with all that is needed to see it again."""

    algorithm: str
    level: str
    seed: int
    problem: str
    """The sentence, normalized."""
    where: str
    """File and function in which it was raised."""
    example: str
    """The sentence as it was, and the lie."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Two findings with the same key are one."""
        return self.algorithm, self.level, self.problem, self.where


@dataclass
class Report:
    """Figures of one worker, which can be added up."""

    cases: Counter[str] = field(default_factory=Counter)
    """By algorithm, or kind of handler."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Cases that were no lie to the judge, and changed something; by algorithm."""
    followed: Counter[str] = field(default_factory=Counter)
    """Of these, those whose run was followed to its end."""
    checks: Counter[str] = field(default_factory=Counter)
    """How often each check refused something: sentences without numbers."""
    seeds: int = 0
    largest_bytes: int = 0
    """Of the state of a peer that was lied to."""
    findings: dict[tuple[str, str, str, str], Finding] = field(default_factory=dict)
    found: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)

    def refused(self, problem: str) -> None:
        self.checks[normalized(problem)] += 1

    def find(self, algorithm: str, level: str, seed: int, error: BaseException, lie: str) -> None:
        """Take note of a broken promise."""
        name = "" if type(error).__name__ == "PromiseBroken" else f"{type(error).__name__}: "
        sentence = f"{name}{error}"
        example = f"{sentence[:600]} | {lie[:600]}"
        finding = Finding(algorithm, level, seed, normalized(sentence), _where(error), example)
        self.findings.setdefault(finding.key, finding)
        self.found[finding.key] += 1

    def add(self, other: Report) -> None:
        self.cases += other.cases
        self.accepted += other.accepted
        self.followed += other.followed
        self.checks += other.checks
        self.found += other.found
        self.seeds += other.seeds
        self.largest_bytes = max(self.largest_bytes, other.largest_bytes)
        for key, finding in other.findings.items():
            self.findings.setdefault(key, finding)

    @property
    def num_cases(self) -> int:
        return sum(self.cases.values())

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Report:
        """Return what `as_json` made."""
        report = cls(
            cases=Counter(saved["cases_by_algorithm"]),
            accepted=Counter(saved["accepted"]),
            followed=Counter(saved["followed"]),
            checks=Counter(saved["checks"]),
            seeds=saved["seeds"],
            largest_bytes=saved["largest_state_bytes"],
        )
        for each in saved["findings"]:
            times = each.pop("times")
            finding = Finding(**each)
            report.findings[finding.key], report.found[finding.key] = finding, times
        return report

    def as_json(self) -> dict[str, object]:
        return {
            "cases": self.num_cases,
            "cases_by_algorithm": dict(sorted(self.cases.items())),
            "accepted": dict(sorted(self.accepted.items())),
            "followed": dict(sorted(self.followed.items())),
            "seeds": self.seeds,
            "largest_state_bytes": self.largest_bytes,
            "checks": dict(self.checks.most_common()),
            "findings": [{**vars(finding), "times": self.found[key]} for key, finding in sorted(self.findings.items())],
        }

    def lines(self) -> list[str]:
        """Return the report as a person reads it."""
        lines = [
            f"{self.num_cases:,} cases in {self.seeds:,} seeds; {sum(self.accepted.values()):,} were taken and changed "
            f"something, {sum(self.followed.values()):,} of these were followed to the end of their run"
        ]
        lines += [f"  {count:>10,}  {name}" for name, count in sorted(self.cases.items())]
        lines.append(f"{len(self.checks)} checks were reached:")
        lines += [f"  {count:>10,}  {check}" for check, count in self.checks.most_common()]
        lines.append(f"{len(self.findings)} findings:" if self.findings else "no finding")
        for key, finding in sorted(self.findings.items()):
            lines.append(f"  {finding.algorithm}, {finding.level}, seed {finding.seed}, {self.found[key]} times: ")
            lines.append(f"      {finding.where}: {finding.example}")
        return lines


def _where(error: BaseException) -> str:
    """Return where in the package an error was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{Path('/peer/')}" in frame.filename.replace("\\", "/")]
    last = (own or frames)[-1:]
    return "".join(f"{Path(frame.filename).name}:{frame.name}" for frame in last)
