"""Markdown tables."""
from pathlib import Path
from typing import Sequence

# Where the committed records lie in a checkout.
RECORDS = Path('model_cards') / 'benchmarks'


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines) + '\n'
