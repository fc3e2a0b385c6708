"""Makes the pictures of the docs from what the program prints: python docs/make_pictures.py"""

import re
from pathlib import Path

from rich.console import Console

import packhorse as ph
from packhorse.models import load_task
from packhorse.report import partition_table

task = load_task("gpt2")
graph = ph.capture(task.model, task.example, task.loss)
console = Console(record=True, width=100)
console.print("$ packhorse inspect gpt2 --segments 4", style="bold")
console.print(partition_table(ph.partition(graph, 4)))
svg = console.export_svg(title="packhorse")
svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no fonts from elsewhere
(Path(__file__).parent / "inspect.svg").write_text(svg)
