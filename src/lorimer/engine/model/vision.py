"""Images of vision-language models: from a file to the embeddings that replace its placeholder tokens.

``Vision`` holds the frozen parts of such a model besides its language model: the image processor and the vision tower.
Images are decoded and counted when they arrive. For the pass that needs an image, the tower computes one row for each
of its tokens, without adapter or gradient; rows replace the embeddings of placeholders. The language model attends to
them causally, as to any token, so sequences with images are packed and cached like all others. A family that needs more
than this is not in ``FAMILIES``, and its images are refused.

Legend: T tokens of a pass or a sequence, N tokens of an image, H hidden size.
"""

import hashlib
import io
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText

from lorimer.engine.messages import ImageInput
from lorimer.engine.model.device import Device
from lorimer.engine.model.images import open_picture
from lorimer.errors import InvalidInput, ModelRefused

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava")
"""The ``model_type`` of models in which an image is one run of placeholders with causal attention."""
_LLAVA_TOWER = "clip_vision_model"
"""Other versions need tokens between the rows of an image, or have not been compared."""
TEXT_ONLY = "it reads text only"
_KEPT_BYTES, _KEPT_IMAGES = 128 << 20, 256
"""Size of the cache of rows: a prompt is computed in pieces, and datums of an operation share images."""


def model_class(config: Any, name: str) -> Any:
    """Return the class of transformers that opens a model with this configuration."""
    if config.model_type in FAMILIES:
        return AutoModelForImageTextToText
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelRefused(
            f"{name!r} is a {config.model_type!r} model; a causal language model is needed, or one with images of the"
            f" families {', '.join(FAMILIES)}"
        )
    return AutoModelForCausalLM


@dataclass(frozen=True, eq=False)
class ReadImage:
    """A decoded and validated image, and its length in tokens."""

    file: ImageInput
    digest: bytes
    num_tokens: int
    grid: tuple[int, ...] | None = None
    """Patches by time, height and width, if the model has positions of three dimensions."""


@dataclass(frozen=True)
class ImageRows:
    """The input of the language model for one image."""

    rows_NH: Tensor
    layers: list[Tensor]
    """``(N, H)`` each, added to the hidden states after the first layers (Qwen3-VL)."""

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in (self.rows_NH, *self.layers))


@dataclass(frozen=True)
class SequenceImages:
    """The images of one sequence."""

    tokens: NDArray[np.int64]
    """``(T,)``, placeholders where the images are."""
    placed: list[tuple[int, ReadImage]]
    """Each image with the position of its first token, in order."""
    positions: NDArray[np.int64] | None = None
    """``(3, T)``, by time, height and width; ``None`` where positions are counted."""

    @cached_property
    def shift(self) -> int:
        """Offset from the index of a token after the sequence to its position."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.tokens)

    @property
    def is_image(self) -> NDArray[np.bool_]:
        """``(T,)``"""
        marks = np.zeros(len(self.tokens), bool)
        for start, image in self.placed:
            marks[start : start + image.num_tokens] = True
        return marks

    def keys(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a cache key: ``tokens``, which begin with the sequence, with placeholders replaced by image digests.

        Digests become negative numbers, which are never tokens: equal keys mean equal text and equal images.
        """
        keys = tokens.copy()
        for start, image in self.placed:
            words = np.frombuffer(image.digest, "<i8") | np.iinfo(np.int64).min
            keys[start : start + image.num_tokens] = np.resize(words, image.num_tokens)
        return keys

    def positions_of(self, first: int, last: int) -> NDArray[np.int64]:
        """Return positions ``(3, last - first)``; tokens after the sequence continue the count."""
        assert self.positions is not None
        after = np.arange(max(first, len(self.tokens)), last) + self.shift
        return np.concatenate([self.positions[:, first:last], np.broadcast_to(after, (3, len(after)))], 1)


@dataclass(frozen=True)
class Placement:
    """Positions ``first:last`` of a sequence with images begin at ``at`` on the token axis of a pass."""

    images: SequenceImages
    at: int
    first: int
    last: int


