#!/usr/bin/env bash
# Builds the documentation as a site in site/. Fails where a link leads nowhere, where a page is in no menu, and where a page would
# load something from another machine.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_venv.sh dev
rm -rf site
# Not --quiet: it hides the warnings from --strict as well.
NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
if grep -rnoE --include='*.html' '<(script|link|img|iframe)[^>]*(src|href)="?(https?:)?//[^" >]*' site; then
    echo "gdsstore: these pages load from elsewhere" >&2
    exit 1
fi
echo "gdsstore: see site/index.html, or: python3 -m http.server --bind 127.0.0.1 --directory site" >&2
