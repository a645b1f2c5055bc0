"""Classify image files, and print the likeliest classes."""
import itertools
import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch

from ...common.cli import UserError, one_line
from ...common.images import LeftOut, open_image
from ...common.output import print_rows, progress


def classify(model, transform, classes: List[str], files: Sequence[Path], topk: int = 5,
             batch_size: int = 16, left_out: Optional[LeftOut] = None) -> List[Dict[str, Any]]:
    """Classify image files.

    Args:
        model: Classifier in eval mode. With the attribute `multi_label`, each class has a probability of its own.
        transform: Transform of PIL images.
        topk: Number of classes to return for each file.
        left_out: Receives the errors of files that cannot be read; without it they are raised.

    Returns:
        For each file dict(file, classes=[dict(name, probability), ...]), the likeliest class first.
    """
    results = []
    left_out = left_out or LeftOut(len(files), strict=True)
    images = left_out.read(progress(files, 'images'), lambda file: transform(open_image(file)))
    while part := list(itertools.islice(images, batch_size)):
        batch = torch.stack([image for _, image in part])
        try:
            with torch.inference_mode():
                logits = model(batch)
                scores = logits.sigmoid() if getattr(model, 'multi_label', False) else logits.softmax(-1)
                values, indices = scores.topk(min(topk, len(classes)))
        except (ValueError, RuntimeError, AssertionError) as error:       # the model does not accept the size
            size = ' x '.join(map(str, batch.shape[2:]))
            raise UserError(f'the model does not accept images of {size}: {one_line(error)}') from error
        for (file, _), value, index in zip(part, values.tolist(), indices.tolist()):
            results.append(dict(file=str(file), classes=[dict(name=classes[i], probability=v)
                                                         for v, i in zip(value, index)]))
    return results


def print_classes(results: List[Dict[str, Any]]) -> None:
    """Print the results of `classify` as a table."""
    rows = []
    for row in results:
        best, *others = [f"{c['name']} ({c['probability']:.1%})" for c in row['classes']]
        if any(math.isnan(c['probability']) for c in row['classes']):
            best, others = 'none: the scores are NaN', []
        rows.append((row['file'], best, ', '.join(others)))
    print_rows(['image', 'class', 'next likeliest'], rows)
