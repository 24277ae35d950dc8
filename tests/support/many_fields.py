"""Requests of more fields than can be looked at, by the field that there are too many of."""

MIB = 2**20


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    head, length = bytes([number << 3 | 2]), len(content)
    while length > 127:
        head += bytes([length & 127 | 128])
        length >>= 7
    return head + bytes([length]) + content


EMPTY = b"\x0a\x00"  # field 1, with nothing in it
TOO_MANY: dict[str, bytes] = {
    "chat.messages": field(5, EMPTY * 4 * MIB),
    "chat.messages.parts": field(5, field(1, field(2, b"") * 4 * MIB)),
    "chat.template_variables.fields.value.list_value.values": field(
        5, field(2, field(1, field(1, b"a") + field(2, field(6, EMPTY * 4 * MIB))))
    ),
    "token_ids.ids": field(4, field(1, b"\x01" * 8 * MIB)),
    "sampling.logit_bias": field(6, field(9, b"") * 4 * MIB),
    "stopping.stop": field(7, field(3, b"") * 4 * MIB),
    "media": field(10, b"") * 4 * MIB,
    "request": b"\xf8\x7f\x01" * 2 * MIB,  # a field that there is none of
}
