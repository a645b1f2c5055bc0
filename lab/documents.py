"""Where the committed records lie, how they are read, and Markdown tables of them."""
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from subquad.tools.common.cli import UserError

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path('model_cards') / 'benchmarks'        # in a checkout


def read_records(file: Path) -> List[Dict[str, Any]]:
    """Return the records of a file, one from each line of JSON; none if it does not exist."""
    try:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    except (OSError, ValueError) as error:
        raise UserError(f'cannot read {file}: {error}') from error


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines) + '\n'
