"""Write a classifier as a folder of the Hugging Face Hub: weights, timm's configuration and a model card."""
import argparse
import json
import re
import sys
from pathlib import Path
from string import Template
from typing import Any, Dict, Mapping, Optional

import huggingface_hub
import timm
from huggingface_hub.utils import HfHubHTTPError, HFValidationError, validate_repo_id

from ....backbones.weights import WeightsError, read_metadata, save_weights, shorten_path, some
from ....backbones.weights.resolve import published
from ...common.cli import UserError, one_line
from ...common.output import dumps
from ...common.paths import replaced_folder
from ..classification.weight_files import Classifier, assumed_transform, read_classifier

WEIGHTS_FILE, CONFIG_FILE, CARD_FILE = 'model.safetensors', 'config.json', 'README.md'
# The cards lie beside tools/, both in a checkout and in the installed package.
CARDS = Path(__file__).resolve().parents[3] / 'model_cards'
TEMPLATE = CARDS / 'template' / 'pushed_model.md'
# Entries of timm's pretrained_cfg that describe the weights, and not where timm's own weights are.
_DESCRIPTION = ('fixed_input_size', 'pool_size', 'first_conv', 'classifier', 'paper_ids')
_PREPROCESSING = ('input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std')
# timm reads these also if they are null.
_KEPT_NULL = ('pool_size', 'first_conv', 'classifier')
# timm sets the number of classes itself, and drop rates act in training only.
_NOT_MODEL_ARGUMENTS = ('num_classes', 'drop_rate', 'drop_path_rate')
_SHOWN_CLASSES = 20
_METRICS = {'accuracy/top1': 'top1', 'accuracy/top5': 'top5'}


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `subquad weights push`."""
    parser.add_argument('weights', metavar='FILE_OR_NAME', help='weights of a classifier: a file, or published weights '
                        'by name')
    parser.add_argument('--model', metavar='NAME', help='timm name of the model, for a file that does not contain it')
    parser.add_argument('--out', metavar='FOLDER', help='folder to write (default: hub/NAME)')
    parser.add_argument('--license', metavar='ID', help='license of the weights as the Hub names it, such as '
                        'apache-2.0 (default: that of published weights, or unknown)')
    parser.add_argument('--repo', metavar='OWNER/NAME', help='upload the folder to this repository of the Hub, which '
                        'is created if it is missing')
    parser.add_argument('--private', action='store_true', help='create the repository as a private one')
    parser.add_argument('--force', action='store_true', help='replace a folder that this command wrote')


def push_command(args: argparse.Namespace) -> None:
    """Write weights, config.json and model card to a folder that timm loads, and upload it to the Hugging Face Hub.

    `timm.create_model('local-dir:FOLDER', pretrained=True)` loads the folder, and `hf-hub:OWNER/NAME` after an upload.
    """
    if args.repo:
        _check_repo(args.repo)
    elif args.private:
        raise UserError('--private needs --repo OWNER/NAME')
    entry = published(args.weights)
    read = _read(args.weights, args.model)
    name = args.repo.partition('/')[2] if args.repo else entry.name if entry else read.name
    folder = Path(args.out).expanduser() if args.out else Path('hub') / name
    license = args.license or (entry.license if entry else 'unknown')
    if not re.fullmatch(r'[a-z0-9][a-z0-9.+-]*', license):
        raise UserError(f'--license must be an identifier of the Hub such as apache-2.0, mit or other, got {license!r}')
    _check_folder(folder, args.force)
    address = f'hf-hub:{args.repo}' if args.repo else f'local-dir:{folder.name}'
    config = timm_config(read)
    metadata = {**read.metadata, 'model': read.name, 'options': read.options, 'transform': read.transform}
    card = model_card(read, config, license, address, entry.source if entry else Path(args.weights).name,
                      entry.reported if entry else {})
    try:
        with replaced_folder(folder) as new:
            save_weights(read.model, new / WEIGHTS_FILE, metadata)
            (new / CONFIG_FILE).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
            (new / CARD_FILE).write_text(card, encoding='utf-8')
    except OSError as error:
        raise UserError(f'cannot write to {folder} ({error.strerror or error})') from error
    if license == 'unknown':
        print('the license in the card is "unknown"; --license ID names one', file=sys.stderr)
    repository = _upload(folder, args.repo, args.private) if args.repo else None
    address = f'hf-hub:{args.repo}' if args.repo else f'local-dir:{folder}'
    if args.json:
        print(dumps(dict(folder=str(folder), repository=repository, address=address), indent=2))
        return
    print(f'{folder}: {WEIGHTS_FILE}, {CONFIG_FILE}, {CARD_FILE}')
    if repository:
        print(f'uploaded to {repository}')
    print(f"load it with: timm.create_model('{address}', pretrained=True)")


def _read(checkpoint: str, name: Optional[str]) -> Classifier:
    """Read an image classifier; a transform that the file lacks becomes that of the model."""
    path, entry = shorten_path(checkpoint), published(checkpoint)
    is_ours = entry is None and checkpoint.endswith('.safetensors') and Path(checkpoint).exists()
    metadata = read_metadata(checkpoint) if is_ours else {}
    config = entry.config if entry else metadata.get('config') if 'model' not in metadata else None
    if config:
        raise UserError(f'{path} holds a detector or segmenter ({config}); only image classifiers can be pushed')
    read = read_classifier(checkpoint, name)
    if getattr(read.model, 'vocab_size', None):
        raise UserError(f'{path} classifies sequences of tokens; only image classifiers can be pushed')
    if read.transform.get('crop_border_pixels'):
        raise UserError(f'{path}: config.json of timm cannot hold crop_border_pixels of the transform')
    return read if read.transform else read._replace(transform=assumed_transform(read, path))


def _check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that holds files, unless they are those of an earlier call and `force` is given."""
    try:
        there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UserError(f'{folder}: {error.strerror or error}; give --out a new folder') from error
    files = {WEIGHTS_FILE, CONFIG_FILE, CARD_FILE}
    if there - files:
        raise UserError(f'{folder} holds other files ({some(sorted(there - files))}): give --out a new folder')
    try:
        ours = there == files and read_metadata(folder / WEIGHTS_FILE)
    except WeightsError:
        ours = False
    if there and not ours:
        raise UserError(f'{folder} holds files that this command did not write ({some(sorted(there))}): give --out a '
                        'new folder')
    if there and not force:
        raise UserError(f'{folder} holds a model already: give --force to replace it, or --out a new folder')


