"""Riegeli: the file format of records in which XLA stores an executable.

    file      blocks of 64 KiB, each with a header of 24 bytes at its start
    chunk     a header of 40 bytes, then the sizes of its records and the records, both compressed
    record    bytes: here one message of protocol buffers

Only what XLA writes is read: chunks of records ("r"), uncompressed or compressed by Snappy. Any
other kind of chunk or compression is an `UnknownError`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from ato_torch._protobuf import UnknownError, read_varint, read_varints

BLOCK, BLOCK_HEADER, CHUNK_HEADER = 1 << 16, 24, 40  # bytes
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f00000000000000004000000000000000"
    "91bac23c9287e1a90000000000000000e19f13c0e9b1c37273000000000000000000000000000000"
)


# A chunk of records begins with one byte that names the compression of what follows.
UNCOMPRESSED, SNAPPY = b"\0", b"s"
CHUNK_OF_RECORDS = b"r"


@dataclasses.dataclass(frozen=True)
class ChunkHeader:
    """The fields of a chunk's header that are read; hashes are skipped."""

    size: int  # bytes of the chunk as stored
    kind: bytes
    count: int  # records
    decoded_size: int  # bytes of all records

    @classmethod
    def read(cls, data: bytes) -> ChunkHeader:
        """The header in the first `CHUNK_HEADER` bytes, all numbers little endian.

            0 hash    8 size    16 hash    24 kind    25 count    32 decoded_size
        """
        return cls(
            size=int.from_bytes(data[8:16], "little"),
            kind=data[24:25],
            count=int.from_bytes(data[25:32], "little"),
            decoded_size=int.from_bytes(data[32:40], "little"),
        )


class Element(enum.IntEnum):
    """The low two bits of a Snappy tag: literal bytes, or a copy of bytes already written."""

    LITERAL = 0
    COPY_WITH_1_BYTE_OFFSET = 1
    COPY_WITH_2_BYTE_OFFSET = 2
    COPY_WITH_4_BYTE_OFFSET = 3


LONGEST_SHORT_LITERAL = 60  # a longer literal stores its length in 1 to 4 bytes after the tag


def records(data: bytes) -> Iterator[bytes]:
    """The records of a Riegeli file."""
    if not data.startswith(SIGNATURE):
        raise UnknownError("it is not in XLA's format of records")
    # Every block starts with a header that belongs to no chunk, also in the middle of a chunk.
    data = b"".join(
        data[start + BLOCK_HEADER : start + BLOCK] for start in range(0, len(data), BLOCK)
    )
    place = CHUNK_HEADER  # past the signature's own chunk
    while place < len(data):
        header = ChunkHeader.read(data[place : place + CHUNK_HEADER])
        start = place + CHUNK_HEADER
        chunk, place = data[start : start + header.size], start + header.size
        # Riegeli pads a chunk that has fewer bytes than records. Such padding is not read here.
        is_padded = header.count > header.size
        if header.kind != CHUNK_OF_RECORDS or place > len(data) or is_padded:
            raise UnknownError(
                f"it has a chunk of {header.count} records of kind {header.kind!r}"
            )
        length, begin = read_varint(chunk, 1)
        sizes = read_varints(_decompressed(chunk[:1], chunk[begin : begin + length]))
        values = _decompressed(chunk[:1], chunk[begin + length :])
        if len(sizes) != header.count or not sum(sizes) == len(values) == header.decoded_size:
            raise UnknownError("the records of a chunk are not as long as it says")
        end = 0
        for size in sizes:
            end += size
            yield values[end - size : end]


def _decompressed(compression: bytes, data: bytes) -> bytes:
    if compression == UNCOMPRESSED:
        return data
    if compression != SNAPPY:
        raise UnknownError(f"it is compressed by a method {compression!r}")
    size, place = read_varint(data, 0)
    return decompress_snappy(data[place:], size)


def decompress_snappy(data: bytes, size: int) -> bytes:
    """The `size` bytes that Snappy compressed to `data`."""
    stated, place = read_varint(data, 0)
    found = bytearray()
    while place < len(data):
        tag = data[place]
        place += 1
        element, length = Element(tag & 3), (tag >> 2) + 1
        if element is Element.LITERAL:
            if length > LONGEST_SHORT_LITERAL:
                wide = length - LONGEST_SHORT_LITERAL
                length = int.from_bytes(data[place : place + wide], "little") + 1
                place += wide
            found += data[place : place + length]
            place += length
            continue
        if element is Element.COPY_WITH_1_BYTE_OFFSET:
            length = (tag >> 2 & 7) + 4
            back = (tag >> 5) << 8 | data[place]
            place += 1
        else:
            wide = 2 if element is Element.COPY_WITH_2_BYTE_OFFSET else 4
            back = int.from_bytes(data[place : place + wide], "little")
            place += wide
        start = len(found) - back
        if back == 0 or start < 0:
            raise UnknownError("its compressed bytes point outside")
        part = found[start : start + length]
        while len(part) < length:  # a copy may overlap its own output and repeats it then
            part += part[: length - len(part)]
        found += part
    if not len(found) == stated == size:
        raise UnknownError("its compressed bytes are not as many as they say")
    return bytes(found)
