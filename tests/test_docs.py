"""Documentation that runs: README snippets, the documented tree, links between pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.name)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """All snippets of a page, one after another in one process, as a reader would type them."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(snippets(page)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_documented_tree_is_the_real_one() -> None:
    layout = (ROOT / "docs" / "layout.md").read_text()
    chapter = layout.partition("## src/packhorse")[2].partition("## Beside it")[0]
    documented = set(re.findall(r"^\| `([\w/.]+\.py)`", chapter, flags=re.MULTILINE))
    source = ROOT / "src" / "packhorse"
    real = {str(p.relative_to(source)) for p in source.rglob("*.py") if p.name != "__init__.py"}
    assert documented == real


def test_links_lead_somewhere() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
