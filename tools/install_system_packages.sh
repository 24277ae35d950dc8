#!/usr/bin/env bash
# Installs what tests need from the system: Chromium, for the page of `baton traces`, and Prometheus with promtool, for
# dashboards and alerts. Debian and Ubuntu, as root.
set -euo pipefail

packages=()
command -v chromium >/dev/null || command -v google-chrome >/dev/null || packages+=(chromium)
command -v promtool >/dev/null || packages+=(prometheus)

if [ ${#packages[@]} -eq 0 ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "These packages are missing: ${packages[*]}. Tests that need them are skipped, or fail under CI." >&2
    exit 0
fi
echo "Installing ${packages[*]}"
log=$(mktemp)
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    exit 1
fi
