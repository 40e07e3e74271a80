"""What the tests of the page share."""

from collections.abc import Iterator

import pytest

import browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[browser.Browser]:
    """A browser; the test is skipped where there is none."""
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium here; on Debian: apt install chromium")
    running = browser.Browser(executable)
    yield running
    running.close()
