"""Runs Baton in containers, with docker or podman: `python -m tools.containers.NAME`, in the repository's root.

* `engine`: which of the two, and how it is called
* `base`: a base image from Debian's packages, for machines that reach no registry of images
* `images`: `make images`
* `stand_ins`: images of etcd, Envoy and Prometheus from what is installed here
* `hosts`: a cluster whose every process is as if on its own host
* `kube`: `deploy/overlays/small` with `podman play kube`
* `project`, `compose`: a Compose project; `make compose`

The first three need only the standard library, because images are built before anything is installed.
"""
