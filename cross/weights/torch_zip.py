"""PyTorch's zip format (since 1.6): NAME/data.pkl, and one member NAME/data/KEY a storage, none of them compressed."""

from __future__ import annotations

from io import BytesIO
from zipfile import ZIP_STORED, ZipFile

from cross.errors import CorruptInputError
from cross.weights.element_types import Array
from cross.weights.pickle_machine import read_pickle
from cross.weights.torch_tensors import KNOWN, Storage, storage_of, tensors_of, values_of

PICKLE = "data.pkl"


def read_torch_zip(archive: ZipFile, file_bytes: int) -> dict[str, Array]:
    """Tensors by name. CorruptInputError, or whatever a damaged archive provokes in Python's zipfile."""
    members = {info.filename: info for info in archive.infolist()}
    (pickle,) = (name for name in members if name.rpartition("/")[2] == PICKLE)
    folder = pickle.removesuffix(PICKLE)
    if any(info.compress_type != ZIP_STORED for info in members.values()):
        raise CorruptInputError("its members are compressed, which PyTorch's never are. Save it again.")
    if sum(info.file_size for info in members.values()) > file_bytes:
        raise CorruptInputError("its members overlap. Save it again.")
    order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in members else b"little"
    if order != b"little":
        raise CorruptInputError("its numbers are big-endian. Save it on a little-endian machine.")
    storages: dict[str, bytes] = {}

    def stored(storage: Storage) -> bytes:
        if storage.key not in storages:
            storages[storage.key] = archive.read(f"{folder}data/{storage.key}")
        return storages[storage.key]

    tensors = tensors_of(read_pickle(BytesIO(archive.read(pickle)), KNOWN, storage_of))
    return values_of(tensors, stored, file_bytes)
