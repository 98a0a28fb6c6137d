"""Inputs as pictures, without any library."""

import struct
import zlib

import torch

from spearpp.shapes import Float, Tensor

Shape = tuple[int, int, int]
"""Channels, height, width."""


def png(unit: Float[Tensor, "n"], shape: Shape) -> bytes:
    """One picture on the [0, 1] scale as a PNG file, grey for one channel, else its first three as colours."""
    channels, height, width = shape
    pixels = unit.detach().float().cpu().reshape(shape)[: 3 if channels >= 3 else 1]
    values = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    lines = b"".join(b"\x00" + line.tobytes() for line in values)
    colour = 2 if channels >= 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data) for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
