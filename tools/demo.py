"""Train a small PPMA on 1,437 real images of handwritten digits, test it on 360 others, and show what it sees."""
import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import List, Optional, Tuple

from .common.cli import UserError

CONFIG = 'test-ppma_digits'
SHOWN = 8


def linear_accuracy() -> float:
    """Accuracy in percent of logistic regression on the same split, from raw pixels."""
    from sklearn.linear_model import LogisticRegression

    from .data.image_sets import digits_arrays
    (train, train_labels), (test, test_labels) = digits_arrays('train'), digits_arrays('test')
    train, test = (images.reshape(len(images), -1) / 255 for images in (train, test))
    return LogisticRegression(max_iter=1000).fit(train, train_labels).score(test, test_labels) * 100


def write_images(folder: Path) -> List[Tuple[Path, int]]:
    """The first test images of the first classes as PNG files: [(file, label)]."""
    from PIL import Image

    from .data.image_sets import digits_arrays
    images, labels = digits_arrays('test')
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for n in range(SHOWN):
        index = int((labels == n).nonzero()[0][0])
        file = folder / f'test_{index:03d}.png'
        Image.fromarray(images[index]).resize((64, 64), Image.Resampling.NEAREST).save(file)
        written.append((file, int(labels[index])))
    return written


def draw(path: Path, files: List[Tuple[Path, int]], predictions: List[str], horizontal, vertical, title: str) -> None:
    """A row each of images with labels, of horizontal and of vertical decay factors."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from PIL import Image
    figure, axes = plt.subplots(3, len(files), figsize=(1.5 * len(files) + 1.4, 5.6), layout='constrained')
    low, high = (float(f(horizontal.min(), vertical.min()) if f is min else f(horizontal.max(), vertical.max()))
                 for f in (min, max))
    for column, ((file, label), prediction) in enumerate(zip(files, predictions)):
        axes[0, column].imshow(Image.open(file), cmap='gray')
        axes[0, column].set_title(f'is {label}, seen as {prediction}', fontsize=9,
                                  color='black' if str(label) == prediction else 'red')
        for row, factors in ((1, horizontal), (2, vertical)):
            shown = axes[row, column].imshow(factors[column], cmap='viridis', vmin=low, vmax=high)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for row, name in enumerate(('test image', 'horizontal\ndecay factor', 'vertical\ndecay factor')):
        axes[row, 0].set_ylabel(name, fontsize=9)
    figure.colorbar(shown, ax=axes[1:, :], shrink=0.8, label='per step; 1: the path does not fade')
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _activation() -> str:
    """The line that puts `subquad` on the path, where this interpreter's environment is not active."""
    activate = Path(sys.prefix) / 'bin' / 'activate'
    return f'  source {os.path.relpath(activate)}\n' if not shutil.which('subquad') and activate.exists() else ''


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad demo', description=__doc__)
    parser.add_argument('--out', default='demo', metavar='FOLDER', help='where everything is written (default: demo)')
    args = parser.parse_args(argv)
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise UserError('the digits come with scikit-learn, which is not installed: pip install "subquad[demo]"'
                        ) from error
    import torch

    from .common.images import open_image
    from .common.paths import writable_folder
    from .engine.config import load
    from .engine.drawing.pictures import decay_factors
    from .predict import classify, load_classifier, show
    from .test import evaluate
    from .train import run_training

    out = writable_folder(args.out)
    config = load(CONFIG)
    print(f'Training {config.model.name} on 1,437 images for {config.train_cfg.max_epochs} epochs ...', flush=True)
    start = time.perf_counter()
    weights = run_training(config, str(out / 'train'))
    seconds = time.perf_counter() - start
    accuracy, linear = evaluate(config, str(weights))['accuracy/top1'], linear_accuracy()
    print(f'\nOn 360 images it has never seen: {accuracy:.1f} % right (a linear classifier: {linear:.1f} %); '
          f'trained in {seconds:.0f} s.\n')

    files = write_images(out / 'images')
    model, transform, classes = load_classifier(str(weights))
    results = classify(model, transform, classes, [file for file, _ in files], topk=3)
    show(results)
    inputs = torch.stack([transform(open_image(file)) for file, _ in files])
    horizontal, vertical = decay_factors(model, inputs)['stages.0.blocks.0']
    picture = out / 'digits.png'
    draw(picture, files, [row['classes'][0]['name'] for row in results], horizontal, vertical,
         f'{config.model.name} on digits: {accuracy:.1f} % right. Where attention paths fade, in the first block')
    print(f'\npicture   {picture}\nweights   {weights}\nimages    {out / "images"}\n\n'
          'Next:\n' + _activation() +
          f'  subquad predict {weights} {out / "images"} --topk 3\n'
          f'  subquad test {CONFIG} {weights}\n'
          '  subquad train ppma-tiny_folder --data YOUR_IMAGES   (YOUR_IMAGES/train/CLASS/*, YOUR_IMAGES/val/CLASS/*)\n'
          '  subquad --help')
    return 0


if __name__ == '__main__':
    from .common.cli import run
    run(main)