class Vision:
    """The image processor and vision tower of one model."""

    def __init__(self, model: Any, processor: Any, device: Device, max_pixels: int) -> None:
        self._model, self._processor, self._device, self._max_pixels = model, processor, device, max_pixels
        self._embed = model.get_input_embeddings()
        self._placeholder: int = model.config.image_token_id
        has_grid = hasattr(model.base_model, "get_rope_index")
        self._merge: int | None = model.config.vision_config.spatial_merge_size if has_grid else None
        self._fixed: tuple[int, torch.Size] = 0, torch.Size()
        """Tokens and prepared size of every image, where there is no grid; known from the probe."""
        self._rows: OrderedDict[ReadImage, ImageRows] = OrderedDict()

    # ── when images arrive ────────────────────────────────────────────────────────────────────────────

    def read(
        self,
        tokens: NDArray[np.int64],
        images: Sequence[ImageInput],
        where: str,
        max_context: int,
        known: dict[bytes, ReadImage],
    ) -> SequenceImages:
        """Insert the images of the input called ``where`` into its text; ``known`` caches images that inputs share.

        Raise if an image cannot be read, is not as long as its sender expects, or does not fit into the context.
        """
        parts: list[NDArray[np.int64]] = []
        placed: list[tuple[int, ReadImage]] = []
        done = length = 0
        for file in images:
            image = self._read_one(file, f"{where}.chunks[{file.chunk}]", known)
            start = length + file.offset - done
            parts += [tokens[done : file.offset], np.full(image.num_tokens, self._placeholder)]
            placed.append((start, image))
            done, length = file.offset, start + image.num_tokens
            if length > max_context:
                raise InvalidInput(
                    f"{where} has {length} tokens up to its chunk {file.chunk}; at most {max_context}, the context"
                    " length, are accepted"
                )
        whole = np.concatenate([*parts, tokens[done:]]).astype(np.int64)
        return SequenceImages(whole, placed, None if self._merge is None else _turns(len(whole), placed, self._merge))

    def _read_one(self, file: ImageInput, where: str, known: dict[bytes, ReadImage]) -> ReadImage:
        digest = hashlib.sha256(file.format.encode() + file.data).digest()
        if digest not in known:
            # Preprocess the picture again for its pass: keeping many that wait would take more memory than their files.
            inputs = self._prepare(file, where)
            if self._merge is not None:
                grid = tuple(int(size) for size in inputs["image_grid_thw"][0])
                known[digest] = ReadImage(file, digest, math.prod(grid) // self._merge**2, grid)
            elif inputs["pixel_values"].shape == self._fixed[1]:
                known[digest] = ReadImage(file, digest, self._fixed[0])
            else:
                raise InvalidInput(f"{where} is not brought to the size of this model by its image processor")
        image = known[digest]
        if file.expected_tokens not in (None, image.num_tokens):
            raise InvalidInput(
                f"{where} has expected_tokens {file.expected_tokens}; this model reads the image as {image.num_tokens}"
                " tokens; that number or none is accepted"
            )
        return image

    def _prepare(self, file: ImageInput, where: str) -> dict[str, Tensor]:
        picture = open_picture(file.data, file.format, self._max_pixels, where)
        try:
            inputs = self._processor(images=[picture], return_tensors="pt")
        except (ValueError, ZeroDivisionError):
            raise InvalidInput(
                f"{where} has {picture.width} x {picture.height} pixels, which the image processor of this model cannot"
                " bring into its form; a picture whose sides are less unlike is accepted"
            ) from None
        on, dtype = self._device.handle, self._device.dtype
        return {name: x.to(on, dtype if x.is_floating_point() else None) for name, x in inputs.items()}

    # ── in a pass ─────────────────────────────────────────────────────────────────────────────────────

    def overlay(self, tokens_T: Tensor, positions_T: Tensor, placements: Sequence[Placement]) -> dict[str, Any]:
        """Return the language model's input instead of token ids and positions; placements in the order of the axis."""
        embeds_TH = self._embed(tokens_T)
        is_image_T = torch.zeros(len(tokens_T), dtype=torch.bool, device=tokens_T.device)
        shown: list[tuple[ImageRows, slice]] = []
        for place in placements:
            for start, image in place.images.placed:
                low, high = max(start, place.first), min(start + image.num_tokens, place.last)
                if low < high:
                    on_axis = slice(place.at + low - place.first, place.at + high - place.first)
                    shown.append((self._rows_of(image), slice(low - start, high - start)))
                    embeds_TH[on_axis] = shown[-1][0].rows_NH[shown[-1][1]].to(embeds_TH.dtype)
                    is_image_T[on_axis] = True
        inputs: dict[str, Any] = {"inputs_embeds": embeds_TH.unsqueeze(0), "position_ids": positions_T.unsqueeze(0)}
        if self._merge is not None:
            turns = positions_T.expand(3, -1).clone()
            for place in placements:
                known = torch.from_numpy(place.images.positions_of(place.first, place.last))
                turns[:, place.at : place.at + place.last - place.first] = known.to(turns.device)
            inputs["position_ids"] = turns.unsqueeze(1)
        if shown and shown[0][0].layers:
            layers = zip(*([layer[part] for layer in rows.layers] for rows, part in shown), strict=True)
            inputs["visual_pos_masks"] = is_image_T.unsqueeze(0)
            inputs["deepstack_visual_embeds"] = [torch.cat(rows) for rows in layers]
        return inputs

    def _rows_of(self, image: ReadImage) -> ImageRows:
        rows = self._rows.pop(image, None) or self._look(self._prepare(image.file, "image"))
        self._rows[image] = rows
        num_bytes = sum(kept.num_bytes + len(owner.file.data) for owner, kept in self._rows.items())
        while len(self._rows) > 1 and (num_bytes > _KEPT_BYTES or len(self._rows) > _KEPT_IMAGES):
            owner, kept = self._rows.popitem(last=False)
            num_bytes -= kept.num_bytes + len(owner.file.data)
        return rows

    @torch.no_grad()
    def _look(self, inputs: dict[str, Tensor]) -> ImageRows:
        """Compute the tower's output for one image."""
        output = self._model.get_image_features(**inputs, return_dict=True)
        layers = [_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        return ImageRows(_joined(output.pooler_output), layers)

    def probe(self) -> tuple[SequenceImages, Tensor]:
        """Return a short sequence with an image, and its logits ``(T, V)`` by the unmodified model."""
        file = io.BytesIO()
        Image.linear_gradient("L").resize((60, 84)).convert("RGB").save(file, "png")
        image = ImageInput(data=file.getvalue(), format="png", offset=3, chunk=1)
        inputs = self._prepare(image, "probe")
        self._fixed = len(self._look(inputs).rows_NH), inputs["pixel_values"].shape
        images = self.read(np.arange(7, dtype=np.int64), [image], "probe", 1 << 20, {})
        tokens = torch.from_numpy(images.tokens).to(self._device.handle)
        if self._merge is not None:
            inputs["mm_token_type_ids"] = torch.from_numpy(images.is_image).to(tokens)[None]
        return images, self._model(input_ids=tokens[None], use_cache=False, **inputs).logits[0].float()


def open_vision(model: Any, directory: Path, device: Device, max_pixels: int) -> Vision | str:
    """Return the ``Vision`` of ``model``, or the reason why it reads no images."""
    tower = getattr(model.config, "vision_config", None)
    if tower is None:
        return TEXT_ONLY
    if model.config.model_type not in FAMILIES:
        accepted = ", ".join(FAMILIES)
        return f"images of the family {model.config.model_type!r} are not supported; those of {accepted} are"
    if model.config.model_type == "llava" and tower.model_type != _LLAVA_TOWER:
        return f"its vision tower is a {tower.model_type!r}; of Llava models {_LLAVA_TOWER!r} is supported"
    if not any((directory / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return "its directory has no preprocessor_config.json"
    # Not the optional backend: the same picture must give the same numbers on every machine.
    processor = AutoImageProcessor.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, backend="pil"
    )
    return Vision(model, processor, device, max_pixels)


def _joined(rows: Any) -> Tensor:
    """Return the rows ``(N, H)`` of the only image, whatever layout the model returns."""
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    joined: Tensor = rows.reshape(-1, rows.shape[-1])
    return joined


def _turns(length: int, placed: Sequence[tuple[int, ReadImage]], merge: int) -> NDArray[np.int64]:
    """Return positions ``(3, T)``: text advances all three; an image spans its grid and advances by its longer side."""
    pieces: list[NDArray[np.int64]] = []
    at = position = 0
    for start, image in placed:
        assert image.grid is not None
        pieces.append(np.broadcast_to(np.arange(start - at) + position, (3, start - at)))
        position += start - at
        time, height, width = image.grid
        pieces.append(np.indices((time, height // merge, width // merge)).reshape(3, -1) + position)
        position += max(height, width) // merge
        at = start + image.num_tokens
    pieces.append(np.broadcast_to(np.arange(length - at) + position, (3, length - at)))
    return np.concatenate(pieces, 1)
