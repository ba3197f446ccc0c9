"""How the suite profile looks, from a run's JSON: steps, parts of the model, operators; and its chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from validate.plot import rows_label
from validate.plot_bars import Bar, Bars

Data = dict[str, Any]
FLOORS = ("over the floor", "at median rates")
STEPS = ("subject", "batch", "context", "ms", "± spread", *FLOORS, "profiled, ms", "in its nodes, ms", "equal (rel)")
PARTS = ("subject", "part", "batch", "context", "ms", "share", "in products, ms", "GB/s", "GFLOP/s", "floor, ms",
         *FLOORS)
OPERATORS = ("subject", "operator", "batch", "context", "nodes", "ms", "share")
LEAST = 0.01  # of all nodes: operators that take less are summed up
# parts that have a colour of their own in the chart; the others are one
SHOWN = ("attention projections", "scores", "softmax and masks", "mix", "scores to mix", "experts", "feed-forward",
         "head")
OTHERS = "others"


def profiles(data: Data) -> list[Data]:
    """A run's profiles; a run kept from before there were any has none."""
    found: list[Data] = data.get("profile", [])
    return found


def steps(data: Data) -> list[Data]:
    """Rows of the suite, each with its profile's times."""
    by_case = {_case(p): p for p in profiles(data)}
    return [{**row, "profiled_ms": by_case[_case(row)]["ms"], "nodes_ms": by_case[_case(row)]["nodes_ms"]}
            for row in data["rows"] if row["suite"] == "profile" and _case(row) in by_case]


def _case(entry: Data) -> tuple[str, int, int]:
    return entry["subject"], entry["batch"], entry["context"]


def part_rows(data: Data) -> list[list[Any]]:
    """Each profile's parts, and its nodes without a part that take more than others."""
    return [[p["subject"], name, p["batch"], p["context"], *_part(part)] for p in profiles(data)
            for name, part in _parts(p)]


def _parts(profile: Data) -> Iterator[tuple[str, Data]]:
    for part in profile["parts"]:
        yield part["part"], part
    for node in profile["unnamed"]:
        yield f"rest: {node['name']}", node


def _part(part: Data) -> list[str]:
    found = [_ms(part["ms"]), _percent(part["share"])]
    if "bytes_per_s" not in part:
        return found + ["–"] * 6
    floors = [part.get(name) for name in ("floor_ms", "median_floor_ms")]
    return [*found, _ms(part["products_ms"]), f"{part['bytes_per_s'] / 1e9:.1f}", f"{part['flops_per_s'] / 1e9:.0f}",
            "–" if floors[0] is None else _ms(floors[0]),
            *("–" if floor is None else f"{part['products_ms'] / floor:.2f}x" for floor in floors)]


def operator_rows(data: Data) -> list[list[Any]]:
    """Each profile's operators by what they take."""
    found = []
    for p in profiles(data):
        shown = [o for o in p["operators"] if o["share"] >= LEAST]
        few = [o for o in p["operators"] if o["share"] < LEAST]
        if few:
            shown.append({"name": f"{len(few)} {OTHERS}",
                          **{k: sum(o[k] for o in few) for k in ("ms", "share", "nodes")}})
        found += [[p["subject"], o["name"], p["batch"], p["context"], o["nodes"], _ms(o["ms"]), _percent(o["share"])]
                  for o in shown]
    return found


def _ms(value: float) -> str:
    return f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def bars(data: Data) -> list[Bars]:
    """A chart of each subject: a bar for each past, as long as its nodes take, in parts of the model."""
    subjects = dict.fromkeys(p["subject"] for p in profiles(data))
    every = [name for name in (*SHOWN, OTHERS) if any(_pieces(p)[name] for p in profiles(data))]
    found = []
    for subject in subjects:
        own = [p for p in profiles(data) if p["subject"] == subject]
        names = [name for name in every if any(_pieces(p)[name] for p in own)]
        found.append(Bars(subject, [Bar(_label(p), [_pieces(p)[name] for name in names]) for p in own], names,
                          "ms of a step's nodes", looks=[every.index(name) for name in names]))
    return found


def _label(profile: Data) -> str:
    rows = rows_label(profile["context"])
    return f"{rows} rows" if profile["batch"] == 1 else f"{profile['batch']} x {rows} rows"


def _pieces(profile: Data) -> dict[str, float]:
    found = dict.fromkeys((*SHOWN, OTHERS), 0.0)
    for part in profile["parts"]:
        found[part["part"] if part["part"] in SHOWN else OTHERS] += part["ms"]
    return found
