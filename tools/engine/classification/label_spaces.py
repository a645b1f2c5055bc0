"""Point a classification config at one of ImageNet's test sets."""
from pathlib import Path
from typing import Any, Dict, Optional

from ...common.cli import UserError, nearest
from ...common.imagenet import TEST_SETS


def imagenet_folder(data: str, labels: str, transform: Dict[str, Any], real: Optional[str] = None,
                    strict: bool = False) -> Dict[str, Any]:
    """Return the config of an ImageNetFolder in `data`: the folders of the classes, or `val`, which has them."""
    folder = Path(data).expanduser()
    root: Path = folder / 'val' if (folder / 'val').is_dir() else folder
    return dict(type='ImageNetFolder', root=str(root), labels=labels, real=real, transform=transform, strict=strict)


def use_labels(config, text: str, data: Optional[str]) -> None:
    """Replace the test data of a config of image folders by one of ImageNet's test sets in the folder `data`.

    `text` is a name of `TEST_SETS`, or 'real=FILE'.
    """
    labels, equals, real = text.partition('=')
    if labels not in TEST_SETS or equals and (labels != 'real' or not real):
        raise UserError(f"--labels must be {', '.join(TEST_SETS)} or real=FILE, got {text!r}"
                        f'{nearest(labels, [*TEST_SETS], 1)}')
    dataset = config.get('test_dataloader', {}).get('dataset', {})
    if dataset.get('type') != 'ImageFolder':
        raise UserError('--labels needs a config of image folders, such as ppma-tiny_folder')
    if not data:
        raise UserError(f'--labels {labels} needs its images: --data FOLDER')
    config.test_dataloader.dataset = imagenet_folder(data, labels, dataset.get('transform'), real or None,
                                                     bool(config.get('strict_images')))
    if labels == 'real':
        config.test_evaluator = dict(type='AccuracyMetric')
