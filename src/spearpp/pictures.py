"""Show inputs as pictures without an imaging library: PNG files, and a gallery for notebooks."""

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence

import torch

from spearpp.types import Float, Tensor

Shape = tuple[int, int, int]
"""(channels, height, width) of an image."""
MIN_SIDE = 8
"""Smallest side in pixels at which a row of numbers counts as a square image. A design choice: scikit-learn's digits,
the smallest images in use here, have 8 x 8 pixels."""
BLUR_BLOCKS = 4
"""Number of blocks per side of a blurred picture. A design choice: 16 colours do not show what is on a picture."""
GALLERY_SIZE = 64
"""Largest number of pictures in a gallery. A design choice that keeps the output of a notebook cell short."""


def guess_shape(features: int) -> Shape | None:
    """Return the shape of the square colour or grey image with this number of values, or None if there is none.

    >>> guess_shape(3072), guess_shape(784), guess_shape(30)
    ((3, 32, 32), (1, 28, 28), None)
    """
    for channels in (3, 1):
        side = math.isqrt(features // channels)
        if side >= MIN_SIDE and channels * side * side == features:
            return channels, side, side
    return None


def on_unit_scale(inputs: Float[Tensor, "k n"], shape: Shape) -> Float[Tensor, "k n"]:
    """Map inputs with an unknown normalisation to the [0, 1] scale.

    Every channel is scaled by its range over all inputs. Inputs on this scale already, up to 0.01, are kept.
    """
    if not inputs.numel() or (float(inputs.min()) >= -0.01 and float(inputs.max()) <= 1.01):
        return inputs
    channels = inputs.reshape(len(inputs), shape[0], -1)
    low, high = channels.amin((0, 2))[:, None], channels.amax((0, 2))[:, None]
    return ((channels - low) / (high - low).clamp_min(1e-12)).reshape(inputs.shape)


def blur(inputs: Float[Tensor, "k n"], shape: Shape) -> Float[Tensor, "k n"]:
    """Replace every picture by 4 x 4 blocks of its mean colours. The blur cannot be undone.

    >>> blur(torch.arange(64.0)[None], (1, 8, 8)).unique().numel()
    16
    """
    images = inputs.reshape(-1, *shape)
    small = torch.nn.functional.adaptive_avg_pool2d(images, (min(BLUR_BLOCKS, shape[1]), min(BLUR_BLOCKS, shape[2])))
    return torch.nn.functional.interpolate(small, size=shape[1:], mode="nearest").reshape(inputs.shape)


def png(unit: Float[Tensor, "n"], shape: Shape) -> bytes:
    """Return one picture on the [0, 1] scale as a PNG file.

    A picture with at least three channels shows the first three as red, green and blue. Others show the first in grey.
    """
    channels, height, width = shape
    pixels = unit.detach().float().cpu().reshape(shape)[: 3 if channels >= 3 else 1]
    values = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    lines = b"".join(b"\x00" + line.tobytes() for line in values)
    colour = 2 if channels >= 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return file


def data_uri(picture: bytes) -> str:
    """Return a PNG file as a data URI, for an HTML page."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def gallery(inputs: Float[Tensor, "k n"], captions: Sequence[str]) -> str:
    """Return the first inputs as HTML pictures with captions, for notebooks.

    The result is an empty string if the inputs are not images.
    """
    shape = guess_shape(inputs.shape[1]) if inputs.ndim == 2 and len(inputs) else None
    if shape is None:
        return ""
    shown = on_unit_scale(inputs.detach().float().cpu(), shape)[:GALLERY_SIZE]
    figures = [
        f'<figure style="display:inline-block;margin:3px;text-align:center"><img src="{data_uri(png(unit, shape))}" '
        f'alt="{html.escape(caption)}" style="width:64px;image-rendering:pixelated"><figcaption '
        f'style="font-size:10px">{html.escape(caption)}</figcaption></figure>'
        for unit, caption in zip(shown, captions, strict=False)
    ]
    more = len(inputs) - len(figures)
    return f"<div>{''.join(figures)}</div>" + (f"<p>and {more} more</p>" if more > 0 else "")
