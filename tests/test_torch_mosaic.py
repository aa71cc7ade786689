"""How a kernel of Mosaic GPU is launched, as its host code tells: two object files that XLA made of
one kernel, by JAX 0.11.2 and by JAX 0.12.0.1, with NVIDIA's notes on its parameters. PyTorch and a
card are not needed."""

import struct
from pathlib import Path

import pytest

from tests.aot_executables import without_torch

_elf, _mosaic = without_torch("_elf"), without_torch("_mosaic")
UnknownError = without_torch("_protobuf").UnknownError

SAMPLES = Path(__file__).parent / "executables"
NAMES = ("mosaic_launch", "mosaic_spec")
FUNCTION = "_mlir_ciface_attention_forward_mosaic_mosaic_gpu"
KERNEL = "attention_forward_mosaic_mosaic_gpu_kernel"
# q, k, v and out [2, 1024, 4, 128] bfloat16, then lse.
ARRAYS = 5
RELOCATIONS_KIND = 1
# Where a section's header has its kind and its flags, and some of those.
KIND, FLAGS = 4, 8
RELOCATIONS_WITHOUT_ADDENDS, WRITABLE_IN_MEMORY = 9, 3

pytestmark = pytest.mark.skipif(
    not _elf.runs_host_code(), reason="the host code is for Linux on x86-64"
)


def host_of(name):
    return (SAMPLES / f"{name}.o").read_bytes()


def notes_of(name):
    return (SAMPLES / f"{name}.notes").read_bytes()


def code_of(notes, kernel=KERNEL):
    """An ELF file with nothing but a kernel's notes."""
    names = f"\0.nv.info.{kernel}\0.names\0".encode()
    first = 64
    content = notes + names
    headers = [(0, 0, 0, 0), (1, 1, first, len(notes))]
    headers += [(names.index(b".names"), 3, first + len(notes), len(names))]
    found = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<2HI3QI6H", 2, 190, 1, 0, 0,
        first + len(content), 0, 64, 0, 0, 64, len(headers), 2)  # fmt: skip
    for name, kind, start, size in headers:
        content += struct.pack("<2I4Q2I2Q", name, kind, 0, 0, start, size, 0, 0, 1, 0)
    return found + content


def with_header(host, section, field, value):
    """An object file with another number in a section's header, at a byte of it."""
    (start,) = struct.unpack_from("<Q", host, 40)
    numbers = [n for n, each in enumerate(_elf.sections(host)) if each.name == section]
    place = start + 64 * numbers[0] + field
    kind = "<I" if field == KIND else "<Q"
    return host[:place] + struct.pack(kind, value) + host[place + struct.calcsize(kind) :]


def record(name, host=None, notes=None, function=FUNCTION, arrays=ARRAYS):
    host, notes = host or host_of(name), notes or notes_of(name)
    return _mosaic.record(host, function, code_of(notes), KERNEL, arrays)


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_launch_needs(name):
    found = record(name)
    assert (found.grid, found.block, found.shared_bytes) == ((128, 1, 1), (256, 1, 1), 147544)
    parameters = found.parameters
    assert parameters.layout == ((0, 8), (48, 512))
    assert parameters.constant == bytes(560)
    # lse by its address; q, k, v and out by tensor maps.
    assert [place.argument for place in parameters.places] == [4, 0, 1, 2, 3]
    assert [place.offset for place in parameters.places] == [0, 48, 176, 304, 432]
    assert all(place.within == 0 for place in parameters.places)
    address, q, *_ = parameters.places
    assert address.map is None
    # [B * T, H, D] in blocks of 8 rows and 64 columns: bfloat16, a swizzle of 128 bytes.
    assert q.map.element == 9 and q.map.swizzle == 3
    assert q.map.sizes[:4] == (64, 8, 2, 128)
    row = 4 * 128 * 2
    assert q.map.strides == (row, 128, 8 * row, 256)
    assert q.map.tile == (64, 8, 2, 8, 1)


