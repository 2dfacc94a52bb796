"""Whether the model that a request is for reads images.

How many and how large they are was checked when the body was decoded (``data_checks.py``). What is in a file is the
engine's question: it decodes in a process of its own, away from keys and the database.
"""

from lorimer.errors import Unsupported
from lorimer.server.context import Context


async def admit_images(context: Context, base_model: str, first_image: str) -> None:
    """Refuse the chunk called ``first_image``, if there is one, where the model reads none."""
    if not first_image:
        return
    info = await context.scheduler.model_info(base_model)
    if info.no_images:
        raise Unsupported(
            f"{first_image} is of type 'image', which {base_model!r} does not read: {info.no_images};"
            " accepted is 'encoded_text'"
        )
