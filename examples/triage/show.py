"""A few rows of a results file, for people:  python examples/triage/show.py results/triage.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path

for line in Path(sys.argv[1]).read_text().splitlines()[:4]:
    row = json.loads(line)
    print(f"\n{row['job_id']}  {row['input']['text']}")
    print(f"  → {row['output'] if row['ok'] else row['error']}")
