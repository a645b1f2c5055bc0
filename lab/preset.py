"""A measurement of `python -m lab.benchmark` with a name, options and targets."""
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional


@dataclass(frozen=True)
class Preset:
    """A measurement with a name.

    Attributes:
        name: What a user types.
        description: What is measured, in words.
        measure: Function (rounds, **options, **targets) -> record without its metadata.
        options: What is measured, as keywords of `measure`.
        targets: The targets, as keywords of `measure`.
        repeats: Rounds of timing by default.
        processes: Processes by default; the medians over them are kept.
        family: The model family whose card shows the results.
        device: 'cpu' or 'cuda'.
        draw: Function (record, path) that draws a picture of the record.
    """
    name: str
    description: str
    measure: Callable[..., Dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 50
    processes: int = 1
    family: str = ''
    device: str = 'cpu'
    draw: Optional[Callable[[Dict[str, Any], Path], None]] = None

    def run(self, repeats: int) -> Dict[str, Any]:
        """Measure, and return the record without its metadata."""
        return self.measure(repeats, **self.options, **self.targets)
