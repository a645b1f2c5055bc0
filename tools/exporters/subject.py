"""What is exported: a model in its export form, the ordinary model to compare with, and the metadata."""
import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import timm.data
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ... import __version__
from ...backbones.blocks import ProjectionHead
from ...backbones.export import compose_linear, prepare_for_export
from ..common.cli import UserError, one_line
from ..common.images import LeftOut, image_files, open_image
from ..common.output import progress
from ..engine.classification.weight_files import Classifier, assumed_transform, read_classifier
from ..engine.zoo import create, default_size, size_options


class Sizes(NamedTuple):
    """The heights and widths that a file with dynamic sizes takes, in pixels."""
    smallest: int
    multiple_of: int
    largest: int


# The sizes that a family's export form takes if height and width are dynamic, or why it takes one size only.
_SIZES: Dict[str, Union[Sizes, str]] = {
    'MobileViTv2': Sizes(64, 64, 2048),        # the maps at strides 8, 16 and 32 are divided into patches of 2 x 2
    'PPMA': Sizes(64, 32, 2048),
    'RMT': Sizes(64, 32, 2048),
    'VMamba': 'VMamba unrolls its scans for one image size, so height and width cannot be dynamic',
    'MambaVision': 'MambaVision pads its maps to whole windows, so height and width cannot be dynamic here',
    'MLLA': Sizes(64, 32, 2048),
    'Vim': 'Vim resizes its position embeddings for one image size, so height and width cannot be dynamic',
    'Myo': 'Myo builds its quad tree for one image size, so height and width cannot be dynamic',
    'LCSM': 'LCSM unrolls its recurrences for one image size, so height and width cannot be dynamic',
}
# Names of a layer and of its norm in one module: convolutions of MobileViTv2, convolutions and head of the skeleton.
_PAIRS = (('conv', 'bn'), ('conv', 'norm'), ('proj', 'norm'))


