"""README, environment.yml, Makefile and pyproject.toml tell one story."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from jupyter_server.services.config.manager import ConfigManager

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONDA = (ROOT / "environment.yml").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *EXTRAS["test"]]

EXACT = (
    *("torch", "numpy", "jupyterlab", "ipywidgets", "matplotlib"),
    *("nbval", "nbclient", "pytest", "transformers"),
)
"""What changes a printed number, a stored output or a page."""


@pytest.fixture
def setup(monkeypatch):
    """The set-up script, with the arguments it would give to `pip install`."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / ".ci" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []
    monkeypatch.setattr(module, "pip", lambda *call, **_: module.calls.append(call))
    return module


@pytest.mark.parametrize("name", EXACT)
def test_what_changes_outputs_is_pinned_exactly(name):
    pins = [line for line in REQUIREMENTS if re.match(rf"{name}[=><]", line)]

    assert len(pins) == 1
    assert re.fullmatch(rf"{name}==\d+(\.\d+)+", pins[0])


def test_torch_is_installed_first_and_at_its_pinned_version(setup):
    setup.install("")

    (torch,) = (line for line in REQUIREMENTS if line.startswith("torch"))
    assert setup.calls == [(torch,), ("--editable", ".[test]")]


def test_a_torch_index_serves_torch_alone(setup):
    setup.install("file:///wheels")

    first, second = setup.calls
    assert first[1:] == ("--extra-index-url", "file:///wheels")
    assert "--extra-index-url" not in second


def test_the_pip_lines_of_the_readme_are_those_of_make(setup):
    block = re.search(r"```bash\n(python3 -m venv .*?)```", README, re.DOTALL)[1]
    lines = re.findall(r"pip install (.+)", block)
    setup.install("")

    assert [tuple(shlex.split(line)) for line in lines] == setup.calls


def test_conda_installs_what_make_installs():
    assert re.findall(r"^      - (.+)$", CONDA, re.MULTILINE) == ["--editable .[test]"]


def test_conda_names_no_version_but_pythons():
    (python,) = re.findall(r"^  - (.*[<=>].*)$", CONDA, re.MULTILINE)

    assert python == f"python{PROJECT['requires-python']}"


def test_no_file_repeats_a_version_that_differs():
    pins = dict(line.split("==") for line in REQUIREMENTS if "==" in line)
    for text in (README, CONDA, MAKEFILE):
        for name, version in re.findall(r"\b([\w-]+)==([\w.]*\d)", text):
            assert pins[name] == version


def test_the_python_versions_agree():
    low, high = re.fullmatch(
        r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]
    ).groups()
    bounds = f"(3, {low}) <= "
    script = (ROOT / ".ci" / "setup.py").read_text(encoding="utf-8")
    doctor = (ROOT / "labkit" / "commands" / "doctor.py").read_text(encoding="utf-8")

    for text in (MAKEFILE, script, doctor):
        assert bounds in text
        assert f"< (3, {high})" in text
    assert f"Python 3.{low} to 3.{int(high) - 1}" in README
    assert f"Python 3.{low} to 3.{int(high) - 1}" in MAKEFILE


def test_every_make_target_of_the_readme_exists():
    targets = re.findall(r"^(\w+):(?!=)", MAKEFILE, re.MULTILINE)
    named = set(re.findall(r"\bmake (\w+)", README))

    assert {"lab", "test", "bench", "notebooks", "clean"} <= set(targets)
    assert named <= set(targets)
    assert {"lab", "test"} <= named


def test_every_target_is_declared_phony():
    targets = set(re.findall(r"^(\w+): ?setup", MAKEFILE, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1].split()

    assert targets <= set(phony)


def test_make_lab_asks_no_one_for_news_and_keeps_to_its_own_settings(
    tmp_path, monkeypatch
):
    folders = dict(
        re.findall(r"^lab.*: export (\w+) := (\S+)$", MAKEFILE, re.MULTILINE)
    )
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR"):
        assert folders[name].startswith("$(STATE)/")
        monkeypatch.setenv(name, str(tmp_path))
    defaults = folders["JUPYTER_CONFIG_PATH"].replace("$(CURDIR)", str(ROOT))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", defaults)
    found = ConfigManager(config_dir_name="labconfig").get("default_setting_overrides")

    assert found["@jupyterlab/apputils-extension:notification"] == {
        "checkForUpdates": False,
        "fetchNews": "false",
    }


def test_the_continuous_integration_runs_make_test():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert script.splitlines()[-1].endswith("make test")
