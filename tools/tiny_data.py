"""The text `lorimer/tiny` is pretrained on, generated from a seed: nothing is copied from anywhere.

A document is a ChatML dialogue (sums and other arithmetic, one-line word problems, small talk), a sheet of
sums or a short story. A fixed share of number pairs is held out: no question or sheet ever puts
the two numbers of such a pair together, so sums of held-out pairs measure adding and not remembering.
Tokenizing, packing and training are in `pretrain_tiny.py`.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

HELD_OUT_PERCENT = 10

NAMES = "Anna Ben Carla Dan Emma Finn Grace Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor".split()
PLACES = ["park", "garden", "forest", "market", "school", "river", "beach", "farm", "library", "kitchen", "old house"]
THINGS = "apples pens books coins stones cards balls cups eggs stamps shells keys plums hats".split()
WORDS = (
    "cat dog fish bird tree house water bread stone light paper green table chair apple river cloud winter summer "
    "music garden silver window yellow market candle bridge button pencil rabbit"
).split()
ANIMALS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "horse": "neigh",
    "owl": "hoot", "mouse": "squeak", "lion": "roar",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red",
    "an orange": "orange", "milk": "white", "a tomato": "red", "a frog": "green", "the sea": "blue", "gold": "yellow",
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("fast", "slow"), ("old", "new"),
    ("open", "closed"), ("wet", "dry"), ("long", "short"), ("light", "dark"), ("happy", "sad"), ("left", "right"),
    ("early", "late"), ("full", "empty"), ("hard", "soft"), ("loud", "quiet"), ("good", "bad"), ("yes", "no"),
]  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SMALL_TALK = [
    (["Hello!", "Hi.", "Hey there.", "Good morning.", "Hello, how are you?"],
     ["Hello! How can I help?", "Hi! What can I do for you?", "Hello, nice to meet you."]),
    (["How are you?", "How do you do?", "Are you well?"], ["I am fine, thank you.", "Very well, and you?"]),
    (["Thank you.", "Thanks!", "Thanks a lot."], ["You are welcome.", "Gladly.", "Any time."]),
    (["Goodbye.", "Bye!", "See you later."], ["Goodbye!", "See you soon.", "Bye, have a good day."]),
    (["Who made you?", "Who built you?", "Where do you come from?"], ["I was made by the Lorimer project."]),
    (["What can you do?", "How can you help me?"], ["I can add small numbers, spell words and tell stories."]),
    (["Are you a person?", "Are you human?"], ["No, I am a small language model."]),
    (["Tell me something.", "Say something nice."], ["You are doing well.", "The sun is out today.", "I like sums."]),
    (["Do you like sums?", "Do you like music?", "Do you like stories?"], ["Yes, very much.", "Yes, I do."]),
]  # fmt: skip
NAME_QUESTIONS = ["What is your name?", "Who are you?", "What are you called?", "Tell me your name.", "Your name?"]
SUM_QUESTIONS = [
    "What is {a} + {b}?", "What is {a} + {b}?", "{a} + {b} = ?", "{a}+{b}=", "{a} + {b} =", "{a} + {b}", "{a} plus {b}",
    "What is {a} plus {b}?", "Add {a} and {b}.", "Please add {a} to {b}.", "What is the sum of {a} and {b}?",
    "How much is {a} + {b}?", "Calculate {a} + {b}.", "Compute {a}+{b}", "Find the sum: {a}, {b}",
    "Can you add {a} and {b}?", "Tell me {a} plus {b}.",
]  # fmt: skip
DIFFERENCE_QUESTIONS = [
    "What is {a} - {b}?", "{a} - {b} = ?", "{a}-{b}=", "{a} minus {b}", "Subtract {b} from {a}.",
    "What is {a} minus {b}?", "Calculate {a} - {b}.",
]  # fmt: skip
PRODUCT_QUESTIONS = ["What is {a} * {b}?", "{a} * {b} = ?", "{a} times {b}", "Multiply {a} by {b}.", "{a}*{b}="]
SUM_PROBLEMS = [
    "{n} has {a} {t} and buys {b} more. How many {t} does {n} have?",
    "{n} finds {a} {t} in the {p} and {b} {t} at home. How many {t} are there?",
    "There are {a} {t} on the table. {n} brings {b} more. How many {t} are there now?",
]
DIFFERENCE_PROBLEMS = [
    "{n} has {a} {t} and gives away {b}. How many {t} are left?",
    "There are {a} {t} in a box. {n} takes {b}. How many {t} stay in the box?",
]
PRODUCT_PROBLEMS = ["{n} has {a} boxes with {b} {t} in each. How many {t} does {n} have?"]
FEELINGS = ["happy", "tired", "hungry", "brave", "sad", "curious", "proud", "cold", "sleepy", "glad"]
LOOKS = ["little", "red", "old", "big", "grey", "quick", "quiet", "golden", "kind", "clever"]
OBJECTS = ["a key", "a lamp", "a letter", "a red ball", "a map", "a boat", "a book", "a coin", "a green hat", "a drum"]
STORY_MIDDLES = [
    "One day {n} went to the {p}.", "There {n} met a {l} {c}.", 'The {c} said, "{s}!"', "{n} was very {f}.",
    "Under a tree lay {o}.", "{n} took {o} home.", "The {c} wanted {o}.", "It began to rain and they ran to the {p}.",
    "They looked for {o} all day.", '"Do not be {f}," said {m}.', "{m} came and helped.", "So they shared {o}.",
    "The next day they went back to the {p}.", "The {c} was {f}, but {n} was {f2}.",
]  # fmt: skip
STORY_ENDS = [
    "In the end everyone was {f}.", "They were friends from that day on.", "That night {n} slept well.",
    "And {n} never forgot the {c}.", "Then they all went home.",
]  # fmt: skip


class Turn(NamedTuple):
    """One question and its answers: the short one, and one in a full sentence where the question has one."""

    question: str
    answer: str
    sentence: str | None = None


Message = dict[str, str]


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair {a, b}, in either order, is kept out of the training text."""
    digest = hashlib.sha256(f"{min(a, b)} {max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def render_chat(messages: list[Message]) -> str:
    """The messages as ChatML, exactly as the tokenizer's chat template writes them."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def documents(seed: int) -> Iterator[str]:
    """An endless stream of documents, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.70:
            yield render_chat(dialogue(rng))
        elif kind < 0.90:
            yield sum_sheet(rng)
        else:
            yield story(rng)


def dialogue(rng: random.Random) -> list[Message]:
    """A chat of one to many turns; a system message may set the answering style or the assistant's name."""
    messages, name, in_sentences = [], "Tiny", False
    kind = rng.random()
    if kind < 0.06:
        name = rng.choice(NAMES)
        messages.append({"role": "system", "content": rng.choice(["Your name is {}.", "You are {}."]).format(name)})
    elif kind < 0.12:
        in_sentences = True
        messages.append({"role": "system", "content": "Answer in a full sentence."})
    elif kind < 0.20:
        system = rng.choice(["You are a helpful assistant.", "Answer briefly.", "You are Tiny, a small model."])
        messages.append({"role": "system", "content": system})
    num_turns = rng.choice([1, 1, 1, 1, 1, 2, 2, 3, 4]) if rng.random() < 0.99 else rng.randint(8, 24)
    for _ in range(num_turns):
        turn = draw_turn(rng, name)
        answer = turn.sentence if in_sentences and turn.sentence else turn.answer
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def draw_turn(rng: random.Random, name: str) -> Turn:
    """One turn of a kind drawn by its share of the dialogues; `name` is what the assistant calls itself."""
    if rng.random() < 0.06:
        own = rng.choice(NAMES)
        if rng.random() < 0.3:
            return Turn(rng.choice(["I am {}.", "My name is {}."]).format(own), f"Hello {own}, nice to meet you.")
        return Turn(rng.choice(NAME_QUESTIONS), rng.choice(["My name is {}.", "I am {}."]).format(name))
    kinds = list(TURN_SHARES)
    return rng.choices(kinds, weights=[TURN_SHARES[kind] for kind in kinds])[0](rng)


def draw_pair(rng: random.Random, most: int) -> tuple[int, int]:
    """Two numbers in 0..most whose pair is not held out; one-digit pairs come more often than by chance."""
    while True:
        top = min(9, most) if rng.random() < 0.25 else most
        a, b = rng.randint(0, top), rng.randint(0, top)
        if not is_held_out(a, b):
            return a, b


def sum_turn(rng: random.Random) -> Turn:
    a, b = draw_pair(rng, 99)
    question = rng.choice(SUM_QUESTIONS).format(a=a, b=b)
    return Turn(question, str(a + b), f"{a} plus {b} is {a + b}.")


def difference_turn(rng: random.Random) -> Turn:
    b, a = sorted(draw_pair(rng, 99))
    return Turn(rng.choice(DIFFERENCE_QUESTIONS).format(a=a, b=b), str(a - b), f"{a} minus {b} is {a - b}.")


def product_turn(rng: random.Random) -> Turn:
    a, b = draw_pair(rng, 10)
    return Turn(rng.choice(PRODUCT_QUESTIONS).format(a=a, b=b), str(a * b), f"{a} times {b} is {a * b}.")


def comparison_turn(rng: random.Random) -> Turn:
    a, b = draw_pair(rng, 99)
    word, pick = rng.choice([("larger", max), ("smaller", min)])
    if rng.random() < 0.5:
        return Turn(f"Which is {word}, {a} or {b}?", str(pick(a, b)), f"The {word} one is {pick(a, b)}.")
    return Turn(f"Is {a} {word} than {b}?", "Yes." if a != b and pick(a, b) == a else "No.")


def counting_turn(rng: random.Random) -> Turn:
    n = rng.randint(1, 98)
    length = rng.randint(3, 6)
    word = rng.choice(WORDS)
    run = ", ".join(str(n + i) for i in range(length))
    return rng.choice(
        [
            Turn(f"What comes after {n}?", str(n + 1), f"After {n} comes {n + 1}."),
            Turn(f"What comes before {n}?", str(n - 1), f"Before {n} comes {n - 1}."),
            Turn(f"Go on: {run}", f"{n + length}, {n + length + 1}"),
            Turn(f"How many letters are in {word}?", str(len(word)), f"The word {word} has {len(word)} letters."),
            Turn(f"Is {n} even?", "Yes." if n % 2 == 0 else "No."),
        ]
    )


def problem_turn(rng: random.Random) -> Turn:
    """A word problem in one line, answered with its equation and, as in GSM8K, a last line `#### n`."""
    kind = rng.random()
    if kind < 0.6:
        a, b = draw_pair(rng, 99)
        text, sign, result = rng.choice(SUM_PROBLEMS), "+", a + b
    elif kind < 0.85:
        b, a = sorted(draw_pair(rng, 99))
        text, sign, result = rng.choice(DIFFERENCE_PROBLEMS), "-", a - b
    else:
        a, b = draw_pair(rng, 10)
        text, sign, result = rng.choice(PRODUCT_PROBLEMS), "*", a * b
    question = text.format(a=a, b=b, n=rng.choice(NAMES), t=rng.choice(THINGS), p=rng.choice(PLACES))
    return Turn(question, f"{a} {sign} {b} = {result}\n#### {result}")


def small_talk_turn(rng: random.Random) -> Turn:
    questions, answers = rng.choice(SMALL_TALK)
    return Turn(rng.choice(questions), rng.choice(answers))


def knowledge_turn(rng: random.Random) -> Turn:
    animal, sound = rng.choice(list(ANIMALS.items()))
    thing, colour = rng.choice(list(COLOURS.items()))
    first, second = rng.sample(rng.choice(OPPOSITES), 2)
    cycle, unit = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    at = rng.randrange(len(cycle))
    after, before = cycle[(at + 1) % len(cycle)], cycle[at - 1]
    return rng.choice(
        [
            Turn(f"What does a {animal} say?", f"{sound.capitalize()}!", f"A {animal} says {sound}."),
            Turn(f"What colour is {thing}?", f"{colour.capitalize()}.", f"{thing.capitalize()} is {colour}."),
            Turn(f"What is the opposite of {first}?", f"{second.capitalize()}.", f"The opposite is {second}."),
            Turn(f"What {unit} comes after {cycle[at]}?", f"{after}.", f"After {cycle[at]} comes {after}."),
            Turn(f"What {unit} comes before {cycle[at]}?", f"{before}.", f"Before {cycle[at]} comes {before}."),
        ]
    )


def word_turn(rng: random.Random) -> Turn:
    word = rng.choice(WORDS)
    if rng.random() < 0.3:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))
    phrase = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    return rng.choice(
        [
            Turn(f"Spell {word}.", "-".join(word)),
            Turn(f"Reverse {word}.", word[::-1]),
            Turn(f"Write {word} in capitals.", word.upper()),
            Turn(f"What is the first letter of {word}?", word[0]),
            Turn(f"{rng.choice(['Repeat', 'Say', 'Copy'])}: {phrase}", phrase),
        ]
    )


