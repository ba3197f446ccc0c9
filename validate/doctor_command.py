"""`python -m validate doctor`: its options and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console
from exporter.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from validate.doctor_ailments import Report

LINES = 6  # of one finding's evidence that a terminal shows; --json has all


@click.command()
@click.argument("what", metavar="DIR|MODEL|FILE.onnx")
@click.option("--config", type=click.Path(path_type=Path), help="FILE.onnx: a Hugging Face config.json, to hold RoPE "
              "and softmax scale against.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what is asked.")
@click.option("--training", is_flag=True, help="MODEL: what a training step of one attention holds, with the query's "
              "low rank and without.")
@click.option("--batch", type=int, default=1, show_default=True, help="Training: sequences.")
@click.option("--tokens", type=int, default=4096, show_default=True, help="Training: tokens of each.")
@click.option("--dtype", default="bf16", show_default=True, help="Training: bf16, fp16 or fp32.")
@console.json_option
def doctor(as_json: bool, training: bool, **options: Any) -> None:
    """What is wrong with an export, checkpoint, state_dict or ONNX graph, by measurement: symptom, cause, cure."""
    from validate.doctor import DoctorRequest, examine

    if not training:
        context = click.get_current_context()
        for name in ("batch", "tokens", "dtype"):
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                raise InputError(f"--{name}: for --training; leave it out, or add --training")
    report = examine(DoctorRequest(training=training, **options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, report.to_dict(), lambda out: show(out, report))
    if not report.passed:
        console.stop_failed(as_json, _told(report))


def _told(report: Report) -> str:
    """The faults by name; those of a source with how many kinds of tensors have each."""
    faults = [f for f in report.findings if f.severity == "fault"]
    counts = {name: sum(len(f.evidence.split("\n")) for f in faults if f.name == name)
              for name in dict.fromkeys(f.name for f in faults)}
    of_source = report.kind in ("checkpoint", "state_dict")
    return f"{len(counts)} found: " + ", ".join(f"{name} x {count}" if of_source and count > 1 else name
                                                for name, count in counts.items())


def show(out: Console, report: Report) -> None:
    """What was found, one row each; then what was examined and what was not."""
    from rich.markup import escape

    if report.training is not None:
        _training(out, report.training)
    for f in report.findings:
        colour = "red" if f.severity == "fault" else "yellow"
        where = f", {escape(f.where)}" if f.where else ""
        out.print(f"[bold {colour}]{f.name}[/bold {colour}] [dim]{f.severity}{where}[/dim]", soft_wrap=True)
        for word in ("symptom", "evidence", "cause", "cure"):
            lines = getattr(f, word).split("\n")
            more = [f"and {len(lines) - LINES} more: see --json"] if len(lines) > LINES else []
            for number, line in enumerate(lines[:LINES] + more):
                out.print(f"  {word if number == 0 else '':<9}{escape(line)}", soft_wrap=True)
        out.print()
    if not report.findings:
        out.print(_nothing(len(report.not_examined)))
    console.note_list(out, [f"examined: {line}" for line in _by_subject(report.examined)])
    console.note_list(out, [f"not examined: {name}: {why}" for name, why in report.not_examined])


def _nothing(missed: int) -> str:
    """The headline where no finding is: what could not be examined is no pass."""
    if not missed:
        return "[green]nothing found[/green]"
    return (f"[green]nothing found in what could be examined[/green]; [yellow]{missed} "
            f"{'thing' if missed == 1 else 'things'} could not be[/yellow]")


def _by_subject(lines: list[str]) -> list[str]:
    """What was examined of one graph on one line."""
    found: dict[str, list[str]] = {}
    for line in lines:
        subject, colon, rest = line.partition(": ")
        found.setdefault(subject, []).extend([rest] if colon else [])
    return [f"{subject}: {'; '.join(parts)}" if parts else subject for subject, parts in found.items()]


def _training(out: Console, t: dict[str, Any]) -> None:
    kept = list(t["with_rank"]["activations"])
    rows = []
    for held in (t["with_rank"], t["without"]):
        fixed = held["weights"] + held["gradients"] + held["optimiser"]
        ranked = f"low rank {t['rank']}{' (proposed)' if t['proposed'] else ''}"
        name = ranked if held is t["with_rank"] else "one matrix"
        rows.append([name, f"{held['parameters'] / 1e6:.1f} M",
                     *(console.size(held[part]) for part in ("weights", "gradients", "optimiser")), console.size(fixed),
                     *(console.size(held["activations"][k]) for k in kept)])
    console.table(out, f"{t['model']}: one attention of {t['layers']} in a training step, {t['batch']} x {t['tokens']} "
                  f"tokens, {t['dtype']}, AdamW in float32",
                  ["query", "parameters", "weights", "gradients", "optimiser", "these three",
                   *(f"activations: {k}" for k in kept)], rows)
    both = (t["with_rank"], t["without"])
    same = all(h["measured"] == h["activations"] for h in both)
    how = ("run forward and backward" if all(h["really_run"] for h in both) else
           "recorded by autograd over tensors without memory")
    lines = [f"activations: by formula; {how} and counted by storage, {'the same bytes' if same else 'which differ'}"]
    if not same:
        lines += [f"measured, {h['query']}: {h['measured']}" for h in both]
    saved = both[1]["weights"] + both[1]["gradients"] + both[1]["optimiser"] - sum(
        both[0][part] for part in ("weights", "gradients", "optimiser"))
    console.note_list(out, [*lines, _advice(t, saved), t["inference"]])


def _advice(t: dict[str, Any], saved: int) -> str:
    """What the low rank is worth, said as it is."""
    recomputed = [t[side]["activations"]["up-projections recomputed"] for side in ("with_rank", "without")]
    fixed = (f"the low rank saves {console.size(saved)} of weights, gradients and states" if saved >= 0 else
             f"the low rank costs {console.size(-saved)} of weights, gradients and states")
    difference = recomputed[1] - recomputed[0]
    return (f"{fixed} per attention; of activations it adds a little while everything is kept, and "
            f"{'saves' if difference >= 0 else 'costs'} {console.size(abs(difference))} once what lies behind it is "
            "recomputed (attention's probabilities are most of the rest: a fused attention does not keep them)")
