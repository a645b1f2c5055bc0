"""`subquad weights convert`: find the model of a weight file, convert the file, and say what was done."""
import argparse
import sys
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ....backbones.weights import WeightsError, check_options, match_to_model, read_file, shorten_path
from ....backbones.weights.convert import FORMATS, WRITTEN, convert, published_format
from ....backbones.weights.metadata import dataset_classes
from ....backbones.weights.registry import of_arch
from ....backbones.weights.resolve import published, resolve
from ...common.cli import UserError, quiet
from ...common.output import dumps
from ..classification.weight_files import config_metadata, published_transform, sketch
from ..config import is_classifier, load
from ..zoo import create, our_models

# Beginning of keys that only files of one kind of detector or segmenter have -> beginning of the names of its configs.
_KINDS = (('roi_head.mask_head.', 'mask-rcnn_'), ('decode_head.psp_modules.', 'upernet_'), ('ssd_heads.', 'ssdlite_'),
          ('seg_head.aspp.', 'deeplabv3_'), ('seg_head.psp_layer.', 'pspnet_'), ('segmentation_head.', 'deeplabv3_'))
# Keys whose first dimension is the number of classes.
_CLASSIFIERS = ('decode_head.conv_seg.weight', 'seg_head.classifier.block.conv.weight',
                'segmentation_head.classifier.convolution.weight')
_COCO = 80
_DENSE = ('backbone.', 'encoder.conv_1.', 'segmentation_head.')


