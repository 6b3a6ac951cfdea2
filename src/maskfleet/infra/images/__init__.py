"""Container images: built from deploy/docker, pushed to a registry, found again by `maskfleet launch`."""
