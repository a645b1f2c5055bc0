"""Tell the checkpoints of a run from those that an earlier run has left in its folder."""
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Dict, Optional, Tuple

from ....backbones.weights import write_atomically
from ....backbones.weights.errors import some

# The file with the names and identities of what is not of the run.
EARLIER = 'earlier_checkpoints.json'
_NUMBERED = re.compile(r'(interrupted_)?(?:epoch|iter)_(\d+)(?:_step_(\d+))?')
_BEST = 'best.safetensors'
_ENDS = 65_536                                                   # bytes of a file's start and end in its identity


def number(path: Path) -> Optional[Tuple[int, int, bool]]:
    """Return (epoch or iteration, step, interrupted) from the name of a checkpoint, or None for other names."""
    match = _NUMBERED.fullmatch(path.stem)
    return (int(match[2]), int(match[3] or 0), match[1] is not None) if match else None


def identity(path: Path) -> str:
    """Return a text that a copy of the file keeps. A checkpoint ends with the checksums of all its parts."""
    size = path.stat().st_size
    with open(path, 'rb') as file:
        start = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        return hashlib.sha256(b'%d ' % size + start + file.read()).hexdigest()[:32]


def noted(folder: Path) -> Dict[str, str]:
    """Return name and identity of what an earlier run has left in a folder."""
    try:
        return json.loads((folder / EARLIER).read_text())
    except (OSError, ValueError):
        return {}


def is_own(path: Path, earlier: Dict[str, str]) -> bool:
    """Whether a file is of the last run in its folder, given the result of `noted`."""
    return path.name not in earlier or earlier[path.name] != identity(path)


def earlier_files(folder: Path, start: Optional[Path]) -> Dict[str, str]:
    """Return name and identity of the files that are not of a run that begins now.

    Args:
        folder: Folder of the run.
        start: The checkpoint that the run continues, or None. The checkpoints before it are of the same run.
    """
    before = noted(folder)
    inside = start is not None and start.is_file() and start.resolve().parent == folder.resolve()
    own, last = inside and is_own(start, before), number(start) if inside else None
    found = {}
    for path in sorted([*folder.glob('*.pth'), *folder.glob(_BEST)]):
        place = number(path)
        later = last is not None and place is not None and place > last
        if not inside or later or is_own(path, before) != own:
            found[path.name] = identity(path)
    return found


def note_earlier(folder: Path, start: Optional[Path]) -> None:
    """Note the files in a folder that are not of the run that begins now, and say so if there are new ones."""
    before, found = noted(folder), earlier_files(folder, start)
    if not found:
        (folder / EARLIER).unlink(missing_ok=True)
        return
    _write(folder, found)
    names = sorted(name for name, value in found.items() if name.endswith('.pth') and before.get(name) != value)
    if names:
        print(f'{folder} holds checkpoints of an earlier run ({some(names)}), which --resume will not take; this run '
              'replaces those of the same names', file=sys.stderr)


def now_own(path: Path) -> None:
    """Take a file that the run has written from the list; the same training writes the same weights again."""
    found = noted(path.parent)
    if found.pop(path.name, None) is not None:
        _write(path.parent, found)


def _write(folder: Path, found: Dict[str, str]) -> None:
    with write_atomically(folder / EARLIER) as temporary:
        Path(temporary).write_text(json.dumps(found, indent=1))
