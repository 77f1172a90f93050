"""Kubernetes in small: an API server for the real kubectl, whose pods are processes here."""