def timm_config(read: Classifier) -> Dict[str, Any]:
    """Return the content of config.json, from which timm and transformers build the model."""
    model, cfg, transform = read.model, read.model.pretrained_cfg, read.transform
    channels = getattr(model, 'in_chans', None) or cfg['input_size'][0]
    given = {key: transform[key] for key in _PREPROCESSING if transform.get(key) is not None}
    for key in {'mean', 'std'} & set(given):
        values = given[key] if isinstance(given[key], (list, tuple)) else [given[key]]
        given[key] = list(values) * channels if len(values) == 1 else list(values)
    size = given.get('input_size', cfg['input_size'])
    size = list(size) * 2 if isinstance(size, (list, tuple)) and len(size) == 1 else size
    size = [channels, *(size[-2:] if isinstance(size, (list, tuple)) else (size, size))]
    pretrained = {**{key: cfg.get(key) for key in (*_DESCRIPTION, *_PREPROCESSING)}, **given, 'input_size': size,
                  'num_classes': model.num_classes}
    if size[1:] != list(cfg['input_size'][1:]):
        pretrained['pool_size'] = None
    arguments = {key: value for key, value in read.options.items() if key not in _NOT_MODEL_ARGUMENTS}
    return {
        'architecture': read.name,
        'num_classes': model.num_classes,
        'num_features': model.num_features,
        **({'label_names': read.classes} if read.classes else {}),
        **({'model_args': arguments} if arguments else {}),
        'pretrained_cfg': {key: value for key, value in pretrained.items() if value is not None or key in _KEPT_NULL},
    }


