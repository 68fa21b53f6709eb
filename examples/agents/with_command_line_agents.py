"""Claude Code, Codex or OpenCode reviews each file of a git repository, in a worktree of its own:
python examples/agents/with_command_line_agents.py codex . vllm://localhost:8000"""

import subprocess
import sys

from batch_agent import BatchAgent


def main(name: str = "claude-code", repository: str = ".", backend: str | None = None, binary: str = "") -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=repository, check=True, capture_output=True, text=True).stdout
    options = {f"{name.split('-')[0]}_bin": binary} if binary else {}
    results = BatchAgent.run_sync(
        runtime={"name": name, "working_dir": repository, "permissions": "read", **options},
        task="Read {path} and name its worst fault in one sentence.",
        inputs=[{"id": path, "path": path} for path in listed.splitlines()[:20]],
        backend=backend,
        run_dir=f"runs/{name}",
        resume=True,
    )
    for result in results:
        print(result.job_id, "→", result.output or result.error)


if __name__ == "__main__":
    main(*sys.argv[1:])
