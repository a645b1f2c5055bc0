"""Train a small PPMA on 1,437 images of handwritten digits, test it on 360 others, and draw its decay factors."""
import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import List, Optional

from .common.cli import UserError
from .common.paths import writable_folder

CONFIG = 'test-ppma_digits'
PRETRAINED = 'test_ppma.digits'         # made by the training that this command runs without --pretrained
SHOWN = 8


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad demo', description=__doc__)
    parser.add_argument('--out', default='demo', metavar='FOLDER',
                        help='folder for weights, images and the picture (default: demo)')
    parser.add_argument('--pretrained', action='store_true',
                        help='test and draw with the weights that the package contains, without training')
    args = parser.parse_args(argv)
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UserError('the digits are part of scikit-learn, which is not installed: pip install scikit-learn'
                        ) from error
    from .data.digits import linear_accuracy
    from .engine.classification.evaluation import evaluate
    from .engine.config import load
    from .engine.training import run_training
    out = writable_folder(args.out)
    config = load(CONFIG)
    if args.pretrained:
        weights, how = PRETRAINED, 'trained weights of the package'
    else:
        print(f'Training {config.model.name} on 1,437 images for {config.train_cfg.max_epochs} epochs ...', flush=True)
        start = time.perf_counter()
        weights = str(run_training(config, str(out / 'train')))
        how = f'trained in {time.perf_counter() - start:.0f} s'
    accuracy, linear = evaluate(config, weights)['accuracy/top1'], linear_accuracy()
    print(f'\nAccuracy on 360 test images: {accuracy:.1f} % (linear classifier: {linear:.1f} %); {how}.\n')
    picture = _show(out, weights, f'{config.model.name} on digits, accuracy {accuracy:.1f} %: '
                    'decay factors of the first block')
    print(f'\npicture   {picture}\nweights   {weights}\nimages    {out / "images"}\n\n'
          'Next:\n' + _activation() +
          f'  subquad predict {weights} {out / "images"} --topk 3\n'
          f'  subquad test {CONFIG} {weights}\n'
          '  subquad train ppma-tiny_folder --data YOUR_IMAGES   (YOUR_IMAGES/train/CLASS/*, YOUR_IMAGES/val/CLASS/*)\n'
          '  subquad --help')
    return 0


def _show(out: Path, weights: str, title: str) -> Path:
    """Print the classes of a few test images, draw their decay factors, and return the picture's path."""
    import torch

    from .common.images import open_image
    from .data.digits import write_digits
    from .engine.classification.prediction import classify, print_classes
    from .engine.classification.weight_files import classifier_from_file
    from .engine.drawing.pictures import decay_factors, draw_classified
    files = write_digits(out / 'images', SHOWN)
    model, transform, classes = classifier_from_file(weights)
    results = classify(model, transform, classes, [file for file, _ in files], topk=3)
    print_classes(results)
    inputs = torch.stack([transform(open_image(file)) for file, _ in files])
    horizontal, vertical = decay_factors(model, inputs)['stages.0.blocks.0']
    picture = out / 'digits.png'
    draw_classified(picture, files, [row['classes'][0]['name'] for row in results], horizontal, vertical, title)
    return picture


def _activation() -> str:
    """Return the line that activates this environment, if `subquad` is not on the path."""
    activate = Path(sys.prefix) / 'bin' / 'activate'
    return f'  source {os.path.relpath(activate)}\n' if not shutil.which('subquad') and activate.exists() else ''


if __name__ == '__main__':
    from .common.cli import run
    run(main)
