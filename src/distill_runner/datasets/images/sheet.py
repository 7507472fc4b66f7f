"""Contact sheets: PNG files that show images with captions, for people to look at."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TILE = 112
"""Width and height of a shown image, in pixels; smaller images are enlarged without smoothing."""
LINE = 15
"""Height of a line of a caption, in pixels."""
COLUMNS = 8


def save_sheet(file: Path, images: Sequence[Tensor], captions: Sequence[str]) -> None:
    """Save ``images``, each (H, W, C) of uint8 with 1 or 3 channels, eight in a row; equal images give equal bytes.

    Args:
        captions: one text for each image, of one or more lines; lines wider than the image are cut.
    """
    lines = max(caption.count("\n") + 1 for caption in captions)
    step, height = TILE + LINE // 2, TILE + LINE * lines + LINE // 2
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (step * min(COLUMNS, len(images)) + LINE // 2, height * rows + LINE // 2), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = LINE // 2 + number % COLUMNS * step, LINE // 2 + number // COLUMNS * height
        picture = Image.fromarray(pixels.squeeze(-1).numpy()).convert("RGB")
        factor = TILE / max(picture.size)
        picture = picture.resize((round(picture.width * factor), round(picture.height * factor)), _filter(factor))
        sheet.paste(picture, (left, top))
        for at, line in enumerate(caption.splitlines()):
            while draw.textlength(line, font) > TILE:
                line = line[:-2] + "…"
            draw.text((left, top + TILE + LINE * at), line, "black", font)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def _filter(factor: float) -> Image.Resampling:
    return Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
