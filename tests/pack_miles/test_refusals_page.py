"""The published table of refusals is the one that runs."""

import pytest
from support.refusals_page import PAGE, page


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pack_miles.miles.hosted.installed_rule", lambda: None)
    assert PAGE.read_text() == page(), "PYTHONPATH=tests python -m support.refusals_page writes it"
