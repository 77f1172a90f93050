"""A run's numbers in the forms that other programs read: CSV, Prometheus, TensorBoard, a webhook.

A form may enter if it says only what run.json and the run's own files say.
"""
