"""Generates readable names for runs that their programs gave none, such as ``amber-heron-17``."""

import hashlib

_ADJECTIVES = (
    "amber autumn brave bright brisk calm clear clever coral crisp curious daring deft dusty eager early fair fleet "
    "gentle glad golden hardy hazel honest humble idle ivory jolly keen kind lively lucid lucky lunar mellow merry "
    "mild misty modest noble olive patient plain polar proud quick quiet rapid rosy rustic sage silent silver sleek "
    "snowy solar solid spry steady still stout sunny swift tidy vivid warm wild wise witty"
).split()
_NOUNS = (
    "acorn anchor aspen badger basin beacon birch bison brook canyon cedar comet cove crane creek crow delta dune elk "
    "ember falcon fern finch fjord forest fox gale garnet glade grove harbor hare harvest heron hill ibis island jay "
    "juniper kestrel lagoon lake lantern larch lark maple marsh meadow mesa moor moss moth otter owl pebble pine "
    "plover prairie quail quarry raven reef ridge river robin rowan sparrow spruce stone stream swan thicket tide "
    "trout valley willow wren"
).split()


def readable_name(run_id: str, number: int) -> str:
    """Return a name for a run: two words drawn by its id, and its number among the user's runs."""
    digest = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8])
    adjective = _ADJECTIVES[digest % len(_ADJECTIVES)]
    noun = _NOUNS[digest // len(_ADJECTIVES) % len(_NOUNS)]
    return f"{adjective}-{noun}-{number}"
