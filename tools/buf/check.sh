#!/usr/bin/env bash
# Lints protos/ with buf, says how it is formatted otherwise, and holds it against the protos that clients have. Needs node; without it CI fails and a laptop skips.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v npm >/dev/null; then
    if [ -n "${CI:-}" ]; then
        echo "buf: npm was not found, and CI does not skip this: install Node.js" >&2
        exit 1
    fi
    echo "buf: SKIPPED, protos/ was not linted: npm was not found (install Node.js)" >&2
    exit 0
fi

buf=node_modules/.bin/buf
if [ ! -x "$buf" ] || [ package-lock.json -nt "$buf" ]; then
    # Not `npm ci`, which insists on every platform's package being in the lock file; versions and checksums come from it.
    npm install --no-save --ignore-scripts --loglevel=error >/dev/null
    touch "$buf"
fi
"./$buf" lint ../../protos
"./$buf" format --diff --exit-code ../../protos
# Renewed at a release, and where something is broken on purpose:
#   tools/buf/node_modules/.bin/buf build protos --exclude-source-info -o tools/buf/released.binpb
"./$buf" breaking ../../protos --against released.binpb
echo "buf: protos/ is clean, and breaks no client"
