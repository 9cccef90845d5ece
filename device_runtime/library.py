"""libtaste.so loaded: its functions through cffi, and the model that is linked into it as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cffi import FFI

from device_runtime.errors import DeviceError

_DTYPES = {b"f": "float32", b"i": "int32", b"u": "uint32"}
_KINDS = ("parameter", "state", "constant", "gradient", "activation", "scalar")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the tables. `shape` is canonical (-1 in front: the batch); `program` None: all share it."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    program: str | None

    def shape_at(self, batch_size: int) -> tuple[int, ...]:
        """The shape with the batch filled in."""
        return tuple(batch_size if extent < 0 else extent for extent in self.shape)


@dataclass(frozen=True)
class Block:
    """A block of a program: the boundary tensors that it reads and yields, and their gradients, None where none is."""

    name: str
    input: str | None
    output: str | None
    input_gradient: str | None
    output_gradient: str | None


@dataclass(frozen=True)
class Program:
    """A named program: its tensors, and its arena, which takes fixed_bytes + batch_size * per_sample_bytes."""

    name: str
    index: int
    input: str
    target: str | None
    output: str
    loss: str | None
    updates: bool
    fixed_bytes: int
    per_sample_bytes: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Library:
    """What `load_library` returns. `ffi` and `functions` are cffi's; everything else are facts of the model."""

    path: Path
    ffi: Any
    functions: Any
    model: Any
    name: str
    target: str
    features: tuple[str, ...]
    build_id: str
    minimum_batch: int
    classes: int
    seed: int
    input_shape: tuple[int, ...]
    programs: dict[str, Program]
    tensors: tuple[Tensor, ...]

    def find_program(self, name: str) -> Program:
        """The program called `name`; DeviceError (2) names the known ones."""
        if name not in self.programs:
            raise DeviceError(f"no program {name!r} in {self.path.name}. Use one of {', '.join(self.programs)}.", 2)
        return self.programs[name]

    def find_tensor(self, name: str, program: str | None = None) -> Tensor:
        """The stored tensor called `name`, or with `program` that program's arena tensor. DeviceError (2): none."""
        for tensor in self.tensors:
            stored = tensor.kind in ("parameter", "state", "constant")
            wanted = stored if program is None else not stored and tensor.program in (program, None)
            if tensor.name == name and wanted:
                return tensor
        place = f"program {program}" if program else f"model {self.name}"
        raise DeviceError(f"{place} has no tensor {name!r}. Look at Library.tensors.", 2)


def load_library(path: str | Path) -> Library:
    """Load libtaste.so and check that this CPU can run it.

    Raises DeviceError: 12 if the file cannot be loaded (of another architecture, say), 13 if the CPU lacks a feature.
    """
    path = Path(path).resolve()
    ffi, functions = _open(path)
    model = functions.taste_model_get()
    error = ffi.new("taste_error *")
    status = functions.taste_model_check_cpu(model, error)
    if status != 0:
        raise DeviceError(text(ffi, error.text), int(status))
    facts = ffi.new("taste_model_facts *")
    functions.taste_model_describe(model, facts)
    tensors = _tensors(ffi, functions, model, facts)
    return Library(
        path=path,
        ffi=ffi,
        functions=functions,
        model=model,
        name=text(ffi, facts.name),
        target=text(ffi, facts.target),
        features=tuple(text(ffi, facts.features).split()),
        build_id=text(ffi, facts.build_id),
        minimum_batch=int(facts.minimum_batch),
        classes=int(facts.classes),
        seed=int(facts.seed),
        input_shape=tuple(facts.input_shape[d] for d in range(facts.input_dims)),
        programs=_programs(ffi, functions, model, facts, tensors),
        tensors=tensors,
    )


def text(ffi: Any, characters: Any) -> str:
    """A C string."""
    return str(ffi.string(characters).decode("utf-8", "replace"))


def _open(path: Path) -> tuple[Any, Any]:
    """The library brings its own header along: the declarations are cut from it, so they cannot disagree."""
    first = FFI()
    first.cdef("const char *taste_header_text(void);")
    try:
        header = text(first, first.dlopen(str(path)).taste_header_text())
    except (OSError, AttributeError) as error:
        raise DeviceError(f"{path} cannot be loaded ({error}). Deploy the build for this board.", 12) from None
    begin, end = "/* cffi: begin */", "/* cffi: end */"
    ffi = FFI()
    ffi.cdef(header[header.index(begin) : header.index(end)])
    return ffi, ffi.dlopen(str(path))


def _tensors(ffi: Any, functions: Any, model: Any, model_facts: Any) -> tuple[Tensor, ...]:
    found = []
    facts, program = ffi.new("taste_tensor_facts *"), ffi.new("taste_program_facts *")
    for index in range(model_facts.tensor_count):
        functions.taste_model_tensor(model, index, facts)
        owner = None
        if facts.program >= 0:
            functions.taste_model_program(model, facts.program, program)
            owner = text(ffi, program.name)
        shape = tuple(facts.shape[d] for d in range(facts.dims))
        found.append(Tensor(text(ffi, facts.name), _KINDS[facts.kind], _DTYPES[facts.dtype], shape, owner))
    return tuple(found)


def _programs(
    ffi: Any, functions: Any, model: Any, model_facts: Any, tensors: tuple[Tensor, ...]
) -> dict[str, Program]:
    def name_of(index: int) -> str | None:
        return tensors[index].name if index >= 0 else None

    programs = {}
    facts, block = ffi.new("taste_program_facts *"), ffi.new("taste_block_facts *")
    for index in range(model_facts.program_count):
        functions.taste_model_program(model, index, facts)
        blocks = []
        for b in range(model_facts.block_count):
            functions.taste_model_block(model, index, b, block)
            edges = (block.input, block.output, block.input_gradient, block.output_gradient)
            blocks.append(Block(text(ffi, block.name), *map(name_of, edges)))
        name = text(ffi, facts.name)
        programs[name] = Program(
            name=name,
            index=index,
            input=tensors[facts.input].name,
            target=name_of(facts.target),
            output=tensors[facts.output].name,
            loss=name_of(facts.loss),
            updates=bool(facts.updates),
            fixed_bytes=int(facts.arena_fixed_bytes),
            per_sample_bytes=int(facts.arena_per_sample_bytes),
            blocks=tuple(blocks),
        )
    return programs