class Target(NamedTuple):
    """The model of a weight file."""
    name: str                   # its timm name or the name of its config
    model: nn.Module            # the model on the meta device
    metadata: Dict[str, Any]    # what the new file says about it
    assumed: str = ''           # how the model was found, if neither the user nor the file named it


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `convert_command`."""
    parser.add_argument('file', metavar='NAME_OR_FILE', help='the name of published weights, or a weight file')
    network = parser.add_mutually_exclusive_group()
    network.add_argument('--model', metavar='NAME',
                         help='timm name of the classifier (subquad models lists them)')
    network.add_argument('--config', metavar='CONFIG',
                         help='config of the detector or segmenter (subquad configs lists them)')
    parser.add_argument('--out', metavar='FILE', help='the new file (default: named after the model, in the current '
                        'folder)')
    parser.add_argument('--to', default='subquad', choices=WRITTEN,
                        help='format whose key names are written (default: subquad)')
    parser.add_argument('--reference', metavar='FILE', help='timm\'s or the authors\' file of the same MobileViTv2, '
                        'to check the color order of a transformers checkpoint')


def convert_command(args: argparse.Namespace) -> int:
    """Convert a weight file to safetensors with metadata, or to the names that its authors use.

    Files of a family's authors, of cvnets, timm, transformers, this package and training runs can be converted. The
    model is found by the keys and shapes unless it is given. One line or JSON is printed on stdout, and notes on
    stderr.
    """
    name = shorten_path(args.file)
    try:
        entry = published(args.file)
        source = resolve(args.file)
        content = read_file(source, args.choice)
        target = _target(content, name, args.model, args.config, entry)
        out = Path(args.out).expanduser() if args.out else Path(
            Path(target.name).stem + ('' if args.to == 'subquad' else f'_{args.to}') + FORMATS[args.to].suffix)
        if not out.parent.is_dir():
            raise UserError(f'there is no folder {out.parent}; create it, or give another file with --out')
        if out.exists():
            raise UserError(f'{out} exists; remove it, or give another file with --out')
        reference = resolve(args.reference) if args.reference else None
        result = convert(source, out, target.model, args.to, args.choice, target.metadata, reference, content)
    except (WeightsError, ValueError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f'{error.filename or name}: {error.strerror or error}') from error
    for note in filter(None, [target.assumed, *result.notes]):
        print(note, file=sys.stderr)
    provenance = result.metadata['provenance']
    if args.json:
        print(dumps(dict(path=str(result.path), name=target.name, tensors=len(result.weights), provenance=provenance),
                    indent=2))
        return 0
    print(f'wrote {result.path}: {len(result.weights)} tensors of {target.name} under the names of {args.to}, from '
          f"{name} (sha256 {provenance['sha256'][:12]})")
    return 0


def _target(content: Any, path: str, model: Optional[str], config: Optional[str], entry: Any) -> Target:
    """Find the model of a weight file, of which `entry` is the description if it is published by a name."""
    if entry is not None and not (model or config):
        if entry.config:
            return _dense_target(entry.config, content)
        return _classifier_target(entry.arch, content, {'transform': published_transform(entry)}, path)
    config = config or (None if model else content.metadata.get('config'))
    if config:
        return _dense_target(config, content)
    dense = any(key.startswith(_DENSE) for key in content.weights)
    if dense and not model:
        config, how = _find_config(content, path)
        return _dense_target(config, content)._replace(assumed=how)
    known = content.metadata or config_metadata(content.runner_meta.get('cfg'))
    if model or 'model' in known:
        same = model in (None, known.get('model'))
        return _classifier_target(model or known['model'], content, known if same else {}, path)
    name = _find_classifier(content.weights)
    if name is None:
        raise UserError(f'{path} is not a classifier of this package, by its keys and shapes: give --model NAME '
                        '(subquad models lists them), or --config CONFIG for a detector or segmenter')
    return _classifier_target(name, content, {}, path)._replace(
        assumed=f'{path} is taken as {name} by its keys and shapes; --model NAME names another network')


def _classifier_target(name: str, content: Any, known: Dict[str, Any], path: str) -> Target:
    create(name, device='meta')                          # raises UserError with the nearest names
    options = check_options(name, known.get('options') or {}, path)
    model, options = sketch(name, options, content.weights)
    metadata = {key: known[key] for key in ('classes', 'transform') if known.get(key)}
    return Target(name, model, dict(model=name, options=options, **metadata))


def _find_classifier(weights: Dict[str, Any], headless: bool = False) -> Optional[str]:
    """Return the name of the first network whose keys and shapes are those of the weights."""
    family = FORMATS[published_format(weights)].family.lower()
    if not family and not any(key.startswith(('stages.', 'backbone.stages.', 'encoder.')) for key in weights):
        return None
    for name in our_models():
        if family not in name or name.endswith('_crisscross'):         # these have the shapes of the published network
            continue
        model, _ = sketch(name, {}, {} if headless else weights)
        try:
            match_to_model(weights, model, 'the file', headless=headless)
        except WeightsError:
            continue
        return name
    return None


def _find_config(content: Any, path: str) -> Tuple[str, str]:
    """Return the config of a published detector or segmenter, and a sentence that says so."""
    weights = content.weights
    kind = next((kind for key, kind in _KINDS if any(name.startswith(key) for name in weights)), '')
    if kind and published_format(weights) != 'subquad':
        count = len(dataset_classes(content.runner_meta)) or next(
            (len(weights[key]) for key in _CLASSIFIERS if key in weights and weights[key].ndim), _COCO)
        for entry in of_arch(_find_classifier(weights, headless=True) or ''):
            if entry.config and entry.config.startswith(kind) and entry.num_classes == count:
                return entry.config, (f'{path} is taken as {entry.config} by its keys and shapes; --config CONFIG '
                                      'names another one')
    raise UserError(f'{path} holds a detector or segmenter, and none of the configs for published files fits it: give '
                    '--config CONFIG (subquad configs lists them)')


def _dense_target(name: str, content: Any) -> Target:
    config = load(name)
    with quiet():                                        # for what imported modules print
        from mmengine.registry import MODELS, init_default_scope

        from ..dense.task import metadata
        from ..training.building import build
    if is_classifier(config):
        raise UserError(f"{name} is the config of a classifier: give --model {config.model.get('name', 'NAME')}")
    init_default_scope(config.get('default_scope', 'mmengine'))
    with torch.device('meta'):
        model = build(MODELS, config.model, 'model')
    found = metadata(config)
    classes = dataset_classes(content.runner_meta)
    own = {key: content.metadata[key] for key in ('classes', 'network') if key in content.metadata}
    return Target(name, model, {**found, **({'classes': classes} if classes else {}), **own})
