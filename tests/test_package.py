"""The package as a new user sees it: imports, the example of README, the wheel, citations and versions."""

import ast
import re
import textwrap
from pathlib import Path

import spearpp
from processes import python

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str) -> str:
    """Run code in a new interpreter, without the checkers of this suite, and return what it printed."""
    return python("-c", textwrap.dedent(code), *arguments)


def test_import_and_inversion_need_torch_numpy_and_scipy_alone() -> None:
    run(
        """
        import importlib.abc, sys
        import torch, numpy, scipy.optimize
        known = {name.split(".")[0] for name in sys.modules} | {"spearpp"} | set(sys.stdlib_module_names)
        class Refuse(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] not in known:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Refuse())
        assert "jaxtyping" not in sys.modules
        import spearpp
        from spearpp import simulate
        seen = simulate.fedsgd(simulate.mlp(30, [60, 60], 10), simulate.random_batch(4, features=30))[0]
        result = spearpp.invert(*seen, search=spearpp.search.RiemannianAdam(starts=2048))
        assert result.score == 1.0, result
        assert "jaxtyping" not in sys.modules
        for data in (simulate.photographs, simulate.digits, simulate.breast_cancer):
            try:
                data(2)
            except spearpp.SpearError as error:
                assert "pip install 'spearpp[data]'" in str(error), error
            else:
                raise AssertionError(data)
        try:
            spearpp.invert(*seen, search="l1")
        except spearpp.SpearError as error:
            assert "pass a search object" in str(error), error
        else:
            raise AssertionError("a string passed for a search")
        """
    )


def test_the_example_of_the_readme_has_five_lines() -> None:
    """``test_docs`` runs it."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    imports = ("import ", "from ")
    assert len([line for line in example.splitlines() if line.strip() and not line.startswith(imports)]) == 5


def test_no_name_of_a_package_hides_a_module() -> None:
    """``import spearpp.report.sarif as sarif`` must give the module, not a function of the same name."""
    packages = list((ROOT / "src").rglob("__init__.py"))
    assert len(packages) > 10
    for package in packages:
        modules = {each.stem for each in package.parent.iterdir()}
        own = ".".join(package.parent.relative_to(ROOT / "src").parts)
        for node in ast.parse(package.read_text()).body:
            if isinstance(node, ast.ImportFrom):  # ``from package import module`` gives the module itself
                named = {each.asname or each.name for each in node.names if node.module != own}
            else:
                named = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
            assert not named & modules, f"{package} hides {named & modules}"


def test_readme_and_makefile_name_the_same_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"make ([a-z][a-z-]+)", readme))
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_citation_names_the_paper_and_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert "SPEAR++: Scaling Gradient Inversion via Sparsely-Used Dictionary Learning" in citation
    assert f"version: {spearpp.__version__}" in citation
    assert f"## {spearpp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_everything_public_is_documented_in_one_table() -> None:
    assert spearpp.__doc__
    assert set(re.findall(r"^``(\w+)``", spearpp.__doc__, re.MULTILINE)) == set(spearpp.__all__)
    assert len(spearpp.__all__) <= 14
    assert set(dir(spearpp)) == {*spearpp.__all__, "__version__"}
    for name in spearpp.__all__:
        assert getattr(spearpp, name).__doc__, name


def test_every_error_is_a_spear_error() -> None:
    from spearpp import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(kinds) > 5
    assert all(issubclass(kind, spearpp.SpearError) and kind.__doc__ for kind in kinds)


def test_the_version_and_the_import_do_not_wait_for_torch() -> None:
    printed = run(
        """
        import sys
        import spearpp
        from spearpp.cli import main
        assert main(["--version"]) == 0
        assert "torch" not in sys.modules
        assert spearpp.search.Gated.__module__.startswith("spearpp.search")
        try:
            spearpp.internals
        except AttributeError as error:
            assert "has no attribute 'internals'" in str(error)
        else:
            raise AssertionError
        """
    )
    assert printed == f"spearpp {spearpp.__version__}\n"


def test_the_wheel_alone_holds_everything_that_the_core_and_the_report_need(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    python(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    place = ("--no-index", "--find-links", tmp_path, "--target", tmp_path / "lib")
    python(*pip, "install", "--no-deps", *place, "spearpp")
    printed = run(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import spearpp
        from spearpp import report, simulate
        assert spearpp.__file__.startswith(sys.argv[1]), spearpp.__file__
        model, batch = simulate.mlp(30, [60], 10), simulate.random_batch(3, features=30)
        print(report.write(sys.argv[2], spearpp.audit(simulate.FedSGD()(model, batch), model)).stat().st_size > 10_000)
        """,
        str(tmp_path / "lib"),
        str(tmp_path / "report"),
    )
    assert printed == "True\n"
    metadata = next((tmp_path / "lib").glob("spearpp-*.dist-info")) / "METADATA"
    assert f"Version: {spearpp.__version__}\n" in metadata.read_text()


def test_the_page_about_versions_states_the_versions_of_the_formats() -> None:
    from spearpp.auditing.document import VERSION
    from spearpp.experiments import store
    from spearpp.simulate import batch
    from spearpp.update import saved

    table = (ROOT / "docs" / "versions.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    stated = {row[1].split("`")[1]: int(row[2]) for row in rows if len(row) == 4 and row[2].isdigit()}
    formats = {"version": VERSION, "format": saved.FORMAT, "truth": batch.FORMAT, "user_version": store.FORMAT}
    assert stated == formats
    schema = (ROOT / "src" / "spearpp" / "report" / "report.schema.json").read_text()
    assert f'"title": "spearpp report.json, version {VERSION}"' in schema
