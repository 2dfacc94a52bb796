"""Checks whether the model of a request reads images.

The number and size of images are validated when the body is decoded (``data_checks.py``). The engine decodes the files,
in its own process, away from keys and the database.
"""

from lorimer.errors import Unsupported
from lorimer.server.context import Context


async def admit_images(context: Context, base_model: str, first_image: str) -> None:
    """Raise ``Unsupported`` if the request has an image, named ``first_image``, and the model reads none."""
    if not first_image:
        return
    info = await context.scheduler.model_info(base_model)
    if info.no_images:
        raise Unsupported(
            f"{first_image} is of type 'image', which {base_model!r} does not read: {info.no_images};"
            " accepted is 'encoded_text'"
        )
