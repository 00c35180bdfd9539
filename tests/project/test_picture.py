"""What is drawn from the source is what the source says."""

from __future__ import annotations

import picture


def test_the_committed_picture_is_the_one_that_is_drawn():
    text = picture.ARCHITECTURE.read_text()
    assert picture.drawn(text) == text, "run `make picture` and commit docs/"


def test_the_committed_list_of_modules_is_the_one_that_is_made():
    assert picture.module_list() == picture.MODULES.read_text(), "run `make picture`, commit docs/"


def test_no_dot_lies_above_the_staircase():
    assert "imports upward" not in picture.picture()


def test_a_picture_shows_who_imports_whom(monkeypatch):
    edges = {"top": {"left", "low"}, "left": {"low"}, "low": set(), "alone": set()}
    monkeypatch.setattr(picture, "graph", lambda: edges)
    monkeypatch.setattr(picture.source_tree, "units", lambda: {name: None for name in edges})
    assert picture.picture() == "top\n● left\n· · alone\n● ● · low"