def sum_sheet(rng: random.Random) -> str:
    """Lines of sums as plain text."""
    line = rng.choice(["{a} + {b} = {c}", "{a}+{b}={c}", "{a} plus {b} is {c}."])
    pairs = [draw_pair(rng, 99) for _ in range(rng.randint(2, 12))]
    return "\n".join(line.format(a=a, b=b, c=a + b) for a, b in pairs) + "\n"


def story(rng: random.Random) -> str:
    """A story of a few sentences, rarely a long one."""
    n, m = rng.sample(NAMES, 2)
    c, s = rng.choice(list(ANIMALS.items()))
    slots = {"n": n, "m": m, "c": c, "s": s.capitalize(), "o": rng.choice(OBJECTS), "l": rng.choice(LOOKS)}
    num_sentences = rng.randint(2, 6) if rng.random() < 0.97 else rng.randint(30, 60)
    sentences = [
        "Once there was a child called {n}.",
        *rng.choices(STORY_MIDDLES, k=num_sentences),
        rng.choice(STORY_ENDS),
    ]

    def fill(sentence: str) -> str:
        return sentence.format(p=rng.choice(PLACES), f=rng.choice(FEELINGS), f2=rng.choice(FEELINGS), **slots)

    return " ".join(fill(sentence) for sentence in sentences) + "\n"


TURN_SHARES: dict[Callable[[random.Random], Turn], float] = {
    sum_turn: 60, difference_turn: 8, product_turn: 5, comparison_turn: 6, counting_turn: 7, problem_turn: 8,
    small_talk_turn: 6, knowledge_turn: 6, word_turn: 6,
}  # fmt: skip


if __name__ == "__main__":
    import sys

    for text in islice(documents(int(sys.argv[1]) if len(sys.argv) > 1 else 0), 20):
        sys.stdout.write(text + "<|endoftext|>\n")
