"""TFLite's own metadata in a file: the colors and the normalization of the input, and the labels of a classifier."""
from pathlib import Path
from typing import Any, Dict, List, Union

import flatbuffers
import numpy as np
from ai_edge_litert.schema_py_generated import BufferT, MetadataT, ModelT
from ai_edge_litert.tools import flatbuffer_utils

_LABELS = 'labels.txt'
# The tables of TFLite's metadata_schema.fbs, with the fields up to the last one that is written.
_FIELDS = {
    'ModelMetadata': 'name description version subgraph_metadata author license associated_files min_parser_version',
    'SubGraphMetadata': 'name description input_tensor_metadata output_tensor_metadata',
    'TensorMetadata': 'name description dimension_names content process_units stats associated_files',
    'Content': 'content_properties_type content_properties',
    'ImageProperties': 'color_space',
    'ProcessUnit': 'options_type options',
    'NormalizationOptions': 'mean std',
    'AssociatedFile': 'name description type',
}
# Values of its unions and enumerations. It has no BGR, which is unknown to it.
_IMAGE_PROPERTIES, _NORMALIZATION_OPTIONS, _TENSOR_AXIS_LABELS = 2, 1, 2
_COLORS = {'BGR': 0, 'RGB': 1, 'gray': 2}
_Table = Dict[int, Any]          # number of a field -> value


def add_metadata(path: Path, metadata: Dict[str, Any]) -> None:
    """Write the buffer TFLITE_METADATA into a file of one graph.

    `metadata` are those of this package, whose graph takes images (1, H, W, C).
    """
    model = flatbuffer_utils.read_model_from_bytearray(path.read_bytes())
    model.metadata.append(MetadataT('TFLITE_METADATA', len(model.buffers)))
    builder = flatbuffers.Builder()
    builder.Finish(_add(builder, _described(metadata, _output_names(model))), b'M001')
    model.buffers.append(BufferT(np.frombuffer(builder.Output(), np.uint8)))
    path.write_bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def associated_files(metadata: Dict[str, Any]) -> Dict[str, str]:
    """Return the files to which TFLITE_METADATA refers, by their names in the archive at the end of the file."""
    has_labels = metadata['task'] == 'classification' and metadata['labels']
    return {_LABELS: '\n'.join(metadata['labels'])} if has_labels else {}


def _output_names(model: ModelT) -> List[str]:
    """Return the names of the outputs in the order of the graph, which is not that of the signature."""
    names = {output.tensorIndex: output.name.decode() for output in model.signatureDefs[0].outputs}
    return [names[index] for index in model.subgraphs[0].outputs]


def _described(metadata: Dict[str, Any], outputs: List[str]) -> _Table:
    given, steps = metadata['input'], metadata['preprocessing']
    mean, std = (np.array(steps[name]) / steps['scale'] for name in ('mean', 'std'))        # of values up to 255
    if steps['normalize_in_graph']:
        mean, std = np.zeros_like(mean), np.ones_like(std)
    image = _table(
        'TensorMetadata',
        name=given['name'],
        content=_table('Content', content_properties_type=_IMAGE_PROPERTIES,
                       content_properties=_table('ImageProperties', color_space=_COLORS[given['color']])),
        process_units=[_table('ProcessUnit', options_type=_NORMALIZATION_OPTIONS,
                              options=_table('NormalizationOptions', mean=mean, std=std))],
    )
    files = [_table('AssociatedFile', name=name, type=_TENSOR_AXIS_LABELS) for name in associated_files(metadata)]
    results = [_table('TensorMetadata', name=name, associated_files=files) for name in outputs]
    graph = _table('SubGraphMetadata', input_tensor_metadata=[image], output_tensor_metadata=results)
    return _table('ModelMetadata', name=metadata['model'], subgraph_metadata=[graph], min_parser_version='1.0.0')


def _table(kind: str, **fields: Any) -> _Table:
    numbers = _FIELDS[kind].split()
    return {numbers.index(name): value for name, value in fields.items()}


def _add(builder: flatbuffers.Builder, value: Union[str, np.ndarray, List[_Table], _Table]) -> int:
    """Write a value after those that it holds, and return its place."""
    if isinstance(value, str):
        return builder.CreateString(value)
    if isinstance(value, np.ndarray):
        return builder.CreateNumpyVector(value.astype(np.float32))
    if isinstance(value, list):
        places = [_add(builder, item) for item in value]
        builder.StartVector(4, len(places), 4)
        for place in reversed(places):
            builder.PrependUOffsetTRelative(place)
        return builder.EndVector()
    places = {number: _add(builder, item) for number, item in value.items() if not isinstance(item, int)}
    builder.StartObject(max(value) + 1)
    for number, item in value.items():
        if isinstance(item, int):                      # the numbers of this schema that are written have one byte
            builder.PrependUint8Slot(number, item, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(number, places[number], 0)
    return builder.EndObject()
