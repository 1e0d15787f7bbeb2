"""Reading and writing the wire format of protocol buffers without a schema: varints, and the fields of messages."""


def write_varint(value: int) -> bytes:
    """Encode a non-negative ``value`` as a varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at offset ``at``. Return its value and the offset of the byte that follows it.

    Raises ``ValueError`` if the varint has more than ten bytes, and ``IndexError`` if the data ends inside it.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a varint has more than ten bytes")


def read_fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Return a list with a tuple (tag, start, end) for each field of the message ``data[at:end]``.

    ``start`` and ``end`` are the offsets of the value of the field in ``data``. A tag is ``field number << 3 | wire
    type``. Raises ``ValueError`` or ``IndexError`` if a field extends beyond the message, and ``ValueError`` for an
    unknown wire type.
    """
    fields = []
    while at < end:
        tag, start = read_varint(data, at) if data[at] > 127 else (data[at], at + 1)
        wire = tag & 7
        if wire == 2:
            size, start = read_varint(data, start) if data[start] > 127 else (data[start], start + 1)
            at = start + size
        elif wire == 0:
            _, at = read_varint(data, start)
        elif wire in (1, 5):
            at = start + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"unknown wire type {wire}")
        if at > end:
            raise ValueError("a field ends after the end of its message")
        fields.append((tag, start, at))
    return fields
