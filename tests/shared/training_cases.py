"""What the tests of `subquad train` share: a few images in folders, and how a small network is trained on them."""
import numpy as np
from PIL import Image
from user_errors import command_error

from subquad.tools import train


def make_images(folder):
    """FOLDER/{train,val}/{dark,light}/*.png, 4 images each."""
    rng = np.random.default_rng(0)
    for part in ('train', 'val'):
        for name, level in (('dark', 40), ('light', 200)):
            (folder / part / name).mkdir(parents=True)
            for n in range(4):
                pixels = rng.integers(level, level + 50, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f'{n}.png')
    return folder


def folder_arguments(images, work, *options, config='ppma-tiny_folder', epochs=1):
    """Two steps an epoch with a small network."""
    return [config, '--data', str(images), '--model', 'test_ppma', '--work-dir', str(work), '--epochs', str(epochs),
            '--cfg-options', 'train_dataloader.batch_size=4', 'train_dataloader.num_workers=0',
            'val_dataloader.num_workers=0', 'train_dataloader.dataset.transform.input_size=(3,32,32)',
            'val_dataloader.dataset.transform.input_size=(3,32,32)', *options]


def fails(arguments, message, main=train.main):
    """Return the message of the UserError, which matches a regular expression, for these arguments."""
    return command_error(main, arguments, match=message)