@dataclass
class Subject:
    """A model to export.

    Attributes:
        name: name of the model or config.
        task: 'classification', 'features', 'detection' or 'segmentation'.
        module: the export form in evaluation mode, with BatchNorm fused; maps images to a tuple of tensors.
        eager: the ordinary model with the same weights; maps images to the same tuple.
        size: height and width of the images.
        in_chans: channels of the images.
        outputs: names of the outputs.
        metadata: what the file says about itself; see `describe`.
        sizes: the dynamic sizes that the export form supports, or the sentence that says why there are none.
        prepare: reads an image file and returns the input (1, in_chans, height, width) for it.
    """
    name: str
    task: str
    module: nn.Module
    eager: nn.Module
    size: Tuple[int, int]
    in_chans: int
    outputs: Tuple[str, ...]
    metadata: Dict[str, Any]
    sizes: Union[Sizes, str]
    prepare: Optional[Callable[[Path], Tensor]] = None

    @property
    def selection(self) -> Optional[Dict[str, Any]]:
        """The settings of the non-maximum suppression that the file does; None if it does none."""
        settings = self.metadata.get('postprocessing') or {}
        return settings if settings.get('type') == 'nms' and settings['in_graph'] else None

    def example(self, batch: int = 1, size: Optional[Sequence[int]] = None, seed: int = 0) -> Tensor:
        """Return generated images (batch, in_chans, height, width), float32, normalized unless the graph does that.

        Even seeds give noise, odd seeds smooth images.
        """
        height, width = size or self.size
        generator = torch.Generator().manual_seed(seed)
        if seed % 2:
            coarse = 2 * torch.randn(batch, self.in_chans, 6, 6, generator=generator)
            images = F.interpolate(coarse, (height, width), mode='bicubic', align_corners=False)
        else:
            images = torch.randn(batch, self.in_chans, height, width, generator=generator)
        if self.metadata['preprocessing'].get('normalize_in_graph'):
            return (128 + 64 * images).clamp(0, 255).round()
        return images

    def calibration(self, folders: Sequence[str], count: int) -> List[Tensor]:
        """Read and preprocess at most `count` images of folders, spread evenly over their sorted names.

        Returns:
            Images (1, C, H, W), float32. Files that cannot be read are reported on stderr and left out.

        Raises:
            UserError: A folder does not exist or holds no images, or none can be read.
        """
        files = image_files(folders)
        count = min(count, len(files))
        files = [files[n * len(files) // count] for n in range(count)]
        left_out = LeftOut(count)
        images = [image.float().contiguous() for _, image in left_out.read(progress(files, 'images'), self.prepare)]
        left_out.code()
        return images


class _Outputs(nn.Module):
    """Return the logits of a classifier, or the feature maps of all its stages, as a tuple."""

    def __init__(self, model: nn.Module, features: bool):
        super().__init__()
        self.model, self.features = model, features

    def forward(self, images: Tensor) -> Tuple[Tensor, ...]:
        if self.features:
            return tuple(self.model.forward_intermediates(images, intermediates_only=True))
        return (self.model(images),)


class Normalize(nn.Module):
    """Put the normalization before a model: images with values from 0 to 255 -> tuple of the model's outputs."""

    def __init__(self, model: nn.Module, transform: Dict[str, Any]):
        super().__init__()
        self.model = model
        mean, std = (torch.tensor(transform[key]).view(1, -1, 1, 1) for key in ('mean', 'std'))
        self.register_buffer('factor', transform['scale'] / std)
        self.register_buffer('offset', mean / std)

    def forward(self, images: Tensor) -> Tuple[Tensor, ...]:
        return self.model(images * self.factor - self.offset)


def classifier_subject(read: Classifier, weights: str, size: Optional[Sequence[int]] = None, features: bool = False,
                       normalize: bool = False) -> Subject:
    """Prepare a classifier, or its feature pyramid.

    Args:
        read: The classifier with its options, classes and transform.
        weights: Name or file of the weights, or 'random'.
        size: Height and width; by default those of the transform.
        features: Export the feature maps of all stages instead of the logits.
        normalize: Put the normalization into the graph, which then takes values from 0 to 255.

    Raises:
        UserError: The model cannot be exported, or does not take images of this size.
    """
    eager = read.model.eval()
    if timm.is_model(f'subquad_{read.name}'):         # unfolds patches with `unfold`, or in six dimensions
        raise UserError(f"{read.name} is timm's form of the network, which other runtimes cannot run; export "
                        f'subquad_{read.name}, which has the same weights')
    if not features and not getattr(eager, 'num_classes', 0):
        raise UserError(f'{read.name} has no classifier; export its feature maps with --features')
    if not hasattr(eager, 'forward_intermediates') and (features or not hasattr(eager, 'stem')):
        raise UserError(f'{read.name} cannot be exported: `subquad export` takes networks for images'
                        + (' with feature maps' if features else ''))
    if weights != 'random' and not read.transform:
        read = read._replace(transform=assumed_transform(read, weights))
    transform = dict(read.transform or timm.data.resolve_data_config(
        {}, pretrained_cfg=timm.get_pretrained_cfg(read.name).to_dict()))
    channels = getattr(eager, 'in_chans', transform['input_size'][0])
    if size is not None and tuple(size) != tuple(transform['input_size'][-2:]):
        transform['input_size'] = (channels, *size)
    if len(transform['mean']) != channels or len(transform['std']) != channels:
        raise UserError(f"the transform of {read.name} has means for {len(transform['mean'])} channels, but the model "
                        f'takes images of {channels}')
    height, width = transform['input_size'][-2:]
    export_form = create(read.name, exportable=True, **{**size_options(read.name, (height, width)), **read.options})
    export_form.load_state_dict(eager.state_dict())
    fuse_norms(export_form.eval())
    if not features:
        compose_linear(export_form)
    prepare_for_export(export_form)
    module, reference = _Outputs(export_form, features), _Outputs(eager, features)
    task = 'features' if features else 'classification'
    description = preprocessing(transform)
    metadata = describe(read.name, task, weights, (1, channels, height, width), description,
                        [] if features else read.classes, **({} if features else dict(postprocessing=dict(
                            type='sigmoid' if read.metadata.get('multi_label') else 'softmax', in_graph=False))))
    outputs, family = ('logits',), type(eager).__name__
    if features:
        outputs = map_names([entry['reduction'] for entry in eager.feature_info])
    subject = Subject(read.name, task, module, reference, (height, width), channels, outputs, metadata,
                      _SIZES.get(family, f'height and width of {family} cannot be dynamic here'),
                      _reader(transform, channels))
    subject = with_normalization(subject) if normalize else subject
    try:                                   # a wrong size ends before the conversion starts
        with torch.inference_mode():
            subject.eager(subject.example())
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f'{subject.name} does not accept images of {height} x {width}: '
                        f'{str(error).splitlines()[0]}') from error
    return subject


def map_names(strides: Sequence[int]) -> Tuple[str, ...]:
    """Return names of feature maps: `stride_N`, or `map_N` for maps of which several have one stride."""
    distinct = len(set(strides)) == len(strides)
    return tuple(f'stride_{stride}' if distinct else f'map_{n}' for n, stride in enumerate(strides))


def with_normalization(subject: Subject) -> Subject:
    """Put the normalization into the graph, which then takes values from 0 to 255."""
    metadata = copy.deepcopy(subject.metadata)
    metadata['preprocessing']['normalize_in_graph'] = True
    metadata['input']['range'] = [0, 255]
    before = subject.metadata['preprocessing']
    if 'pad' in before:                    # the border is normalized, too, so its color is now in pixels
        metadata['preprocessing']['pad']['value'] = [(value * std + mean) / before['scale'] for value, mean, std in zip(
            before['pad']['value'], before['mean'], before['std'])]
    prepare = subject.prepare
    mean, std = (torch.tensor(before[key]).view(1, -1, 1, 1) for key in ('mean', 'std'))
    return replace(
        subject,
        module=Normalize(subject.module, before).eval(),
        eager=Normalize(subject.eager, before).eval(),
        metadata=metadata,
        prepare=lambda file: (prepare(file) * std + mean) / before['scale'],
    )


def preprocessing(transform: Dict[str, Any]) -> Dict[str, Any]:
    """Describe an image transform for programs without timm.

    Args:
        transform: Arguments of `timm.data.create_transform`: input_size, crop_pct, crop_mode, interpolation, mean, std.

    Returns:
        dict(resize, crop, scale, mean, std, normalize_in_graph). If resize.size is a number, the shorter side is
        resized to it. If it is (height, width), the image is resized to that, or with keep_ratio to the smallest size
        that covers it. The center is cropped; then pixel values from 0 to 255 are multiplied by `scale`, `mean` is
        subtracted, and the difference is divided by `std`.

    Raises:
        UserError: The transform crops in a way that this description does not cover.
    """
    height, width = transform['input_size'][-2:]
    mode, share = transform.get('crop_mode') or 'center', transform.get('crop_pct') or 1.0
    if mode not in ('center', 'squash'):
        raise UserError(f"the transform has crop_mode={mode!r}; exported files describe 'center' and 'squash'")
    scaled = [math.floor(side / share) for side in (height, width)]
    keep_ratio = mode == 'center'
    shorter_side = keep_ratio and scaled[0] == scaled[1]
    return dict(
        resize=dict(size=scaled[0] if shorter_side else scaled, interpolation=transform.get('interpolation', 'bicubic'),
                    keep_ratio=keep_ratio),
        crop=[height, width],
        scale=1 / 255,
        mean=list(transform['mean']),
        std=list(transform['std']),
        normalize_in_graph=False,
    )


def describe(
        model: str,
        task: str,
        weights: str,
        shape: Sequence[int],
        transform: Dict[str, Any],
        labels: Sequence[str] = (),
        color: Optional[str] = None,
        **entries: Any,
) -> Dict[str, Any]:
    """Return the metadata of an exported model; the pipeline adds what depends on the format, and outputs.

    Args:
        model: Name of the model or config.
        task: 'classification', 'features', 'detection' or 'segmentation'.
        weights: Name or file of the weights, or 'random'.
        shape: Shape (1, C, H, W) of the input.
        transform: What `preprocessing` returns.
        labels: Names of the classes.
        color: 'RGB', 'BGR' or 'gray'; by default by the number of channels.
        entries: Other entries, such as the score threshold of a detector.
    """
    return {
        'subquad': __version__,
        'model': model,
        'task': task,
        'weights': weights,
        'input': {'name': 'image', 'shape': list(shape), 'layout': 'NCHW', 'dynamic': [], 'multiple_of': 1,
                  'color': color or ('gray' if shape[1] == 1 else 'RGB'), 'range': [0, 1]},
        'preprocessing': transform,
        'outputs': [],
        'labels': list(labels),
        **entries,
    }


def described(names: Sequence[str], outputs: Sequence[Tensor]) -> List[Dict[str, Any]]:
    """Return the entries of the metadata for outputs: name, shape and dtype of each."""
    return [dict(name=name, shape=list(y.shape), dtype=str(y.dtype).removeprefix('torch.'))
            for name, y in zip(names, outputs)]


def random_classifier(name: str, size: Optional[Sequence[int]] = None, **options: Any) -> Classifier:
    """Build a classifier with random weights, without classes.

    Raises:
        UserError: The name is unknown, or the model refuses an option or the size.
    """
    options = {**size_options(name, size or default_size(name)), **options}
    return Classifier(create(name, **options).eval(), name, options, [], {}, {})


def classifier_from(model: str, checkpoint: Optional[str] = None, allow_nonfinite: bool = False) -> Tuple[Classifier,
                                                                                                          str]:
    """Find the classifier that the command line names: (classifier, name of its weights or 'random').

    Args:
        model: timm name of a model, name of published weights (ARCH.TAG), or a weight file that names its model.
        checkpoint: Weight file, name of published weights, or tag of published weights of the model.
        allow_nonfinite: Accept weights that hold NaN or infinities.

    Raises:
        UserError: Model or weights are unknown or do not match.
    """
    if checkpoint is None:
        if not {'.', '/'} & set(model) and (timm.is_model(model) or not Path(model).exists()):
            return random_classifier(model), 'random'         # an unknown name is an error there
        return read_classifier(model, None, allow_nonfinite), Path(model).name
    known = f'{model}.{checkpoint}' in timm.list_pretrained(f'{model}.*') if timm.is_model(model) else False
    checkpoint = f'{model}.{checkpoint}' if known and not Path(checkpoint).exists() else checkpoint
    return read_classifier(checkpoint, model, allow_nonfinite), Path(checkpoint).name


def _reader(transform: Dict[str, Any], channels: int) -> Callable[[Path], Tensor]:
    """Return a function that reads an image file as the model's transform prepares it."""
    if channels not in (1, 3):
        raise UserError(f'the model takes images of {channels} channels; image files have 1 or 3')
    try:
        prepare = timm.data.create_transform(**transform)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f'transform: {one_line(error)}') from error

    def read(file: Path) -> Tensor:
        image = open_image(file)
        return prepare(image.convert('L') if channels == 1 else image)[None]
    return read


