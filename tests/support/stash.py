"""What fixtures want to know about the test that they serve."""

from __future__ import annotations

import pytest

FAILED = pytest.StashKey[bool]()  #: the test failed, so its traceback keeps things alive
