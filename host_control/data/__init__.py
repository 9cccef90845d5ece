"""Data sets as people have them -> the packed format that a board reads (docs/data.md).

read_data_set(source, options)  DataSet         what lies there, recognised by looking
pack(data_set, out, options)    Packed          train.safetensors and test.safetensors in a folder
open_packed(folder)             PackedDataSet   paths, shapes, classes, mean and std, checked
packed_for(data, options)       Packed          the packed form of anything, packed once into a cache
decode_images(paths, options)   uint8 [N,C,H,W] single images, prepared as the packed ones were
"""

from host_control.data.cache import packed_for
from host_control.data.data_set import DataSet, PackOptions, Split
from host_control.data.images import decode_images
from host_control.data.packed import PackedDataSet, PackedSplit, open_packed
from host_control.data.packing import Packed, pack
from host_control.data.read import read_data_set

__all__ = [
    "DataSet",
    "PackOptions",
    "Packed",
    "PackedDataSet",
    "PackedSplit",
    "Split",
    "decode_images",
    "open_packed",
    "pack",
    "packed_for",
    "read_data_set",
]
