"""What changed between two audits, from the content of their ``report.json`` files alone."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from spearpp.errors import DataError
from spearpp.report.leaks import Leak, leaks

Direction = Literal["worse", "better", "mixed", "different", "same"]
RESULTS = ("verdict", "severity", "recovered", "approximate", "fitting", "batch_size", "best_layer", "interrupted")
LAYER_FIELDS = ("outcome", "sees", "neurons", "features", "batch_size", "recovered", "approximate", "fitting")
SETTINGS = ("client", "model", "budget", "redacted", "received", "threat_model")


@dataclass(frozen=True)
class Change:
    """One difference. A value of None means that the entry is absent."""

    area: Literal["result", "leak", "layer", "claims", "settings", "file"]
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            value, word = (self.after, "new") if self.before is None else (self.before, "gone")
            return f"{self.area} {self.name}: {word} ({value})"
        return f"{self.area} {self.name}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Changes:
    """All differences between two audits."""

    changes: tuple[Change, ...]
    direction: Direction
    """worse: a leak is new or larger. better: a leak is gone or smaller. mixed: both. different: the leaks are equal,
    but something else differs. same: nothing differs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the differences in a form for JSON."""
        return {"direction": self.direction, "changes": [asdict(each) for each in self.changes]}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Compare two audits.

    Args:
        before: The content of the first ``report.json``.
        after: The content of the second ``report.json``.

    Raises:
        DataError: If the content of one of them is damaged.
    """
    try:
        first, second = ({each.id: each for each in leaks(content)} for content in (before, after))
        found = (
            *_fields("result", RESULTS, before, after),
            *_leaks(first, second),
            *_layers(before, after),
            *_claims(before, after),
            *_settings(before, after),
            *_between("file", *(_files(content) for content in (before, after))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"one of the two reports is damaged: {error!r}") from error
    return Changes(found, _direction(first, second, bool(found)))


def _direction(first: Mapping[str, Leak], second: Mapping[str, Leak], different: bool) -> Direction:
    worse = better = False
    for name in {*first, *second}:
        old, new = ((each.count, each.exact) if (each := side.get(name)) else (0, 0) for side in (first, second))
        worse |= new[0] > old[0] or new[1] > old[1]
        better |= new[0] < old[0] or new[1] < old[1]
    if worse or better:
        return "mixed" if worse and better else "worse" if worse else "better"
    return "different" if different else "same"


def _between(area: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the entries that differ, in the order of the first mapping and then of the second."""
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Change(area, name, before.get(name), after.get(name))


def _fields(
    area: Any, names: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[Change]:
    """Yield the fields that differ. A field that only one of two releases writes is no difference."""
    shared = [name for name in names if name in before and name in after]
    for name in shared:
        if before[name] != after[name]:
            yield Change(area, prefix + name, before[name], after[name])


def _leaks(before: Mapping[str, Leak], after: Mapping[str, Leak]) -> Iterator[Change]:
    sides = ({name: _size(leak) for name, leak in side.items()} for side in (before, after))
    yield from _between("leak", *sides)


def _size(leak: Leak) -> str:
    return f"{leak.count} of {'?' if leak.total is None else leak.total}, {leak.exact} exact"


def _layers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    first, second = ({str(each["name"]): each for each in side["layers"]} for side in (before, after))
    yield from _between("layer", *(dict.fromkeys(side, "present") for side in (first, second)))
    for name in first:
        if name in second:
            yield from _fields("layer", LAYER_FIELDS, first[name], second[name], f"{name} ")


def _claims(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield how many inputs of each layer have each claim, where this differs."""
    sides = []
    for content in (before, after):
        searched = [each for each in content["layers"] if each["inversion"] is not None]
        counts = ((each["name"], Counter(row["claim"] for row in each["inversion"]["samples"])) for each in searched)
        sides.append({f"{name}, {claim}": count for name, found in counts for claim, count in found.items()})
    yield from _between("claims", *sides)


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    yield from _fields("settings", SETTINGS, before, after)
    gates = [content.get("gate") or {} for content in (before, after)]
    yield from _fields("settings", ("fail_on", "config", "thresholds"), gates[0], gates[1])
    versions = [content.get("versions") or {} for content in (before, after)]
    yield from _between("settings", *({f"version of {name}": each for name, each in side.items()} for side in versions))
    yield from _between("settings", *(_acceptances(content) for content in (before, after)))


def _acceptances(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the state, reason and last day of each acceptance by the leak that it names."""
    known = [each for each in content.get("leaks") or [] if each["acceptance"] is not None]
    return {
        f"acceptance of {each['id']}": f"{each['status']}, until {each['acceptance']['expires']}: "
        f"{each['acceptance']['reason']}"
        for each in known
    }


def _files(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each audited file by its name, and the order of the files if there are several."""
    files = {str(each["name"]): str(each["sha256"]) for each in content.get("files") or []}
    return files | ({"order of the files": ", ".join(files)} if len(files) > 1 else {})
