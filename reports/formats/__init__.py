"""The formats, a module each: a run record in, text out, as a `Report`."""
