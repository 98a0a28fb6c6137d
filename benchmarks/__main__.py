"""Lists the benchmarks: every module here that says how to run it, with the first line of its description."""

import ast
from pathlib import Path

if __name__ == "__main__":
    for file in sorted(Path(__file__).parent.glob("*.py")):
        description = ast.get_docstring(ast.parse(file.read_text())) or ""
        if f"make bench NAME={file.stem}" in description:
            print(f"make bench NAME={file.stem:<18}{description.splitlines()[0]}")
    print("Benchmarks on CIFAR-10 read the file at the path in SPEARPP_DATA.")
