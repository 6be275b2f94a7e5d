"""Makes of a picture on white two on a transparent ground, NAME_light.png and NAME_dark.png, and removes it.

    python docs/two_grounds.py docs/source/performance/steps_tiny.png

For pictures that a benchmark or a run has drawn, whose figures are not kept. On a white page the light one looks as the
picture did. In the dark one lightness is turned round, so that black words are white; colours keep their hue.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeAlias

import matplotlib.image
import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.float32]  # [height, width, channels], from 0 to 1


def light(picture: Pixels) -> Pixels:
    """The same colours over white, where as much as possible of white is transparent. rgb in, rgba out."""
    return _over(picture, np.float32(1))


def dark(picture: Pixels) -> Pixels:
    """Lightness 1 - L for each L, and as much as possible of black is transparent. rgb in, rgba out."""
    turned = picture + 1 - picture.max(-1, keepdims=True) - picture.min(-1, keepdims=True)
    return _over(turned, np.float32(0))


def _over(picture: Pixels, ground: np.float32) -> Pixels:
    """Colour and opacity that give the picture when they are laid over a grey ground."""
    alpha = np.abs(picture - ground).max(-1, keepdims=True)
    colour = ground + (picture - ground) / np.maximum(alpha, 1e-6)
    return np.clip(np.concatenate([colour, alpha], -1), 0, 1).astype(np.float32)


def main(paths: list[str]) -> None:
    """Two pictures in the place of each."""
    for path in map(Path, paths):
        picture = matplotlib.image.imread(path)
        for kind in (light, dark):
            matplotlib.image.imsave(path.with_stem(f"{path.stem}_{kind.__name__}"), kind(picture[..., :3]))
        path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
