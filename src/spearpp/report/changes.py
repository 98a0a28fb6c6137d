"""What changed between two audits, from the content of their ``report.json`` files alone."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from spearpp.errors import DataError
from spearpp.report.leaks import Leak, leaks

Direction = Literal["worse", "better", "mixed", "different", "same"]
RESULTS = ("verdict", "severity", "exact", "approximate", "fitting", "batch_size", "best_layer", "interrupted")
LAYER_FIELDS = ("outcome", "sees", "neurons", "features", "batch_size", "exact", "approximate", "fitting")
SETTINGS = ("client", "model", "budget", "redacted", "received", "threat_model")
GATE_FIELDS = ("fail_on", "config", "thresholds")


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
    """Compare two audits, given by the content of their ``report.json``."""
    try:
        first, second = ({each.id: each for each in leaks(content)} for content in (before, after))
        found = (
            *_fields("result", RESULTS, before, after),
            *_between("leak", *({name: _size(leak) for name, leak in side.items()} for side in (first, second))),
            *_layers(before, after),
            *_between("claims", _claims(before), _claims(after)),
            *_fields("settings", SETTINGS, before, after),
            *_fields("settings", GATE_FIELDS, before.get("gate") or {}, after.get("gate") or {}),
            *_between("settings", _versions(before), _versions(after)),
            *_between("settings", _acceptances(before), _acceptances(after)),
            *_between("file", _files(before), _files(after)),
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
    for name in names:
        if name in before and name in after and before[name] != after[name]:
            yield Change(area, prefix + name, before[name], after[name])


def _size(leak: Leak) -> str:
    return f"{leak.count} of {'?' if leak.total is None else leak.total}, {leak.exact} exact"


def _layers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    first, second = ({str(each["name"]): each for each in side["layers"]} for side in (before, after))
    yield from _between("layer", dict.fromkeys(first, "present"), dict.fromkeys(second, "present"))
    for name in first:
        if name in second:
            yield from _fields("layer", LAYER_FIELDS, first[name], second[name], f"{name} ")


def _claims(content: Mapping[str, Any]) -> Counter[str]:
    """Return how many inputs of each layer have each claim."""
    searched = [each for each in content["layers"] if each["inversion"] is not None]
    return Counter(f"{each['name']}, {row['claim']}" for each in searched for row in each["inversion"]["samples"])


def _versions(content: Mapping[str, Any]) -> dict[str, str]:
    return {f"version of {name}": each for name, each in (content.get("versions") or {}).items()}


def _acceptances(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the state, reason and last day of each acceptance by the leak that it names."""
    texts = {}
    for each in content.get("leaks") or []:
        if (known := each["acceptance"]) is not None:
            texts[f"acceptance of {each['id']}"] = f"{each['status']}, until {known['expires']}: {known['reason']}"
    return texts


def _files(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each audited file by its name, and the order of the files if there are several."""
    files = {str(each["name"]): str(each["sha256"]) for each in content.get("files") or []}
    return files | ({"order of the files": ", ".join(files)} if len(files) > 1 else {})
