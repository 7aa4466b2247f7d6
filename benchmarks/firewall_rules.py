"""Rule × attack × method: which rule of the firewall finds which lie, and which stops honest sites.

    python -m benchmarks.firewall_rules --to DIR [--method fedavg --method scaffold] [--seed 1] [--attack flipped]

Prostate phantoms, as in benchmarks.robust. The firewall only observes, so that every rule is seen at work on the same
updates; one run per attack is enough. A cell is `lies found / found by this rule alone`, of five lies; the column
`honest` counts updates of honest sites that the rule would have stopped in all runs. What is there is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.robust import HONEST, LIAR, prostate, study_of
from consilium.run_folder import RunFolder
from tests.privacy.liars import LIES, Lie, run_lying, scale

ATTACKS: dict[str, tuple[Lie | None, int]] = {
    "nobody lies": (None, HONEST),
    **{name: (lie, HONEST) for name, lie in LIES.items() if name not in ("scaled by 100", "shifted by -1")},
    "flipped, times 5": (scale(-5.0), HONEST),
    "scaled by 10 from the first round on": (LIES["scaled by 10"], 0),
    "flipped from the first round on": (LIES["flipped"], 0),
}
RULES = {  # by the words of their sentences
    "times_own": "as long as the site's",
    "times_others": "as long as the others'",
    "turn": "against the site's earlier",
    "shift": "shifted by a constant",
    "repeated": "has sent before",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.firewall_rules", description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="a folder for data, runs and rules.json")
    parser.add_argument("--method", action="append", help="default: fedavg")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    data, path = prostate(options.to, options.seed), options.to / "rules.json"
    cells: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for method in options.method or ["fedavg"]:
        for attack in options.attack or ATTACKS:
            key = f"{method}|{options.seed}|{attack}"
            if key not in cells:
                cells[key] = _cell(method, attack, data, options.to / "runs" / key, options.seed)
                path.write_text(json.dumps(cells, indent=1))
                print(key, cells[key], flush=True)
    print(_table(cells))


def _cell(method: str, attack: str, data: Path, runs: Path, seed: int) -> dict[str, Any]:
    lie, honest = ATTACKS[attack]
    study = study_of(method, data, seed, {"firewall": "observe"})
    lies = dict.fromkeys(range(honest + 1, study.plan.rounds + 1), lie) if lie is not None else {}
    return _found(run_lying(study, runs, LIAR, lies), set(lies))


def _found(folder: RunFolder, rounds: set[int]) -> dict[str, Any]:
    """The rules that spoke on lies (all of them, and where one alone did) and on honest updates."""
    told: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    honest: Counter[str] = Counter()
    updates = lies = missed = 0
    for event in folder.events():
        if event["event"] not in ("train", "refused") or "firewall" not in event:
            continue
        why = event["firewall"].get("why", "")
        spoke = [rule for rule, words in RULES.items() if words in why]
        if event["site"] == LIAR and event["round"] in rounds and event["phase"] == "train":
            lies, missed = lies + 1, missed + (not spoke)
            told.update(spoke)
            alone.update(spoke if len(spoke) == 1 else [])
        else:
            updates += 1
            honest.update(spoke)
    return {"lies": lies, "missed": missed, "found": told, "alone": alone, "updates": updates, "honest": honest}


def _table(cells: Mapping[str, Any]) -> str:
    """A line per run, a column per rule; the last line counts the honest updates of all runs."""
    lines = ["| run | " + " | ".join(RULES) + " | missed |", "|---|" + "---|" * (len(RULES) + 1)]
    for key, cell in cells.items():
        if cell["lies"]:
            row = [f"{cell['found'].get(rule, 0)} / {cell['alone'].get(rule, 0)}" for rule in RULES]
            lines.append(
                f"| {key.replace('|', ', ')} | " + " | ".join(row) + f" | {cell['missed']} of {cell['lies']} |"
            )
    stopped = [sum(cell["honest"].get(rule, 0) for cell in cells.values()) for rule in RULES]
    updates = sum(cell["updates"] for cell in cells.values())
    lines.append(f"| honest updates stopped, of {updates} | " + " | ".join(map(str, stopped)) + " | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
