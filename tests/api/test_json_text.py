"""JSON in and out: valid always, checked before it is used."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from deepinfer_jax import json_text


def test_numbers_that_json_has_not_become_null_wherever_they_stand():
    value = {"a": math.nan, "b": (1.5, [-math.inf, {"c": math.inf}]), "é": "\n", "n": np.float64(2)}
    text = json_text.dumps(value)
    assert text == '{"a": null, "b": [1.5, [null, {"c": null}]], "é": "\\n", "n": 2.0}'
    assert json.loads(json_text.dumps(np.float64("nan"))) is None


@pytest.mark.parametrize("text", ['{"a": [1, 2.5e3, null, true]}', '"\\ud83d\\ude00"', "-1", "0"])
def test_what_is_json_is_read_as_json_reads_it(text):
    assert json_text.loads(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1,]", "not JSON"),
        ("NaN", "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ("[1e999]", "1e999 is outside the range"),
        ("9" * 41, "has 41 digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is given twice"),
        ('"\\udfff"', r"half a surrogate pair, \\udfff, at character 0"),
        ('{"x\\ud800": 1}', r"half a surrogate pair, \\ud800, at character 1"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
        ("[" * 500_000, "nested deeper than 64"),
    ],
)
def test_what_would_be_trouble_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as error:
        json_text.loads(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_the_deepest_value_that_is_taken():
    text = "[" * 64 + "1" + "]" * 64
    assert json_text.loads(text) == json.loads(text)
