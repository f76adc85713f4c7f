"""A table of language models from the folders of their runs, mean and standard deviation over seeds, as Markdown.

    python -m experiments.text_table runs

Samples of different models differ in entropy, and what is less varied looks better. So each model's known words are also read
off at the entropy of held-out text, from its own temperatures (`eval.temperatures`), where these reach it.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from text_scores import at_matched_entropy

COLUMNS = {
    "bits_per_character": "bits per character",
    "bits_per_character_sigma_max": "the same at sigma_max",
    "known_words": "known words",
    "distinct_2": "distinct-2 / held out",
    "repetition": "repetition",
    "known_words_matched": "known words at held-out entropy",
    "token_layers": "token-layers",
    "parameters": "parameters of a block",
    "state_bytes": "state bytes",
    "activation_bytes": "activation bytes",
    "seconds": "seconds",
}


def row_of(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns a run's numbers by column; generated text at temperature 1."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_kind[result["kind"]].append(result)
    held_out = by_kind["heldout_text"][-1]["scores"]
    drawn = {result["protocol"]["sampler"]["temperature"]: result["scores"] for result in by_kind["generated_text"]}
    found = {**by_kind["training_cost"][-1]["scores"], **by_kind["likelihood"][-1]["scores"], **drawn[1.0]}
    found["distinct_2"] = drawn[1.0]["distinct_2"] / held_out["distinct_2"]
    scores = list(drawn.values())
    entropies, known = ([score[name] for score in scores] for name in ("entropy", "known_words"))
    found["known_words_matched"] = at_matched_entropy(entropies, known, held_out["entropy"])
    return {column: found.get(column) for column in COLUMNS}


def label_of(results: list[dict[str, Any]]) -> str:
    """Returns what a run is in a table: its model, objective, blocks and tokens."""
    trained = results[0]["protocol"]["trained"]
    objective, method = trained["objective"], trained["method"]["name"]
    name = f"{trained['model']['name']}, {objective['name']}"
    name += f", {objective['layout']}" if "layout" in objective else ""
    blocks = trained["partition"]["num_blocks"]
    name += f", {blocks} blocks" if method == "diffusion_blocks" else f", {method}"
    return f"{name}, {trained['data']['tokenizer']}, {trained['train']['steps']} steps"


def table(folder: Path) -> str:
    """Returns the table of all scored runs in a folder."""
    rows: dict[str, list[dict[str, float | None]]] = defaultdict(list)
    for path in sorted(folder.glob("*/results.json")):
        results = json.loads(path.read_text())
        rows[label_of(results)].append(row_of(results))
    lines = [f"| model | seeds | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for label, runs in sorted(rows.items()):
        cells = []
        for column in COLUMNS:
            values = [run[column] for run in runs if run[column] is not None]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.4g}{spread}" if values else "")
        lines.append(f"| {label} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
