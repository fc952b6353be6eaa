"""Which links to other places are dead? Run once a week; the standard library is enough.

    python3 .github/scripts/dead_links.py

Only what is surely gone counts: 404, 410, or a host that no longer exists. Publishers answer scripts with 403 and 429, and
servers have bad days. Links to this project's own pages are left to the tests, which compare them with settings.ini.
"""
import configparser
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"https?://[^\s)\]>\"'`\\{}|]+")


def text(path):
    "What people read in a file: of a notebook its cells, of anything else all."
    content = path.read_text(encoding="utf-8")
    return "\n".join("".join(c["source"]) for c in json.loads(content)["cells"]) if path.suffix == ".ipynb" else content


def links():
    "Each address with the files that have it."
    parser = configparser.ConfigParser()
    parser.read(ROOT / "settings.ini")
    user = parser["DEFAULT"]["user"]
    found = {}
    names = subprocess.run(["git", "ls-files", "*.md", "*.ipynb", "*.cff", "book/*.yml"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.split():
        for address in LINK.findall(text(ROOT / name)):
            address = address.rstrip(".,;:*").split("#")[0]
            if not re.search(rf"//{user}\.|/{user}/|//(?:localhost|127\.0\.0\.1)\b", address):
                found.setdefault(address, set()).add(name)
    return found


def dead(address):
    "Why a link is dead, or None."
    for attempt in range(3):
        try:
            request = Request(address, headers={"User-Agent": "Mozilla/5.0 (link check)"})
            with urlopen(request, timeout=30):
                return None
        except HTTPError as error:
            if error.code in (404, 410):
                return str(error.code)
            return None
        except (URLError, OSError) as error:
            if attempt == 2:
                gone = "Name or service not known" in str(error) or "nodename nor servname" in str(error)
                return "no such host" if gone else None
            time.sleep(5)


def main():
    found = links()
    with ThreadPoolExecutor(8) as pool:
        reasons = dict(zip(found, pool.map(dead, found)))
    gone = [f"{reason}: {address}  ({', '.join(sorted(found[address]))})" for address, reason in reasons.items() if reason]
    print(f"{len(found)} links, {len(gone)} dead", *gone, sep="\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
