"""Extract features of three families at odd image sizes, and show which tokens one token attends to.

    python examples/features_and_attention.py [IMAGE]

Without IMAGE a random picture is used. The networks have random weights; load a file with
`subquad.backbones.weights.load_weights(model, FILE)` to see trained ones. Runs in seconds on a CPU.
"""
import sys
from pathlib import Path

import subquad  # noqa: F401  (registers the models; before timm, in case torchvision needs subquad's repair)

# isort: split
import numpy as np
import timm
import torch
from PIL import Image

SIZES = [(96, 96), (75, 131), (33, 200)]


def load(path: str) -> torch.Tensor:
    """Read an image file as a tensor (1, 3, H, W) with values in [0, 1]."""
    pixels = np.asarray(Image.open(path).convert('RGB'), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def save_map(values: torch.Tensor, path: str) -> None:
    """Write a map (H, W) as a grayscale picture, eight pixels for each token."""
    scaled = (values / values.max().clamp(min=1e-12) * 255).byte().numpy()
    Image.fromarray(scaled).resize((scaled.shape[1] * 8, scaled.shape[0] * 8), Image.Resampling.NEAREST).save(path)


@torch.inference_mode()
def print_features() -> None:
    """Print the shapes of the feature pyramid of each family for images of several sizes."""
    for name in ('test_ppma', 'test_mobilevitv2', 'test_myo'):
        backbone = timm.create_model(name, features_only=True).eval()
        print(f'{name}: strides {backbone.feature_info.reduction()}')
        for height, width in SIZES:
            shapes = [tuple(y.shape[1:]) for y in backbone(torch.rand(1, 3, height, width))]
            print(f'  {height} x {width}: {shapes}')


def save_attention(image: torch.Tensor) -> None:
    """Write one attention map for each family that has a method for it."""
    torch.manual_seed(0)
    # MobileViTv2: the weight of each token in the context vector of a layer, averaged over latent tokens.
    scores = timm.create_model('test_mobilevitv2').eval().context_scores(image)
    name, score = next(iter(scores.items()))
    save_map(score[0].mean(0) if score.ndim == 4 else score[0], 'mobilevitv2_context.png')
    print(f'mobilevitv2_context.png: context scores of {name}, {tuple(score.shape[-2:])}')
    # Myo: how much each token contributes to the one in the middle, averaged over heads.
    influences = timm.create_model('test_myo').eval().influences(image, at=(0.5, 0.5))
    name, influence = next(iter(influences.items()))
    save_map(influence.weights[0].abs().mean(0), 'myo_influence.png')
    print(f'myo_influence.png: influence on token {influence.place} in {name}, {tuple(influence.weights.shape[-2:])}')


if __name__ == '__main__':
    if len(sys.argv) > 1 and not Path(sys.argv[1]).is_file():
        sys.exit(f'error: {sys.argv[1]} is not a file')
    print_features()
    save_attention(load(sys.argv[1]) if len(sys.argv) > 1 else torch.rand(1, 3, 96, 128))