@torch.no_grad()
def _fuse_before_pooling(norm: nn.BatchNorm2d, layer: nn.Linear) -> None:
    """Fuse a BatchNorm into the classifier that takes the mean of its output, in place."""
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    layer.bias += layer.weight @ (norm.bias - norm.running_mean * scale)
    layer.weight *= scale


def fuse_norms(model: nn.Module) -> nn.Module:
    """Fuse every BatchNorm of a model in evaluation mode into the layer before it, in place, as runtimes would.

    Modules of this package and of timm name a convolution or linear layer and its norm by one of
    `_PAIRS`. A norm before the pooling of a head is fused into its classifier. nn.Identity replaces the norm, or the
    activation that timm's BatchNormAct2d includes. Outputs change by rounding only.
    """
    for module in model.modules():
        for layer_name, norm_name in _PAIRS:
            layer, norm = getattr(module, layer_name, None), getattr(module, norm_name, None)
            # In timm's DenseNet, the norm is before the layer.
            if type(norm) in (nn.BatchNorm2d, BatchNormAct2d) and type(layer) in (nn.Conv2d, nn.Linear) and (
                    norm.num_features == layer.weight.shape[0]):
                fuse = fuse_conv_bn_eval if isinstance(layer, nn.Conv2d) else fuse_linear_bn_eval
                setattr(module, layer_name, fuse(layer, norm))
                setattr(module, norm_name, norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity())
        if isinstance(module, ProjectionHead) and type(module.norm) is nn.BatchNorm2d and type(module.fc) is nn.Linear:
            _fuse_before_pooling(module.norm, module.fc)
            module.norm = nn.Identity()
    return model
