#!/usr/bin/env bash
# Installs what tests need from the system: Chromium for pages, Prometheus with promtool for dashboards and alerts, kubectl
# for manifests, toolchains for examples/. `install_system_packages.sh containers` installs what `make containers` needs
# instead. Debian and Ubuntu, as root.
set -euo pipefail

packages=()
if [ "${1:-}" = containers ]; then
    # With netavark and aardvark-dns the containers of a network know each other's names.
    for package in podman buildah runc catatonit debootstrap netavark aardvark-dns iptables libfaketime prometheus; do
        dpkg -s "$package" >/dev/null 2>&1 || packages+=("$package")
    done
else
    command -v chromium >/dev/null || command -v google-chrome >/dev/null || packages+=(chromium)
    command -v promtool >/dev/null || packages+=(prometheus)
    # With kustomize in it, to render the overlays.
    command -v kubectl >/dev/null || packages+=(kubernetes-client)
    command -v javac >/dev/null || packages+=(default-jdk-headless)
    command -v g++ >/dev/null || packages+=(g++)
    command -v cmake >/dev/null || packages+=(cmake)
    # golang-github-golang-protobuf-1-5-dev by its name, or else version 1.3 comes, which knows no optional fields.
    for package in protobuf-compiler libprotobuf-dev libgrpc++-dev protobuf-compiler-grpc \
        golang-go golang-github-golang-protobuf-1-5-dev golang-google-genproto-dev golang-google-grpc-dev protoc-gen-go-1-5 \
        protoc-gen-go-grpc libgeronimo-annotation-1.3-spec-java libgoogle-common-protos-java libgrpc-java libguava-java \
        libnetty-java libperfmark-java libprotobuf-java protobuf-compiler-grpc-java-plugin; do
        dpkg -s "$package" >/dev/null 2>&1 || packages+=("$package")
    done
fi

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