def test_both_versions_tell_the_same():
    first, second = map(record, NAMES)
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_known_is_refused(name):
    host, notes = host_of(name), notes_of(name)

    def refuse(match, **changes):
        with pytest.raises(UnknownError, match=match):
            record(name, **changes)

    refuse("no function", function="another")
    refuse("calls 'mosaic_gpu_init_tma_des_'", host=host.replace(b"tma_desc\0", b"tma_des_\0"))
    refuse("no ELF", host=b"\x7fELF\x01" + host[5:])
    refuse("no object file of x86-64", host=host[:18] + struct.pack("<H", 183) + host[20:])
    relocations = [each for each in _elf.sections(host) if each.name == ".rela.ltext"]
    data = relocations[0].data
    kind = struct.unpack_from("<I", data, 8)[0]
    assert kind == RELOCATIONS_KIND
    refuse(
        "relocation of kind 2",
        host=host.replace(data[:16], data[:8] + struct.pack("<I", 2) + data[12:16]),
    )
    variables = with_header(host, ".lrodata.cst32", FLAGS, WRITABLE_IN_MEMORY)
    refuse("has the variables '.lrodata.cst32'", host=variables)
    others = with_header(host, ".rela.ltext", KIND, RELOCATIONS_WITHOUT_ADDENDS)
    refuse("relocations of the form 9", host=others)
    # The notes of a parameter: its number, its place, and its size above other facts.
    first = notes.index(struct.pack("<BBHI", 4, 0x17, 12, 0)) + 4
    sizes = {struct.unpack_from("<IHHI", notes, first + n * 16)[1]: first + n * 16 for n in (0, 1)}

    def with_size(size):
        place = sizes[1] + 8
        (rest,) = struct.unpack_from("<I", notes, place)
        rest = rest & (1 << 18) - 1 | size << 18
        return notes[:place] + struct.pack("<I", rest) + notes[place + 4 :]

    assert record(name, notes=with_size(512)) == record(name)
    refuse("parameters of|holds a part of a tensor map", notes=with_size(504))
    skips = notes[: sizes[1] + 4] + struct.pack("<H", 5) + notes[sizes[1] + 6 :]
    refuse(r"the parameters \[0, 5\]", notes=skips)
    refuse(r"the parameters \[\]", notes=struct.pack("<2BH", 1, 0, 0))
    refuse("has 4096 arrays", arrays=4096)


def test_an_address_that_code_depends_on(monkeypatch):
    """As if the second run had other constants than the first."""
    whole = _mosaic._Run.of
    runs = []

    def of(self, *arguments):
        found = whole(self, *arguments)
        runs.append(found)
        return found if len(runs) == 1 else _mosaic.dataclasses.replace(found, shared_bytes=1)

    monkeypatch.setattr(_mosaic._Run, "of", of)
    with pytest.raises(UnknownError, match="depends on the addresses"):
        record("mosaic_launch")


def test_an_error_within_the_host_code_comes_out(monkeypatch):
    monkeypatch.setattr(_mosaic, "ELEMENTS", {})
    with pytest.raises(UnknownError, match="a tensor map has the type 7"):
        record("mosaic_spec")


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_within_the_host_code_comes_out(name, monkeypatch):
    def interrupted(self, *dimensions):
        raise KeyboardInterrupt

    monkeypatch.setattr(_mosaic._Run, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(name)


@pytest.mark.parametrize("name", NAMES)
def test_code_that_ends_in_another_way_is_not_run(name, monkeypatch):
    """It may have other arguments than those that it would be given."""
    monkeypatch.setattr(_elf.HostCode, "function", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr(_elf.HostCode, "needed", {"mosaic_gpu_init_tma_desc"})
    with pytest.raises(UnknownError, match=r"ends in \[\]"):
        record(name)


def test_where_memory_may_not_become_executable(monkeypatch):
    """As SELinux may have it: here the system refuses a protection that it does not know."""
    monkeypatch.setattr(_elf.mmap, "PROT_EXEC", 1 << 20)
    with pytest.raises(UnknownError, match="may not make memory executable"):
        record("mosaic_launch")