def model_card(read: Classifier, config: Dict[str, Any], license: str, address: str, source: str,
               reported: Mapping[str, float]) -> str:
    """Fill model_cards/template/pushed_model.md.

    Args:
        read, config: The classifier, and its `timm_config`.
        license: The license of the weights: an identifier of the Hub, or a name that ends in '-license'.
        address: Address from which the example loads the model, 'hf-hub:OWNER/NAME' or 'local-dir:FOLDER'.
        source: Where the weights are from.
        reported: metric -> the figure that was published with the weights.
    """
    channels, height, width = config['pretrained_cfg']['input_size']
    mean, std = (', '.join(f'{value:g}' for value in config['pretrained_cfg'][key]) for key in ('mean', 'std'))
    provenance = read.metadata.get('provenance')
    if isinstance(provenance, dict) and 'source' in provenance:
        source += f" (converted from {provenance['source']}, sha256 {provenance.get('sha256')})"
    names = _cell(read.classes[:_SHOWN_CLASSES]) + (', ...' if len(read.classes) > _SHOWN_CLASSES else '')
    builder = timm.models.model_entrypoint(read.name)
    summary = ' '.join((builder.__doc__ or read.name).strip().split('\n')[0].split())
    return Template(TEMPLATE.read_text(encoding='utf-8')).substitute(
        # The Hub has a fixed list of identifiers; other licenses have a name beside `other`.
        license=f'other\nlicense_name: {license}' if license.endswith('-license') else license,
        title=address.partition(':')[2].rpartition('/')[2],
        description=re.split(r'(?<=[^.]\.)\s', summary)[0],                              # the first sentence
        address=address,
        channels=channels, height=height, width=width, num_classes=config['num_classes'],
        model=read.name,
        options=_cell(f'`{key}={value!r}`' for key, value in config.get('model_args', {}).items()),
        parameters=f'{sum(p.numel() for p in read.model.parameters()):,}',
        classes=f'{read.model.num_classes} ({names})' if read.classes else str(read.model.num_classes),
        input=f'{height} x {width}, mean {mean}, standard deviation {std}',
        source=_cell([source]),
        results=_results(read.metadata, reported),
        citation=_citation(builder.__module__.rpartition('.')[2]),
    )


def _cell(items: Any) -> str:
    """Join texts for a cell of a table, in which bars and line breaks would end the cell."""
    return ', '.join(' '.join(str(item).replace('|', r'\|').split()) for item in items) or '-'


def _results(metadata: Dict[str, Any], reported: Mapping[str, float]) -> str:
    """Return a table of what was published with the weights, and of what training stored with them."""
    rows = [f'| {metric}, reported with the weights | {value:g} |' for metric, value in reported.items()]
    rows += [f'| {metric}, %, in validation during training | {metadata[key]:.1f} |' for key, metric in _METRICS.items()
             if isinstance(metadata.get(key), (int, float))]
    if not rows:
        return 'No results are stored with the weights.'
    return '\n'.join(['| metric | value |', '| --- | --- |', *rows])


def _citation(family: str) -> str:
    """Return the section Citation of the family's card."""
    for card in sorted(CARDS.glob('*.md')):
        if family.startswith(card.stem):
            found = re.search(r'^## Citation\n+(.*?)\s*(?=^## |\Z)', card.read_text(encoding='utf-8'),
                              re.MULTILINE | re.DOTALL)
            if found:
                return found[1]
    return 'See the documentation of timm.'


def _upload(folder: Path, repo: str, private: bool) -> str:
    """Create the repository on the Hub if it is missing, upload the folder, and return the repository's address."""
    api = huggingface_hub.HfApi(library_name='subquad')
    try:
        # Without --private the organization's own default applies.
        address = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message='Add model')
    except (OSError, *HfHubHTTPError.__bases__) as error:       # errors of the HTTP library are bases of the Hub's
        raise UserError(f'{folder} is written, but the upload to {repo} failed ({one_line(error)[:300]}); run the same '
                        'command with --force to try again') from error
    return str(address)


def _check_repo(repo: str) -> None:
    """Check the name of a repository, and that there is a token, before anything is written."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f'--repo: {one_line(error)}') from error
    if repo.count('/') != 1:
        raise UserError(f'--repo must be OWNER/NAME, got {repo!r}')
    if not huggingface_hub.get_token():
        raise UserError('--repo needs a token of the Hugging Face Hub: run `hf auth login` or set HF_TOKEN, or leave '
                        'out --repo to write the folder only')
