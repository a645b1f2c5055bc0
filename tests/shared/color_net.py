"""A classifier of ImageNet's classes whose predictions a test chooses: the color of an image is its class."""
import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import nn

WORDNET = ImageNetInfo().label_names()
# Options of `subquad test` with which the network sees the colors as they are, in small images.
PLAIN = ('test_dataloader.num_workers=0', 'test_dataloader.dataset.transform.input_size=(3,8,8)',
         'test_dataloader.dataset.transform.mean=(0,0,0)', 'test_dataloader.dataset.transform.std=(1,1,1)')


class ColorNet(nn.Module):
    """Predicts the class whose number the color of the center holds; next come the classes with near numbers."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.num_classes = num_classes
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, images):
        red, green, blue = (images[:, :, 4, 4] * 255).round().unbind(1)
        code = 4 * red + green + self.shift
        logits = -(code[:, None] - torch.arange(self.num_classes)).abs()
        return logits.where(blue[:, None] < 255, torch.nan)


def save_color(path, label, finite=True):
    """Write an image that `ColorNet` predicts as this class, or for which its scores are NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    color = np.array([label // 4, label % 4, 0 if finite else 255], np.uint8)
    Image.fromarray(np.broadcast_to(color, (12, 12, 3)).copy()).save(path)


def use_color_net(monkeypatch):
    """Build `ColorNet` whatever classifier is asked for."""
    monkeypatch.setattr('subquad.tools.engine.classification.model.create',
                        lambda name, num_classes=1000, **_: ColorNet(num_classes))
