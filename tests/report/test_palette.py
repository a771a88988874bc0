"""The colours can be told apart, and read, by everybody, in light and in dark."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

# Linear RGB as seen without one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1).
VISION = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
CATEGORICAL = [f"c{index}" for index in range(8)]


def linear(code):
    """Linear RGB [3] of a hexadecimal code."""
    values = np.array([int(code[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour):
    """CIE L*a*b* [3] of linear RGB."""
    ratio = TO_XYZ @ colour.clip(0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(first, second):
    """Contrast of WCAG, from 1 to 21."""
    light, dark = sorted((TO_XYZ[1] @ linear(first), TO_XYZ[1] @ linear(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    style = (files("logra.report") / "style.css").read_text()
    light, _, rest = style.partition("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"--(\w+): (#\w{6})", light if request.param == "light" else rest.split("\n}\n")[0]))


@pytest.mark.parametrize("vision", VISION)
def test_colours_of_groups_and_categories_differ(scheme, vision):
    seen = {name: lab(VISION[vision] @ linear(scheme[name])) for name in CATEGORICAL}
    closest = min(np.linalg.norm(seen[one] - seen[other]) for one, other in itertools.combinations(CATEGORICAL, 2))
    assert closest > 15, "a difference of 2.3 is just noticeable side by side; thin lines need several times that"


def test_colours_stand_out_from_the_paper(scheme):
    assert min(contrast(scheme[name], scheme["paper"]) for name in CATEGORICAL) >= 3  # WCAG 1.4.11, graphics
    assert min(contrast(scheme[name], scheme["paper"]) for name in ("ink", "muted", "link")) >= 4.5  # 1.4.3, text
