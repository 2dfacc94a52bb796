"""Numbers are read from answers as people and models write them, and scored."""

from fractions import Fraction

import pytest

from lorimer.cookbook.gsm8k import extract_answer, is_correct, score
from lorimer.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = <<3+4=7>>7 pens.\n#### 7", 7),
        ("####7", 7),
        ("#### 1,234,567", 1234567),
        ("#### 12,34", 12),
        ("#### -5", -5),
        ("#### - 5", -5),
        ("#### \u22125", -5),
        ("#### +5", 5),
        ("#### $18", 18),
        (r"#### \$18", 18),
        ("#### -$18.50", Fraction(-37, 2)),
        ("#### $-18.5", Fraction(-37, 2)),
        ("#### 18.", 18),
        ("#### 18.0", 18),
        ("#### .5", Fraction(1, 2)),
        ("#### 3/4", Fraction(3, 4)),
        ("#### 3/0", None),
        ("#### **42**", 42),
        (r"#### \boxed{42}", 42),
        ("#### 50%", 50),
        ("#### 20 dollars and 5 cents", 20),
        ("#### €1,000.25 in all", Fraction(100025, 100)),
        ("#### 7 no, wait\n#### 8", 8),
        ("#### 7\n#### none", 7),
        ("#### none\n12", None),
        ("####\n12", None),
        ("12", None),
        ("", None),
    ],
)
def test_number_after_the_mark(text, number):
    assert extract_answer(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So there are 3, and then 1,200.", 1200),
        ("It is 5 - 3", 3),
        ("in 10-12", 12),
        ("the result is -3", -3),
        ("the result = -$3.50!", Fraction(-7, 2)),
        ("- 4 apples", 4),
        ("#### nothing, 5", None),
        ("no number", None),
    ],
)
def test_last_number_only_where_asked(text, number):
    assert extract_answer(text) is None
    assert extract_answer(text, fallback=True) == number


def test_a_bare_reference_is_accepted_and_one_without_a_number_is_refused():
    assert is_correct("#### 1200.00", "1,200")
    assert not is_correct("1200", "1,200")
    assert is_correct("1200", "1,200", fallback=True)
    with pytest.raises(InvalidInput, match="'none'"):
        is_correct("#### 1", "none")


def row(question, answer, reference="#### 7"):
    return {"question": question, "answer": answer, "reference": reference}


def test_score_counts_answers_and_what_could_be_read():
    found = score([row("a", "#### 7"), row("b", "#### 8"), row("c", "7"), row("d", "#### 7.0")])
    assert found.as_dict() == {"num_questions": 4, "num_answers": 4, "accuracy": 0.5, "answered": 0.75}
    assert score([row("c", "7")], fallback=True).accuracy == 1.0
    with pytest.raises(InvalidInput, match="no answers"):
        score([])


def test_several_answers_to_a_question_give_pass_at_k():
    wrong, right = "#### 1", "#### 7"
    found = score([row("a", text) for text in (right, wrong, wrong)] + [row("b", wrong)] * 3)
    assert found.accuracy == pytest.approx(1 / 6)
    assert found.pass_at == pytest.approx({1: 1 / 6, 2: (2 / 3) / 2, 3: 1 / 2})
