"""Twenty searches of users, each with the page that answers it; `make docs` asks the built site.

    python docs/site/searches.py build/docs

The search is the site's own: its worker (lunr, as mkdocs-material configures it) and its index, run by node. Exit
code 1 if a page is not among the first three; without node nothing is asked, and the command says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIRST = 3
SEARCHES = {
    "timeout": "docs/operate/waiting.md",
    "lease expired": "docs/operate/waiting.md",
    "resume after kill": "docs/how-to/resume.md",
    "reward function": "docs/how-to/rewards.md",
    "staleness": "docs/how-to/pacing.md",
    "disk full": "docs/operate/disks.md",
    "two hosts": "docs/how-to/two-hosts.md",
    "Ray": "docs/operate/cluster.md",
    "vLLM weights": "docs/how-to/vllm.md",
    "job file keys": "docs/reference/job-file.md",
    "priority": "docs/how-to/choose-rows.md",
    "drop rows": "docs/how-to/drop-rows.md",
    "backup": "docs/operate/snapshots.md",
    "upgrade": "docs/operate/compatibility.md",
    "metrics prometheus": "docs/reference/figures.md",
    "token": "docs/how-to/two-hosts.md",
    "agents multi turn": "docs/learn/first-agent.md",
    "memory limit": "docs/operate/servers.md",
    "slow trainer": "docs/how-to/pacing.md",
    "exit code": "docs/reference/command-line.md",
}


def ranks(site: Path) -> dict[str, tuple[int, list[str]]]:
    """Each search with the rank of its page (0: not found) and the first pages found."""
    command = ["node", str(HERE / "searches.mjs"), str(site)]
    ran = subprocess.run(command, input=json.dumps(list(SEARCHES)), capture_output=True, text=True, check=True)
    found = {
        query: [page.removesuffix(".html") + ".md" for page in pages] for query, pages in json.loads(ran.stdout).items()
    }
    return {
        query: (found[query].index(page) + 1 if page in found[query] else 0, found[query][:FIRST])
        for query, page in SEARCHES.items()
    }


def main(site: Path) -> int:
    """Print what misses; the exit code."""
    if shutil.which("node") is None:
        print("searches: node is not installed, so the site's search was not asked")
        return 0
    ranked = ranks(site)
    missed = {query: first for query, (rank, first) in ranked.items() if not 1 <= rank <= FIRST}
    for query, first in missed.items():
        print(f'searches: "{query}" finds {", ".join(first)} before {SEARCHES[query]} (rank {ranked[query][0]})')
    print(f"searches: {len(ranked) - len(missed)} of {len(ranked)} have their page among the first {FIRST}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
